"""Router scores in pieces of a long row, against float64."""

from __future__ import annotations

import pytest
import torch
from interpreter import needs_triton, patched_once

pytestmark = needs_triton


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])  # interpreted, no bfloat16
@pytest.mark.parametrize(
    ("tokens", "experts", "n"), [(5, 256, 4096), (33, 65, 4100), (300, 3, 4224)]
)
def test_rows_cut_into_pieces(tokens, experts, n, dtype):
    from ds_runtime_triton.router import router_logits

    make = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, n + 7, generator=make).to(dtype)[:, :n]
    weight = torch.randn(experts, n, generator=make)
    with patched_once():
        found, again = router_logits(x, weight), router_logits(x, weight)
    exact = x.double() @ weight.double().T
    assert found.dtype == torch.float32
    assert ((found - exact).abs().amax() / exact.abs().amax()).item() < 1e-6
    assert torch.equal(found, again)


@pytest.mark.parametrize("programs", [132, 6], ids=["in pieces", "whole"])
def test_many_tokens_of_short_rows(programs, monkeypatch):
    from ds_runtime_triton import router
    from ds_runtime_triton.router import router_logits

    monkeypatch.setattr(router, "_PROGRAMS", programs)  # 700 tokens need 12
    make = torch.Generator().manual_seed(1)
    x, weight = torch.randn(700, 200, generator=make), torch.randn(70, 200, generator=make)
    exact = x.double() @ weight.double().T
    with patched_once():
        found = router_logits(x, weight)
    assert ((found - exact).abs().amax() / exact.abs().amax()).item() < 1e-6


@pytest.mark.parametrize("whole", [True, False], ids=["held", "not held"])
@pytest.mark.parametrize("programs", [24, 6], ids=["in pieces", "whole"])
def test_weights_that_the_narrow_dtype_may_hold(programs, whole, monkeypatch):
    """One value in the last column decides which of the two kernels computes."""
    from ds_runtime_triton import router
    from ds_runtime_triton.jit import router as kernels
    from ds_runtime_triton.router import router_logits

    monkeypatch.setattr(router, "_PROGRAMS", programs)
    monkeypatch.setattr(router, "_narrows", lambda tokens: tokens >= 300)
    make = torch.Generator().manual_seed(2)
    x = torch.randn(300, 200, generator=make).half()
    weight = torch.randn(70, 207, generator=make).half().float()[:, :200]
    if not whole:
        weight[69, 199] += 1e-5
    exact = x.double() @ weight.double().T
    with patched_once():
        found = router_logits(x, weight)
    assert ((found - exact).abs().amax() / exact.abs().amax()).item() < 1e-6
    narrow, lost = torch.zeros(70, 200).half(), torch.zeros(70, dtype=torch.int32)
    with patched_once():
        kernels.router_narrow_kernel[(70,)](weight, narrow, lost, 200, 207, 64)
    assert lost.tolist() == [0] * 69 + [int(not whole)]
    assert torch.equal(narrow, weight.half())
