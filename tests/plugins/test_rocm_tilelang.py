"""The ROCm plugin's TileLang kernels on the GPU that is here: TileLang makes code for any."""

from __future__ import annotations

import pytest
import torch

from ds_runtime.ops.spec import DeviceInfo, Offers
from ds_runtime.testing.conformance import TRUE_DIMS, check_kernel, facts_for
from ds_runtime_rocm import kernels

KERNELS = [k for k in kernels.ATTENTION if k.provider == "tilelang"]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.op.name)
@pytest.mark.parametrize("page", [4, 64])
def test_conforms(kernel, page):
    pytest.importorskip("tilelang")
    if not torch.cuda.is_available():
        pytest.skip("no GPU is here")
    device = DeviceInfo("cuda", "here", "gfx950", frozenset({"tilelang"}), frozenset({"bfloat16"}))
    for dtype in ("bfloat16", "float16"):
        results = check_kernel(kernel, facts_for(device, dtype, TRUE_DIMS, page), Offers())
        assert results and [r for r in results if not r.ok] == []


def test_offers_are_for_the_sparse_ops():
    assert {k.op.name for k in KERNELS} == {"index_scores", "sparse_prefill", "sparse_decode"}
