"""What one plugin packed, another computes with: the packings FP8_ROWS and FP8_EXPERTS."""

from __future__ import annotations

import pytest
import torch
from interpreter import DEVICE, needs_triton
from vendor_doubles import cuda, install

from ds_runtime.api import FP8_EXPERTS, FP8_ROWS
from ds_runtime.ops.reference.cases import Maker, SampleExperts
from ds_runtime.ops.reference.moe import ReferenceExperts
from ds_runtime.testing.conformance import facts_for
from ds_runtime.testing.numerics import relative_error

pytestmark = needs_triton
FACTS = facts_for(DEVICE, "bfloat16")


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    install(monkeypatch, cuda.MODULES, cuda.ADAPTERS)


def test_rows():
    from ds_runtime_cuda import deep_gemm
    from ds_runtime_triton.linear import LinearFp8

    make = Maker(FACTS, "rows")
    weight, x = make.weight(200, 384, "fp8_block"), make.normal(5, 384)
    packed = LinearFp8(FACTS).pack(weight, FACTS)
    other = deep_gemm.LinearFp8(FACTS)
    assert packed.tag == other.pack(weight, FACTS).tag == FP8_ROWS
    got = other.apply(x, packed)
    assert torch.equal(got, other.apply(x, other.pack(weight, FACTS)))
    assert relative_error(got, x.double() @ weight.dequantise(torch.float64).T) < 4e-2
    cut = make.weight(200, 384, "fp8_block", (96, 104))
    assert LinearFp8(FACTS).pack(cut, FACTS).tag != FP8_ROWS


def test_experts():
    from ds_runtime_cuda import deep_gemm
    from ds_runtime_triton.experts import ExpertsFp8

    make = Maker(FACTS, "experts")
    triples = [
        (
            make.weight(128, 256, "fp8_block"),
            make.weight(128, 256, "fp8_block"),
            make.weight(256, 128, "fp8_block"),
        )
        for _ in range(4)
    ]
    packed = ExpertsFp8(FACTS).pack(SampleExperts(triples), FACTS)
    assert packed.tag == FP8_EXPERTS
    x, weights = make.normal(6, 256), make.uniform(6, 2).float()
    ids = torch.stack([make.order(4)[:2] for _ in range(6)]).int()
    got = deep_gemm.ExpertsFp8(FACTS).apply(x, weights, ids, packed)
    wide = facts_for(DEVICE, "float64")
    oracle = ReferenceExperts(wide)
    held = oracle.pack(SampleExperts(triples), wide)
    assert relative_error(got, oracle.apply(x.double(), weights.double(), ids, held)) < 6e-2
