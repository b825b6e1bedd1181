"""`--ep`: a kernel skips experts that other ranks have, or the binder refuses it and says so."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from vendor_doubles import cuda, install
from vendor_doubles.compiled import standing_in

from ds_runtime.ops.binding.bind import refusals
from ds_runtime.ops.contract import Dims, Fixable
from ds_runtime.plugins.manager import load_plugins
from ds_runtime_bench.shapes import config_of
from ds_runtime_kit.checks.conformance import (
    TRUE_DIMS,
    cases_for,
    check_kernel,
    facts_for,
)
from ds_runtime_kit.devices import fake

SAID = "does not skip experts of other ranks"
PLUGINS = load_plugins()
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": None}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "dynamic": True,
                "strategy": "token",
            },
        }
    },
    "ignore": ["lm_head"],
}
MXFP4 = {
    "quant_method": "quark",
    "global_quant_config": {
        "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32,
                   "scale_format": "e8m0", "is_dynamic": False},
        "input_tensors": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32,
                          "scale_format": "e8m0", "is_dynamic": True},
    },
    "exclude": ["lm_head"],
}  # fmt: skip
# Device, weights, the vendor's kernel where experts are not divided by number.
VENDORS = [
    ("b200", "fp8", "flashinfer.ExpertsTrtllm"),
    ("b200", NVFP4, "flashinfer.ExpertsNvfp4"),
    ("b200", MXFP4, "flashinfer.ExpertsMxfp4"),
    ("mi300x", "bfloat16", "aiter.ExpertsDense"),
    ("mi300x", "fp8", "aiter.ExpertsFp8"),
    ("mi355x", MXFP4, "aiter.ExpertsMxfp4"),
    ("910b", "bfloat16", "npu.Experts"),
    ("910b", INT8, "npu.ExpertsInt8"),
]
NAMED = {id(NVFP4): "nvfp4", id(MXFP4): "mxfp4", id(INT8): "int8"}


def experts_of(tmp_path, device, weights, **settings):
    """The plan's rows of routed experts, and the kernel that is bound."""
    raw = config_of("v3-slice", weights if isinstance(weights, str) else "bfloat16")
    raw |= {"num_nextn_predict_layers": 0}
    if not isinstance(weights, str):
        raw["quantization_config"] = weights
    (tmp_path / "config.json").write_text(json.dumps(raw))
    made = fake.plan(str(tmp_path), device, plugins=PLUGINS, **settings)
    kernels = [k for site, k in made.binding.choices if site.op == "experts" and k is not None]
    assert len({kernel.name for kernel in kernels}) == 1
    (row,) = (r for r in made.plan.rows if r.op == "experts")
    return row, kernels[0]


@pytest.mark.parametrize(
    ("device", "weights", "vendor"),
    VENDORS,
    ids=lambda v: NAMED.get(id(v), v) if not isinstance(v, str) else v,
)
def test_another_kernel_serves_where_the_vendors_counts_on_all_experts(
    tmp_path, device, weights, vendor
):
    row, kernel = experts_of(tmp_path, device, weights, tp=2)
    assert kernel.name == vendor and not kernel.promises.skips_absent
    for groups in ({}, {"enable_dp_attention": True, "dp": 2}):
        row, kernel = experts_of(tmp_path, device, weights, tp=2, ep=2, **groups)
        assert kernel.promises.skips_absent and kernel.name != vendor
        assert SAID in dict(row.refused)[vendor]


@cache
def offered():
    """Kernels of routed experts that any plugin offers on any described device."""
    found = {}
    for device, platform in fake.devices(PLUGINS).items():
        facts = facts_for(platform.info(), "bfloat16", page_size=64)
        for kernel in PLUGINS.offers(facts).kernels:
            if kernel.op.absent:
                found.setdefault((kernel.op.name, kernel.name), (device, kernel))
    return found


def test_every_kernel_of_every_vendor_skips_them_or_is_refused():
    """Whatever else it says: with `--ep` nothing binds a kernel that counts on all experts."""
    every = offered()
    apart = {name for (_, name), (_, k) in every.items() if not k.promises.skips_absent}
    assert {vendor for *_, vendor in VENDORS} <= apart
    assert {name.partition(".")[0] for name in apart} >= {"aiter", "flashinfer", "npu"}
    for device, kernel in every.values():
        facts = facts_for(fake.device(device), "bfloat16", page_size=64)
        facts = replace(facts, weight_format=sorted(kernel.formats)[0], shape=(4, 128, 256))
        divided = replace(facts, ranks=Dims({**facts.ranks, "ep": 2}))
        said = [one for one in refusals(kernel, divided) if SAID in one]
        assert len(said) == (not kernel.promises.skips_absent), kernel.name
        assert all(isinstance(one, Fixable) for one in said)
        assert not any(SAID in one for one in refusals(kernel, facts))


PROMISING = sorted(name for (op, name), (_, k) in offered().items()
                   if op == "experts" and k.promises.skips_absent
                   and k.provider in ("cuda", "deep_gemm"))  # fmt: skip


@pytest.mark.parametrize("name", PROMISING)
def test_a_kernel_of_the_cuda_plugin_that_says_so_skips_them(monkeypatch, name):
    """Over stand-ins for its libraries: ids of −1, and tokens whose experts are all elsewhere."""
    install(monkeypatch, cuda.MODULES, cuda.ADAPTERS)
    monkeypatch.setattr(torch, "_scaled_mm", cuda._scaled_mm)
    _, kernel = offered()["experts", name]
    facts = facts_for(replace(fake.device("sm90"), type="cpu"), "bfloat16", TRUE_DIMS, 64)
    with standing_in(monkeypatch):
        cases = [case.label for _, case in cases_for((kernel,), facts)]
        assert any("of other ranks" in label for label in cases)
        found = check_kernel(kernel, facts, load_plugins(()).offers(facts))
    assert found and not [result for result in found if not result.ok]
