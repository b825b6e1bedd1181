"""Every canonical format: its meaning element by element, rounding to it, and what is the same
number in another."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_runtime.errors import UnsupportedError
from ds_runtime.ops.contract import DeviceInfo, Dims, Facts
from ds_runtime.ops.formats import BLOCKED, FORMATS, conversions
from ds_runtime.ops.reference.cases import Maker
from ds_runtime.ops.reference.matrices.rounding import convert_part, quantise_part, to_e2m1
from ds_runtime.ops.weight import WeightPart
from examples import examples

FACTS = Facts(DeviceInfo("cpu", "", ""), Dims({}), dtype="float32")
ROUNDED = [name for name in BLOCKED if name != "int4_actorder"]
FLOATS = {"fp8": ml_dtypes.float8_e4m3fn, "e8m0": ml_dtypes.float8_e8m0fnu}
BYTES = np.arange(256, dtype=np.uint8)
CODES = {  # every number that a code can be
    "float8_e4m3fn": BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float64),
    "uint8": BYTES[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float64),
    "int8": np.arange(-127.0, 128),
    "int4": np.arange(-8.0, 8),
}
LOST = {"fp8_": 0.063, "mxfp": 0.3, "int8": 0.01, "int4": 0.3, "w4af": 0.3, "nvfp": 0.3}
ONE = torch.ones(1)


def dense(values: torch.Tensor) -> WeightPart:
    return WeightPart("w", "dense", (values.shape[0], values.shape[1]), {"weight": values})


def number(tensor: torch.Tensor, row: int, col: int) -> float:
    """One element by an independent reader of its dtype."""
    if tensor.dtype == torch.float8_e4m3fn:
        return float(tensor.view(torch.uint8).numpy().view(FLOATS["fp8"])[row, col])
    if tensor.dtype == torch.uint8:
        return float(tensor.numpy().view(FLOATS["e8m0"])[row, col])
    return float(tensor[row, col])


@pytest.mark.parametrize("cut", [(0, 0), (3, 5)])
@pytest.mark.parametrize("fmt", [*BLOCKED, "int4_group zeros", "int8_group zeros"])
def test_a_value_is_its_code_less_zero_times_scale_times_global(
    fmt: str, cut: tuple[int, int]
) -> None:
    down = FORMATS[fmt.partition(" ")[0]].block[0]
    offset = (cut[0] if down != 1 else 0, cut[1])  # less than a block
    part = Maker(FACTS, fmt).weight(37, 75, fmt, offset=offset).parts[0]
    got, t = part.dequantise(torch.float64), part.tensors
    fmt = part.format
    assert t["weight"].dtype == getattr(torch, FORMATS[fmt].codes)
    assert part.block is not None
    for r in range(37):
        for c in range(75):
            i, j = ((n + o) // b for n, o, b in zip((r, c), offset, part.block, strict=True))
            if "group" in t:
                j = int(t["group"][c])
            if fmt in ("nvfp4", "mxfp4"):
                nibble = t["weight"].numpy()[r : r + 1, c]
                code = float(nibble.view(ml_dtypes.float4_e2m1fn)[0])
            else:
                code = number(t["weight"], r, c)
            if "zero" in t:
                code -= int(t["zero"][i, j])
            scale = number(t["scale"], i, j) * (float(t["global"]) if "global" in t else 1.0)
            assert got[r, c].item() == pytest.approx(code * scale, rel=1e-15)


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 300)),
    fmt=st.sampled_from(ROUNDED),
    size=st.sampled_from([1e-6, 1.0, 1e6]),
)
def test_rounding_takes_the_nearest_code_and_uses_the_range(
    seed: int, shape: tuple[int, int], fmt: str, size: float
) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size
    values[0, 0] = 0
    part = quantise_part(dense(values), fmt, 128)
    assert part.block is not None
    back = part.dequantise(torch.float64)
    assert float((back - values).norm()) <= LOST[fmt[:4]] * float(values.norm())
    height, width = part.block
    codes = CODES[FORMATS[fmt].codes if "int4" not in fmt and fmt != "w4afp8" else "int4"]
    codes = torch.from_numpy(np.unique(codes[np.isfinite(codes)]))
    for i, r in enumerate(range(0, shape[0], height)):
        for j, c in enumerate(range(0, shape[1], width)):
            scale = number(part.tensors["scale"], i, j) * float(part.tensors.get("global", ONE))
            at = slice(r, r + height), slice(c, c + width)
            reach = (values[at].double().unsqueeze(-1) - codes * scale).abs().amin(-1)
            error = (back[at] - values[at]).abs()
            assert (error <= reach * (1 + 1e-4) + abs(scale) * 1e-6).all()


def test_zeros_stay_zeros() -> None:
    for fmt in ROUNDED:
        part = quantise_part(dense(torch.zeros(3, 40)), fmt, 32)
        assert part.dequantise().eq(0).all(), fmt
        scale = part.tensors["scale"]
        assert scale.dtype != torch.uint8 or scale.ne(255).all()


@given(value=st.floats(-8, 8, width=32))
def test_e2m1_rounds_as_ml_dtypes_does(value: float) -> None:
    want = np.float32(value).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert int(to_e2m1(torch.tensor([value]))[0]) == int(want)


@pytest.mark.parametrize("value", [-5.0, -3.5, -2.5, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
def test_e2m1_ties_go_to_the_even_code(value: float) -> None:
    want = np.float32(value).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert int(to_e2m1(torch.tensor([value]))[0]) == int(want)


@pytest.mark.parametrize("source", BLOCKED)
def test_what_a_conversion_calls_exact_is(source: str) -> None:
    part = Maker(FACTS, source).weight(70, 96, source).parts[0]
    before = part.dequantise(torch.float64)
    tried = conversions(source)
    assert tried and tried[0].exact and {c.target for c in tried} <= set(FORMATS)
    assert set(conversions(source, compact=True)) == set(tried)
    for conversion in tried:
        made = convert_part(part, conversion.target, torch.float64)
        assert made.format == conversion.target
        error = (made.dequantise(torch.float64) - before).norm() / before.norm()
        # Rounding a scale to float32 before it is multiplied is the only freedom.
        assert error <= (1e-7 if conversion.exact else 0.12), conversion
        assert str(conversion).startswith(f"{source} → {conversion.target} (")


def test_bits_per_weight() -> None:
    said = {c.target: c.bits for c in conversions("nvfp4")}
    assert said["dense"] == "4.5 → 16 bits per weight"
    assert said["mxfp8"] == "4.5 → 8.25 bits per weight"
    assert math.isclose(FORMATS["w4afp8"].nbytes(128, 256, 2), 128 * 128 + 4 * 256)
    assert conversions("dense") == ()


def test_a_format_of_a_plugins_own_can_be_held_dense() -> None:
    assert [c.target for c in conversions("int3")] == ["dense"]
    with pytest.raises(UnsupportedError, match="cannot round to weight format 'int4_actorder'"):
        quantise_part(dense(torch.ones(1, 1)), "int4_actorder")
