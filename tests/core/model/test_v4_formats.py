"""DeepSeek-V4's native weights: experts of two e2m1 in a byte, scales named `.scale` that are
exponents, however a rank cuts them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_hybrid_config import TINY

from ds_runtime.assembly.assemble import find_loader
from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.description.hf import from_hf
from ds_runtime.description.tree import Stored
from ds_runtime.ops.contract import DeviceInfo, Dims, Facts
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.weights.quant import PartRequest, Quant
from examples import examples

FACTS = Facts(DeviceInfo("cpu", "", ""), Dims({}), dtype="float32")
FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}  # fmt: skip
EXPERT, LINEAR = "layers.3.ffn.experts.5.w1", "layers.3.attn.wo_a"
ROWS, COLS = 160, 192
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = torch.cat((E2M1, -E2M1))


def quant(**change):
    config = from_hf({**TINY, "quantization_config": FP8, **change})
    loader = find_loader(load_plugins(()).offers(FACTS), config)
    return Quant.open(loader, config.quantization)


def drawn(*shape, low=0, high=256):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """(folder, values of an expert, values of another weight)."""
    folder = tmp_path_factory.mktemp("v4")
    packed, powers = drawn(ROWS, COLS // 2), drawn(ROWS, COLS // 32, low=110, high=130)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()  # low bits are first
    expert = E2M1[codes] * torch.exp2(powers.double() - 127).repeat_interleave(32, 1)
    values = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(1))
    e4m3, grid = values.to(torch.float8_e4m3fn), drawn(2, 2, low=118, high=124)
    whole = torch.exp2(grid.double() - 127).repeat_interleave(128, 0).repeat_interleave(128, 1)
    tensors = {
        f"{EXPERT}.weight": packed.view(torch.int8),
        f"{EXPERT}.scale": powers.view(torch.float8_e8m0fnu),
        f"{LINEAR}.weight": e4m3,
        f"{LINEAR}.scale": grid.view(torch.float8_e8m0fnu),
    }
    save_file(tensors, folder / "model.safetensors")
    return folder, expert, e4m3.double() * whole[:ROWS, :COLS]


def read(folder, made, module, rows, cols):
    place = made.place(
        checkpoint := Checkpoint(folder), Stored(module, (ROWS, COLS), made.format_of(module))
    )
    encoding = made.encoding(module)
    return made.read(PartRequest(checkpoint, {}, module, encoding, place, rows, cols))


def cut(size):
    ends = st.tuples(st.integers(0, size), st.integers(0, size))
    return ends.map(lambda pair: slice(min(pair), max(pair)))


@settings(max_examples=examples(40), deadline=None)
@given(rows=cut(ROWS), cols=cut(COLS), routed=st.booleans())
def test_any_part_is_that_part_of_the_whole(stored, rows, cols, routed):
    folder, expert, other = stored
    part = read(folder, quant(), EXPERT if routed else LINEAR, rows, cols)
    assert part.format == ("mxfp4" if routed else "fp8_block")
    want = (expert if routed else other)[rows, cols]
    assert torch.equal(part.dequantise(torch.float64), want)


@pytest.mark.parametrize(
    ("change", "format"),
    [
        ({}, "mxfp4"),
        ({"expert_dtype": "fp4"}, "mxfp4"),
        ({"expert_dtype": "fp8"}, "fp8_block"),
        ({"quantization_config": {**FP8, "expert_dtype": "fp8"}}, "fp8_block"),
    ],
)
def test_the_dtype_of_experts_says_their_format(change, format):
    made = quant(**change)
    assert made.format_of(EXPERT) == format
    for module in (LINEAR, "layers.0.ffn.shared_experts.w2", "layers.2.attn.indexer.wq_b"):
        encoding = made.encoding(module)
        assert (encoding.format, encoding.tensors["scale"]) == ("fp8_block", "scale")
    assert made.encoding(EXPERT).tensors["scale"] == "scale"
    dense = ["embed", "head", "layers.1.ffn.gate", "layers.2.attn.indexer.weights_proj"]
    dense += [
        f"layers.2.attn.{at}compressor.{n}" for at in ("", "indexer.") for n in ("wkv", "wgate")
    ]
    assert {made.format_of(module) for module in dense} == {"dense"}


def test_older_models_keep_their_names():
    loader = find_loader(load_plugins(()).offers(FACTS), from_hf({**TINY}))
    assert loader.name == "dense"
    older = next(x for x in load_plugins(()).offers(FACTS).quant_loaders if x.name == "fp8")
    encoding = older.encodings(FP8)("model.layers.3.mlp.experts.5.up_proj")
    assert (encoding.format, encoding.tensors["scale"]) == ("fp8_block", "weight_scale_inv")
