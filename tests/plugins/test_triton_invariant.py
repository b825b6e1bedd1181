"""Triton kernels where rows must have bits of their own: right, and the same alone as in company.

In the interpreter a tile's product is numpy's, whose bits may hang on the tile's size: what a GPU
gives is compared by benchmarks/device_invariant.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from interpreter import DEVICE, faithful, needs_triton

from ds_runtime.ops.table import OPS
from ds_runtime_kit.checks import rows
from ds_runtime_kit.checks.conformance import (
    SMALL_DIMS,
    case_id,
    cases_for,
    check_case,
    facts_for,
)
from ds_runtime_triton.kernels import ALL, ORDERED

pytestmark = needs_triton
ELEMENTWISE = frozenset({"sample", "route", "logprobs", "mask_logits"})  # slow here, and as ever
OWN = [k for k in (*ALL, *ORDERED) if k.batch_invariant and k.op.name not in ELEMENTWISE]


def cases(dtype):
    facts = replace(facts_for(DEVICE, dtype, SMALL_DIMS, 4, ""), batch_invariant=True)
    for kernel, case in cases_for(OWN, facts):
        yield pytest.param(kernel, case, id=f"{case_id(kernel)}-{case_id(case)}")


@pytest.mark.parametrize(("kernel", "case"), [*cases("bfloat16")])
def test_it_is_right(kernel, case):
    with faithful():
        result = check_case(kernel, case)
    assert not result.failure, result


@pytest.mark.parametrize(("kernel", "case"), [*cases("bfloat16")])
def test_rows_alone(kernel, case):
    if not rows.can_be_taken_apart(kernel.op):
        pytest.fail(f"the contract knows no rows of {kernel.op.name}")
    with faithful():
        assert not rows.is_invariant(kernel, case)


def test_every_op_of_a_dense_model_has_such_a_kernel():
    needed = {"embed", "linear", "rms_norm", "add_rms_norm", "mla_absorb", "mla_decode", "experts"}
    needed |= {"mla_prologue", "silu_mul", "router_logits", "route", "sample", "logprobs"}
    assert needed <= {k.op.name for k in (*ALL, *ORDERED) if k.batch_invariant} <= OPS.keys()
