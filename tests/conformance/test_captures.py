"""Capture, new inputs, replay: every kernel that says that it is safe under graph capture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_runtime.ops.contract import FP8_GROUPS, DeviceInfo, Facts, Kernel, Offers
from ds_runtime.ops.kernel import Promises
from ds_runtime.ops.reference import norm
from ds_runtime.ops.table import OPS
from ds_runtime.platform.contract import Platform
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.plugins.select_platform import select_platform
from ds_runtime_kit.checks.captures import check_captures
from ds_runtime_kit.checks.conformance import SMALL_DIMS, TRUE_DIMS, facts_for
from ds_runtime_kit.checks.replay import ReplayBackend

HOST = DeviceInfo("cpu", "host", "any")
REFERENCES = [
    k for k in load_plugins(()).offers(facts_for(HOST, "float32")).kernels if k.promises.graph_safe
]


ALONE = ("mha_prefill", "mha_prefill_quantize")  # host loops that a capture bears


def own_facts(kernel: Kernel, dtype: str) -> Facts:
    """Facts that it takes: some layouts hold nothing but scaled FP8."""
    facts = facts_for(HOST, dtype)
    return facts if kernel.refuse(facts) is None else replace(facts, kv_dtype=FP8_GROUPS)


@pytest.mark.parametrize("kernel", REFERENCES, ids=lambda k: f"{k.op.name}-{k.name}")
def test_references_that_say_so_are_safe(kernel: Kernel) -> None:
    facts = own_facts(kernel, "bfloat16")
    offers = load_plugins(()).offers(facts)
    results = check_captures(kernel, facts, ReplayBackend(), offers)
    assert len(results) >= 3
    assert [r for r in results if not r.ok] == []


def test_those_that_do_not_are_not() -> None:
    """A reference that could be captured would be refused for nothing."""
    offers = load_plugins(()).offers(facts_for(HOST, "float32"))
    for kernel in offers.kernels:
        if kernel.promises.graph_safe or kernel.op.name in ALONE:
            continue
        said = replace(kernel, promises=Promises())
        results = check_captures(said, own_facts(kernel, "float32"), ReplayBackend(), offers)
        assert any(not r.ok for r in results), kernel.name


STEPS = {"count": 0}


def counts_calls(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    STEPS["count"] += 1
    return norm.rms_norm(x, weight, eps) * STEPS["count"]


def returns_what_it_kept(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    found = norm.rms_norm(x, weight, eps)
    return torch.tensor(found.tolist(), dtype=x.dtype).view(x.shape)


@pytest.mark.parametrize("fn", [counts_calls, returns_what_it_kept])
def test_a_kernel_that_is_not_safe_is_found(fn: Any) -> None:
    kernel = Kernel(OPS["rms_norm"], f"{__name__}:{fn.__name__}", "me")
    results = check_captures(kernel, facts_for(HOST, "float32"), ReplayBackend())
    failures = [r.failure for r in results if not r.ok]
    assert any("other bits" in f or "waits for the device" in f for f in failures), failures


# On the accelerator that is here.


@cache
def devices() -> tuple[tuple[Platform, Facts, Offers, Kernel], ...]:
    return tuple(_devices())


def _devices() -> Iterator[tuple[Platform, Facts, Offers, Kernel]]:
    plugins = load_plugins()
    platform, _ = select_platform(plugins)
    if not platform.captures:
        return
    for dims, page, width in ((SMALL_DIMS, 4, "small"), (TRUE_DIMS, 64, "true")):
        for dtype in ("bfloat16", "float32"):
            facts = facts_for(platform.info(0), dtype, dims, page)
            offers = plugins.offers(facts)
            for kernel in offers.kernels:
                own_width = kernel.op.layout or kernel.op.name in ("mla_absorb", "rope")
                if (
                    kernel.promises.graph_safe
                    and kernel.provider != "cpu"
                    and (width == "small" or own_width)
                ):
                    yield platform, facts, offers, kernel


@pytest.mark.gpu
@pytest.mark.parametrize("op", sorted(OPS))
def test_captures_on_the_accelerator(op: str) -> None:
    found, failures = 0, list[str]()
    backends: dict[str, Any] = {}
    for platform, facts, offers, kernel in devices():
        if kernel.op.name != op:
            continue
        backend = backends.setdefault(platform.name, platform.graph_backend(0))
        results = check_captures(kernel, facts, backend, offers)
        found += len(results)
        failures += [
            f"{r.op} {r.kernel} {r.dtype} {r.case}: {r.failure}" for r in results if not r.ok
        ]
    assert not failures, "\n".join(failures)
    if not found:
        pytest.skip(f"no kernel of {op} is captured on a platform that is here")
