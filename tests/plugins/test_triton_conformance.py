"""Every Triton kernel in the interpreter, over its op's samples, against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
from interpreter import DEVICE, faithful, needs_triton

from ds_runtime.ops.contract import FP8_GROUPS
from ds_runtime.ops.kernel import Promises
from ds_runtime.ops.table import OPS
from ds_runtime.plugins.manager import load_plugins
from ds_runtime_kit.checks.codes import Coded
from ds_runtime_kit.checks.conformance import (
    SMALL_DIMS,
    TRUE_DIMS,
    case_id,
    cases_for,
    check_case,
    facts_for,
    signature_difference,
)
from ds_runtime_triton.kernels import ALL

pytestmark = needs_triton

EVERY = frozenset(OPS)
CACHE = frozenset(n for n, op in OPS.items() if op.layout)
SCALED = frozenset({"cache_write", "cache_gather", "sparse_prefill", "sparse_decode"})
MATRIX = frozenset({"linear", "experts", "mla_absorb", "mha_prefill", "mla_decode", "mha_decode"})
FLOAT32 = MATRIX | {"router_logits", "logprobs"}
SHORT = ("0x", "1x", "64x7", "ties", "no ", "negative", "saturated")  # of sample and route
# Weights of few bits take their time: one case per kind of code and of scale.
CODED = (
    "int4 zero",
    "int4 cut any",
    "fp8_channel odd",
    "mxfp8 cut",
    "nvfp4 cut",
    "mxfp4 odd",
    "int8_group zeros odd",
)
CODED_EXPERTS = ("int4_group zeros 77", "mxfp8 160")


def _short(kernel, case):
    """What the labels of this kernel's cases begin with that do not take long."""
    if kernel.op.name in ("sample", "route"):
        return SHORT
    if kernel.fn.endswith("_weight_only"):
        coded = CODED if kernel.op.name == "linear" else CODED_EXPERTS
        return coded if case.facts.dtype == "bfloat16" else ("nvfp4 cut", "int4 zero")
    return ""


def some(ops, dtype, dims=SMALL_DIMS, page=4, kv="", marks=()):
    """Cases of these ops, each once: running in the interpreter is always repeatable."""
    facts = facts_for(DEVICE, dtype, dims, page, kv)
    alone = Promises(deterministic=False)
    once = [replace(k, promises=alone) for k in ALL if k.op.name in ops]
    for kernel, case in cases_for(once, facts):
        long = not case.label.startswith(_short(kernel, case))
        some_marks = [*marks, pytest.mark.slow] if long else marks
        name = "-".join(filter(None, (case_id(kernel), case_id(case), kv, str(page))))
        yield pytest.param(kernel, case, id=name, marks=some_marks)


SLOW = [pytest.mark.slow]
BF16 = facts_for(DEVICE, "bfloat16")
CASES = [
    *some(EVERY, "bfloat16"),
    *some(FLOAT32, "float32"),
    *some(CACHE, "bfloat16", kv="float8_e4m3fn"),
    *some(SCALED, "bfloat16", kv=FP8_GROUPS),
    *some(EVERY - FLOAT32 - {"sample", "route"}, "float32", marks=SLOW),
    *some(EVERY - {"sample", "route", "logprobs"}, "float16", marks=SLOW),
    *some(CACHE | MATRIX - {"linear", "experts"}, "bfloat16", TRUE_DIMS, 16, marks=SLOW),
    *some({"mla_decode"}, "bfloat16", TRUE_DIMS, 64, "float8_e4m3fn", marks=SLOW),
    *(c for c in some({"mla_decode"}, "bfloat16", page=64) if "page edges" in str(c.id)),
    *some({"index_prologue", "index_scores"}, "bfloat16", TRUE_DIMS, 64, "float8_e4m3fn", SLOW),
    *some(SCALED, "float16", TRUE_DIMS, 64, FP8_GROUPS, SLOW),
]


@pytest.mark.parametrize(("kernel", "case"), CASES)
def test_conforms(kernel, case):
    offers = load_plugins(()).offers(case.facts)  # layouts, and references that write them
    with faithful():
        result = check_case(kernel, case, offers)
    result.raise_if_failed()


@pytest.mark.parametrize("kernel", ALL, ids=case_id)
def test_signatures_are_the_contracts(kernel):
    facts = facts_for(DEVICE, "bfloat16")
    assert signature_difference(kernel, facts) == ""


def test_the_whole_vocabulary_is_offered():
    """All but the fusions that some libraries have and whose parts serve here."""
    elsewhere = {"index_select", "mla_inputs", "mha_prefill_quantize"}
    # Those of V4, which references alone have so far.
    elsewhere |= {"hc_pre", "hc_post", "hc_head", "norm_rope", "rope_back", "compress_windows"}
    elsewhere |= {"window_prefill", "window_decode", "grouped_linear", "route_softplus"}
    elsewhere |= {"silu_mul_limited", "experts_limited", "index_encode"}
    assert {kernel.op.name for kernel in ALL} == set(OPS) - elsewhere


@pytest.mark.parametrize(
    ("kernel", "case"),
    [
        pytest.param(kernel, case, id=case_id(case))
        for kernel, case in cases_for((k for k in ALL if k.promises.takes_codes), BF16)
    ],
)
def test_codes_in_place_of_rows_give_the_same_bits(kernel, case):
    """Of weights that stay in blocks; others have no codes."""
    around = []

    def coded(target):
        around.append(Coded(target))
        return around[-1]

    once = replace(kernel, promises=replace(kernel.promises, deterministic=False))
    with faithful():
        result = check_case(once, case, around=coded)
    result.raise_if_failed()
    whole = case.label in ("fp8", "fp8 blocks", "fp8_block of other ranks")
    assert around[0].said == "" and (around[0].made or not whole)
