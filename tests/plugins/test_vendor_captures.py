"""Kernels of captured steps on devices that are not here, over stand-ins for library and graphs.

A replay with other inputs, and with the state of another step, gives the bits of a call; what would
wait for the device, or copy from the host, cannot be captured. `test_npu_tasks.py` asks Ascend's.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vendor_doubles import aiter, cuda, device, install, xpu
from vendor_doubles.served import on_host

from ds_runtime.ops.contract import Dims, Offers
from ds_runtime.platform.graphs import TorchGraphs
from ds_runtime_cuda import blackwell
from ds_runtime_kit.checks.captures import check_captures
from ds_runtime_kit.checks.conformance import TRUE_DIMS, facts_for
from ds_runtime_rocm import kernels as rocm
from ds_runtime_xpu import kernels as intel

# Prefills are not captured. TileLang makes no code for the host; DeepGEMM's experts have Triton
# kernels between their matmuls, which run on an H200.
EAGER = ("mha_prefill", "merge_state", "cache_gather", "sparse_prefill")
ELSEWHERE = ("tilelang", "deep_gemm.ExpertsFp8Packed")
OFFERED = {
    "mi300x": (*rocm.ATTENTION, *rocm.MOE, *rocm.TOPK, *rocm.LINEAR),
    "b60": (*intel.ATTENTION, *intel.MOE, *intel.LINEAR),
    "b200": (*blackwell.ATTENTION, *blackwell.MOE, *blackwell.LINEAR),
}
OFFERED["mi355x"] = OFFERED["mi300x"]
PLUGINS = {"mi300x": "rocm", "mi355x": "rocm", "b60": "xpu", "b200": "cuda"}


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    device.stand_in("cuda", lambda o, n, v: monkeypatch.setattr(o, n, v, raising=False))
    yield
    device.QUEUE.clear()


@pytest.fixture
def library(request, monkeypatch):
    if PLUGINS[request.param] == "rocm":
        install(monkeypatch, aiter.MODULES, aiter.ADAPTERS)
        monkeypatch.setattr(aiter, "GFX", {"mi300x": "gfx942", "mi355x": "gfx950"}[request.param])
    elif request.param == "b60":
        install(monkeypatch, xpu.MODULES, xpu.ADAPTERS)
        xpu.install_ops(monkeypatch)
    else:
        install(monkeypatch, cuda.MODULES, cuda.ADAPTERS)
    return request.param


def asked(name, kernel):
    """The facts of a place where the kernel may be chosen, with every format that it reads."""
    dims = Dims({**TRUE_DIMS, "heads": 8}) if name == "b60" else TRUE_DIMS
    cache = "float8_e4m3fn" if kernel.fn.endswith(":MlaDecodeTrtllmFp8") else ""
    facts = facts_for(on_host(PLUGINS[name], name), "bfloat16", dims, 64, cache)
    keys = "float8_e4m3fn" if name == "b60" else facts.index_dtype
    formats = sorted(kernel.formats) or [""]
    return [replace(facts, index_dtype=keys, weight_format=name) for name in formats]


@pytest.mark.parametrize("library", OFFERED, indirect=True)
def test_what_a_step_calls_is_captured(library):
    ran, kernels = set(), OFFERED[library]
    offers = Offers(tuple(k for k in kernels if k.op.layout), ())
    for kernel in kernels:
        left_out = kernel.op.name in EAGER or kernel.provider in ELSEWHERE
        if left_out or kernel.name in ELSEWHERE:
            continue
        for facts in asked(library, kernel):
            backend = TorchGraphs(torch.cuda, "CUDAGraph", torch.device("cpu"))
            found = check_captures(kernel, facts, backend, offers)
            assert [r.failure for r in found if not r.ok] == [], kernel.name
            ran |= {kernel.op.name} if found else set()
    assert {"mla_decode", "sparse_decode", "experts", "linear"} <= ran
