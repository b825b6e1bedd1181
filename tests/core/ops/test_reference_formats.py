"""FP8 blocks, element by element; FP8 arithmetic, block by block; the built-in loaders."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_runtime.assembly.assemble import find_loader
from ds_runtime.description.hf import from_hf
from ds_runtime.errors import UnsupportedError
from ds_runtime.ops.contract import DeviceInfo, Dims, Facts, QuantLoader
from ds_runtime.ops.dtypes import torch_dtype
from ds_runtime.ops.reference.matrices.linear import Fp8W8A8Linear, quantize_group
from ds_runtime.ops.weight import Weight, WeightPart
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.weights.loaders import ds_quant_loaders
from ds_runtime_bench.shapes import config_of
from examples import examples

FACTS = Facts(DeviceInfo("cpu", "", ""), Dims({}), dtype="float32")


def decode_e4m3(byte: int) -> float:
    """The number that an e4m3fn byte stands for, from its bits."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (
        mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    )


def fp8_part(
    seed: int, shape: tuple[int, int], block: tuple[int, int], offset: tuple[int, int], scale: str
) -> WeightPart:
    random = np.random.default_rng(seed)
    codes = random.integers(0, 256, size=shape, dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x7E  # no NaN
    grid = tuple(-(-(n + o) // b) for n, o, b in zip(shape, offset, block, strict=True))
    if scale in ("uint8", "float8_e8m0fnu"):
        scales = torch.from_numpy(random.integers(100, 140, size=grid, dtype=np.uint8))
        scales = scales.view(torch_dtype(scale))
    else:
        scales = torch.from_numpy(random.normal(size=grid)).to(torch_dtype(scale))
    weight = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    return WeightPart("w", "fp8_block", shape, {"weight": weight, "scale": scales}, block, offset)


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shape=st.tuples(st.integers(1, 23), st.integers(1, 23)),
    block=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    offset=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    scale=st.sampled_from(["float32", "bfloat16", "uint8", "float8_e8m0fnu"]),
    slab=st.sampled_from([1, 50, 1 << 22]),
)
def test_fp8_blocks_equal_an_element_by_element_loop(
    seed: int, shape: tuple[int, int], block: tuple[int, int], offset: tuple[int, int],
    scale: str, slab: int,
) -> None:  # fmt: skip
    offset = (offset[0] % block[0], offset[1] % block[1])
    part = fp8_part(seed, shape, block, offset, scale)
    codes = part.tensors["weight"].view(torch.uint8).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ds_runtime.ops.weight._SLAB_ELEMENTS", slab)
        got = part.dequantise(torch.float64)
    one_byte = part.tensors["scale"].element_size() == 1
    raw = part.tensors["scale"].view(torch.uint8) if one_byte else part.tensors["scale"]
    for r in range(shape[0]):
        for c in range(shape[1]):
            s = raw[(r + offset[0]) // block[0], (c + offset[1]) // block[1]].item()
            factor = 2.0 ** (s - 127) if one_byte else s
            assert got[r, c].item() == decode_e4m3(codes[r][c]) * factor


def test_scale_bytes_reach_both_ends() -> None:
    scale = torch.tensor([[0, 254, 255]], dtype=torch.uint8)
    one = torch.ones(1, 3).to(torch.float8_e4m3fn)
    part = WeightPart("w", "fp8_block", (1, 3), {"weight": one, "scale": scale}, (1, 1))
    low, high, nan = part.dequantise(torch.float32)[0].tolist()
    assert (low, high) == (2.0**-127, 2.0**127)
    assert math.isnan(nan)


def test_what_cannot_be_decoded_is_named() -> None:
    part = fp8_part(0, (300, 8), (128, 128), (0, 0), "float32")
    cut = WeightPart("w", part.format, part.shape, part.tensors, part.block, offset=(100, 0))
    with pytest.raises(UnsupportedError, match=r"w: scale grid \(3, 1\) does not cover"):
        cut.dequantise()
    with pytest.raises(UnsupportedError, match="'int3' has no dequantiser"):
        WeightPart("w", "int3", (1, 1), {}).dequantise()
    with pytest.raises(UnsupportedError, match="needs a block size"):
        WeightPart("w", "fp8_block", part.shape, part.tensors).dequantise()


def shout(part: WeightPart, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(part.shape, 42.0, dtype=dtype)


def test_a_part_may_bring_its_own_dequantiser() -> None:
    part = WeightPart("w", "int3", (2, 3), {}, dequantiser=f"{__name__}:shout")
    assert Weight((part, part)).dequantise().tolist() == [[42.0] * 3] * 4


@settings(max_examples=examples(40), deadline=None)
@given(values=st.lists(st.floats(-1e5, 1e5, width=32), min_size=4, max_size=4), ue8m0=st.booleans())
def test_activation_scales_follow_the_formula(values: list[float], ue8m0: bool) -> None:
    q, scale = quantize_group(torch.tensor([values]), 4, ue8m0)
    want = np.float32(max(max(abs(v) for v in values), np.float32(1e-4))) / np.float32(448)
    if ue8m0:
        want = 2.0 ** math.ceil(math.log2(want) - 1e-9)
    np.testing.assert_allclose(scale.item(), want, rtol=1e-6)
    for code, v in zip(q.view(torch.uint8)[0].tolist(), values, strict=True):
        # Half a step of three mantissa bits, or of the smallest subnormal.
        assert abs(decode_e4m3(code) * want - v) <= max(abs(v) / 16, want * 2.0**-10) * 1.0001


@pytest.mark.parametrize(
    ("shape", "offset", "scale"),
    [
        ((5, 256), (0, 0), "float32"),
        ((130, 300), (64, 37), "float32"),
        ((9, 128), (0, 0), "uint8"),
        ((9, 256), (0, 0), "powers in float32"),
    ],
)
def test_fp8_arithmetic_equals_a_loop_over_blocks(
    shape: tuple[int, int], offset: tuple[int, int], scale: str
) -> None:
    """Σ over K blocks of (Σ a8·w8 in fp32)·s_a·s_w, per output, as DeepSeek-V3's report says."""
    in_float, powers = scale == "powers in float32", scale != "float32"
    part = fp8_part(3, shape, (128, 128), offset, "uint8" if powers else scale)
    scales = part.tensors["scale"].double()
    scales = 2.0 ** (scales - 127) if powers else scales
    if in_float:
        tensors = {**part.tensors, "scale": scales.float()}
        part = WeightPart("w", part.format, shape, tensors, part.block)
    x = torch.randn(3, shape[1], generator=torch.Generator().manual_seed(0))
    kernel = Fp8W8A8Linear(FACTS)
    got = kernel.apply(x, kernel.pack(Weight((part,)), FACTS))
    codes = np.vectorize(decode_e4m3)(part.tensors["weight"].view(torch.uint8).numpy())
    want = np.zeros((3, shape[0]))
    edges = [0, *range(128 - offset[1], shape[1], 128), shape[1]]
    for t in range(3):
        for block, (lo, hi) in enumerate(itertools.pairwise(edges)):
            s = max(float(x[t, lo:hi].abs().max()), 1e-4) / 448
            s = 2.0 ** math.ceil(math.log2(s)) if powers else s
            a8 = (x[t, lo:hi] / s).to(torch.float8_e4m3fn).double().numpy()
            for r in range(shape[0]):
                w_scale = scales[(r + offset[0]) // 128, block].item()
                want[t, r] += codes[r, lo:hi] @ a8 * s * w_scale
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * np.abs(want).max())


def loaders() -> dict[str, QuantLoader]:
    return {x.name: x for x in ds_quant_loaders(FACTS)}


V3 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}


def test_loaders_accept_what_they_read_and_nothing_else() -> None:
    dense, fp8 = loaders()["dense"], loaders()["fp8"]
    assert dense.accepts({}) and not dense.accepts(V3)
    assert fp8.accepts(V3) and fp8.accepts({**V3, "scale_fmt": "ue8m0"})
    assert not fp8.accepts({})
    for wrong in (
        {"weight_block_size": [64, 0]},
        {"weight_block_size": None},
        {"fmt": "e5m2"},
        {"activation_scheme": "static"},
        {"quant_method": "awq"},
    ):
        assert not fp8.accepts({**V3, **wrong}), wrong
    assert fp8.refuse is not None and fp8.refuse(V3) is None
    assert fp8.refuse({**V3, "quant_method": "awq"}) is None  # for others to say


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight_block_size": [64, 0]}, "weight_block_size [64, 0] is not supported; expected"),
        ({"fmt": "e5m2"}, "fmt 'e5m2' is not supported; expected 'e4m3'"),
        ({"activation_scheme": "static"}, "activation_scheme 'static' is not supported"),
        ({"quant_method": "exl2"}, "quant_method 'exl2'"),
    ],
)
def test_the_value_at_fault_is_named_with_its_file(change: dict[str, object], said: str) -> None:
    raw = {**config_of("tiny-v3", "fp8"), "quantization_config": {**V3, **change}}
    offers = load_plugins(()).offers(FACTS)
    with pytest.raises(UnsupportedError) as caught:
        find_loader(offers, from_hf(raw), "/m/config.json")
    assert str(caught.value).startswith("/m/config.json: quantization_config")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("module", "want"),
    [
        ("model.layers.3.self_attn.q_a_proj", "fp8_block"),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa", "fp8_block"),
        ("model.layers.3.mlp.gate_proj", "fp8_block"),
        ("layers.3.mlp.experts.17.down_proj", "fp8_block"),
        ("model.layers.3.mlp.gate", "dense"),
        ("model.layers.3.self_attn.q_a_layernorm", "dense"),
        ("model.embed_tokens", "dense"),
        ("embed", "dense"),
        ("lm_head", "dense"),
        ("model.layers.61.eh_proj", "dense"),
        ("model.layers.61.shared_head.head", "dense"),
    ],
)
def test_native_fp8_checkpoints_keep_some_modules_dense(module: str, want: str) -> None:
    assert loaders()["fp8"].encodings(V3)(module).format == want
    assert loaders()["dense"].encodings({})(module).format == "dense"


def test_modules_not_to_convert_are_whole_path_parts() -> None:
    fp8 = loaders()["fp8"]
    quantization = {**V3, "modules_to_not_convert": ["o_proj", "model.layers.1", "self_attn.kv_b"]}
    dense = ["layers.7.self_attn.o_proj", "model.layers.1.mlp.up_proj"]
    kept = ["layers.7.self_attn.q_b_proj", "model.layers.11.mlp.up_proj", "a.self_attn.kv_b_proj"]
    assert {fp8.encodings(quantization)(m).format for m in dense} == {"dense"}
    assert {fp8.encodings(quantization)(m).format for m in kept} == {"fp8_block"}
