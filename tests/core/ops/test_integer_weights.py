"""Integer weight formats: their meaning element by element, and rounding to them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_runtime.assembly.site_list import target_format
from ds_runtime.errors import UnsupportedError
from ds_runtime.ops.reference.matrices.rounding import quantise_part
from ds_runtime.ops.weight import WeightPart
from examples import examples


def dense(values: np.ndarray) -> WeightPart:
    tensor = torch.from_numpy(values.astype(np.float32))
    return WeightPart("w", "dense", (tensor.shape[0], tensor.shape[1]), {"weight": tensor})


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 40)),
    group=st.integers(1, 17),
    offset=st.integers(0, 16),
    zeros=st.booleans(),
)
def test_a_code_means_itself_less_zero_times_its_groups_scale(
    seed: int, shape: tuple[int, int], group: int, offset: int, zeros: bool
) -> None:
    random = np.random.default_rng(seed)
    groups = -(-(shape[1] + offset) // group)
    codes = random.integers(0, 16, size=shape, dtype=np.int8)
    scales = random.normal(size=(shape[0], groups)).astype(np.float32)
    zero = random.integers(0, 16, size=(shape[0], groups), dtype=np.int8)
    tensors = {"weight": torch.from_numpy(codes), "scale": torch.from_numpy(scales)}
    if zeros:
        tensors["zero"] = torch.from_numpy(zero)
    part = WeightPart("w", "int4_group", shape, tensors, (1, group), (0, offset))
    got = part.dequantise(torch.float64).numpy()
    for row in range(shape[0]):
        for col in range(shape[1]):
            at = (col + offset) // group
            less = int(zero[row, at]) if zeros else 0
            assert got[row, col] == (int(codes[row, col]) - less) * float(scales[row, at])


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 300)),
    fmt=st.sampled_from(["int8_channel", "int4_group"]),
    size=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
)
def test_rounding_errs_by_at_most_half_a_step(
    seed: int, shape: tuple[int, int], fmt: str, size: float
) -> None:
    values = np.random.default_rng(seed).normal(size=shape) * size
    values[0, 0] = 0
    rounded = quantise_part(dense(values), fmt, 128)
    codes = rounded.tensors["weight"].numpy().astype(np.int64)
    low, high = (-127, 127) if fmt == "int8_channel" else (-8, 7)
    assert low <= codes.min() and codes.max() <= high
    step = rounded.tensors["scale"].abs().to(torch.float64).numpy()
    wide = np.repeat(step, shape[1] if fmt == "int8_channel" else 128, axis=1)[:, : shape[1]]
    # +8 does not exist: an opposite of the largest value is a whole step away.
    bound = wide * (0.5 if fmt == "int8_channel" else 1.0) * (1 + 1e-5)
    error = np.abs(rounded.dequantise(torch.float64).numpy() - values.astype(np.float32))
    assert (error <= bound).all()
    if fmt == "int4_group":
        assert (error <= bound / 2 + (codes == 7) * bound).all()


def test_a_row_of_zeros_stays_zero_and_the_largest_value_stays_itself() -> None:
    values = np.zeros((3, 256))
    values[1, 5], values[2, 200] = 3.0, -7.0
    for fmt in ("int8_channel", "int4_group"):
        back = quantise_part(dense(values), fmt, 128).dequantise().numpy()
        assert back == pytest.approx(values, rel=1e-6)


def test_fp8_weights_are_rounded_from_their_values() -> None:
    weight = torch.linspace(-400, 400, 256).view(2, 128).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.5]])
    part = WeightPart(
        "w", "fp8_block", (2, 128), {"weight": weight, "scale": scale}, block=(128, 128)
    )
    values = weight.to(torch.float32).numpy() * 0.5
    rounded = quantise_part(part, "int8_channel", 0)
    assert np.abs(rounded.dequantise().numpy() - values).max() <= 200 / 127 / 2 * 1.001


def test_other_formats_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="w: cannot round to weight format 'int3'"):
        quantise_part(dense(np.ones((1, 1))), "int3", 32)


@pytest.mark.parametrize(
    ("quantize", "module", "stored", "target"),
    [
        ("none", "lm_head", "dense", "dense"),
        ("int8", "lm_head", "dense", "int8_channel"),
        ("int4", "lm_head", "dense", "int8_channel"),
        ("int8", "model.layers.0.self_attn.kv_b_proj", "fp8_block", "fp8_block"),
        ("int4", "model.layers.3.mlp.experts.7.up_proj", "fp8_block", "int4_group"),
        ("int8", "model.layers.3.self_attn.o_proj", "dense", "int8_channel"),
        ("int4", "model.layers.3.self_attn.o_proj", "awq", "awq"),
    ],
)
def test_what_is_rounded_to_what(quantize: str, module: str, stored: str, target: str) -> None:
    assert target_format(quantize, module, stored) == target
