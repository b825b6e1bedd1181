"""Weights of few bits as the Triton plugin packs them: memory, values, and what is not taken."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import DEVICE, needs_triton

from ds_runtime.ops.formats import FORMATS
from ds_runtime.ops.reference.cases import Maker
from ds_runtime.ops.weight import Weight
from ds_runtime_kit.checks.conformance import facts_for
from examples import examples

pytestmark = needs_triton
READ = (
    "int4_group",
    "int8_group",
    "w4afp8",
    "nvfp4",
    "mxfp4",
    "mxfp8",
    "fp8_channel",
    "fp8_tensor",
)
FACTS = facts_for(DEVICE, "bfloat16")


@settings(max_examples=examples(60), deadline=None)
@given(
    fmt=st.sampled_from((*READ, "int4_group zeros", "int8_group zeros")),
    rows=st.integers(1, 40),
    cols=st.integers(1, 300),
    left=st.integers(0, 200),
    parts=st.booleans(),
)
def test_any_shard_gives_its_values_back(fmt, rows, cols, left, parts):
    from ds_runtime_triton.coded import coded, form_of, wide_values

    make = Maker(FACTS, f"{fmt} {rows} {cols} {left}")
    cut = left % 16 if fmt in ("fp8_channel", "fp8_tensor") else left % 32
    first = make.weight(rows, cols, fmt, offset=(0, cut))
    weight = Weight(first.parts * 2) if parts else first
    form = form_of(weight)
    assert form is not None
    held, want = wide_values(coded(weight, form)), weight.dequantise(torch.float64)
    assert held.shape == want.shape
    assert (held - want).abs().max() <= 2e-7 * want.abs().max()


@pytest.mark.parametrize("fmt", READ)
def test_memory_is_the_formats_own(fmt):
    """What the plan estimates, and at most a scale per row and the counters of tiles more."""
    from ds_runtime.ops.reference.matrices.rounding import quantise_part
    from ds_runtime_triton.weight_only import LinearWeightOnly

    (dense,) = Maker(FACTS, fmt).weight(256, 2048, dtype=torch.float32).parts
    packed = LinearWeightOnly(FACTS).pack(Weight((quantise_part(dense, fmt),)), FACTS)
    spare = 4 * 256 + 8 + packed.tensors["arrived"].nbytes
    assert packed.nbytes <= FORMATS[fmt].nbytes(256, 2048, 2) + spare


def test_tokens_in_fp8_read_int4_codes_in_bytes():
    from ds_runtime_triton.coded import coded, form_of, wide_values

    weight = Maker(FACTS, "bytes").weight(9, 200, "w4afp8")
    form = form_of(weight, bytes_for_fp8=True)
    assert form is not None and form.word == torch.uint8 and form.planes == 2
    torch.testing.assert_close(wide_values(coded(weight, form)), weight.dequantise())
    for fmt, cut in (("int4_group zeros", 0), ("w4afp8", 7), ("nvfp4", 0)):
        other = Maker(FACTS, fmt).weight(9, 200, fmt, offset=(0, cut))
        assert form_of(other, bytes_for_fp8=True) is None


def test_negative_and_zero_scales_of_e4m3_keep_their_meaning():
    from ds_runtime_triton.coded import coded, form_of, wide_values

    (part,) = Maker(FACTS, "signs").weight(6, 64, "nvfp4").parts
    scale = part.tensors["scale"].to(torch.float32)
    scale[::2] *= -1
    scale[1, 1], scale[2, 2], scale[3, 3] = 0, 2.0**-9, 448
    part = replace(part, tensors={**part.tensors, "scale": scale.to(torch.float8_e4m3fn)})
    weight = Weight((part,))
    form = form_of(weight)
    assert form is not None and form.shift
    torch.testing.assert_close(
        wide_values(coded(weight, form)), weight.dequantise(), rtol=1e-6, atol=0
    )


def test_groups_that_are_cut_too_finely_are_held_dense():
    from ds_runtime_triton.weight_only import LinearWeightOnly

    (part,) = Maker(FACTS, "fine").weight(8, 64, "nvfp4").parts
    (other,) = Maker(FACTS, "other").weight(8, 64, "nvfp4", offset=(0, 7)).parts
    weight = Weight((part, other))
    packed = LinearWeightOnly(FACTS).pack(weight, FACTS)
    assert packed.tensors["dense"] is not None
    torch.testing.assert_close(
        packed.dequantise(), weight.dequantise(torch.bfloat16).to(torch.float32)
    )


def test_other_formats_are_refused():
    from ds_runtime_triton.weight_only import LinearWeightOnly

    with pytest.raises(TypeError, match=r"reads .*nvfp4.* not int8_channel"):
        LinearWeightOnly(FACTS).pack(Maker(FACTS, "no").weight(4, 8, "int8_channel"), FACTS)


def test_what_decodes_by_instructions_of_the_device_compiles() -> None:
    script = Path(__file__).parent / "decoders_for_sm90.py"
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
