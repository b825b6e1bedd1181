"""The ROCm plugin's TileLang kernels on the GPU that is here: TileLang makes code for any."""

from __future__ import annotations

import pytest
import torch

from ds_runtime.ops.contract import DeviceInfo, Dims, Offers
from ds_runtime_kit.checks.conformance import TRUE_DIMS, check_kernel, facts_for
from ds_runtime_rocm import kernels, tilelang_dsa

KERNELS = [k for k in kernels.ATTENTION if k.provider == "tilelang"]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.op.name)
@pytest.mark.parametrize("heads", [4, 64, 128])
@pytest.mark.parametrize("page", [4, 64])
def test_conforms(kernel, page, heads):
    pytest.importorskip("tilelang")
    if not torch.cuda.is_available():
        pytest.skip("no GPU is here")
    device = DeviceInfo("cuda", "here", "gfx950", frozenset({"tilelang"}), frozenset({"bfloat16"}))
    dims = Dims({**TRUE_DIMS, "heads": heads})
    for dtype in ("bfloat16", "float16"):
        results = check_kernel(kernel, facts_for(device, dtype, dims, page), Offers())
        assert results and [r for r in results if not r.ok] == []


def test_offers_are_for_the_sparse_ops():
    assert {k.op.name for k in KERNELS} == {"index_scores", "sparse_prefill", "sparse_decode"}


@pytest.mark.parametrize(
    "name, heads, taken, kernel",
    [
        ("sm90", 16, 16, "shares"),
        ("sm90", 96, 16, "shares"),
        ("sm90", 128, 64, "wide"),
        ("gfx942", 128, 16, "shares"),
        ("gfx950", 128, 16, "shares"),
    ],
)
def test_heads_of_a_program(name, heads, taken, kernel):
    found = tilelang_dsa.tiling(name, heads)
    assert found[0] == taken
    assert found[1].kernel == kernel
