"""On a GPU, values that are none stay none where activations become codes: the interpreter's e4m3
has no NaN."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


def spoiled() -> torch.Tensor:
    x = torch.randn(5, 256, device="cuda").bfloat16()
    x[1, 3], x[3] = float("nan"), float("nan")
    return x


def decoded(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return q.float() * scale.repeat_interleave(128, 1)


@pytest.mark.parametrize("ue8m0", [False, True])
def test_a_nan_is_no_small_number(ue8m0):
    from ds_runtime_cuda.quant import quantise
    from ds_runtime_triton.norm import add_rms_norm_quantize, rms_norm_quantize
    from ds_runtime_triton.quant import quantize_group

    x, ones = spoiled(), torch.ones(256, device="cuda")
    assert torch.equal(decoded(*quantize_group(x, 128, ue8m0)).isnan(), x.isnan())
    assert torch.equal(decoded(*quantise(x, powers=ue8m0)).isnan(), x.isnan())
    q, scale, summed = add_rms_norm_quantize(x, x * 2, ones, 1e-6, 128, ue8m0)
    assert torch.equal(summed.isnan(), x.isnan())
    for found in (decoded(*rms_norm_quantize(x, ones, 1e-6, 128, ue8m0)), decoded(q, scale)):
        assert found[[1, 3]].isnan().all() and found[[0, 2, 4]].isfinite().all()
