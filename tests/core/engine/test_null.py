"""The null platform: every op in the shapes and dtypes of the reference, holding nothing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from ds_runtime.ops.binding.bind import refusal
from ds_runtime.ops.contract import DeviceInfo, Facts, load_attr
from ds_runtime.ops.reference.cases import PagedCache, Saved
from ds_runtime.ops.table import OPS
from ds_runtime.ops.weight import Packed
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.plugins.select_platform import select_platform
from ds_runtime_kit.checks.conformance import SMALL_DIMS, signature_difference
from ds_runtime_kit.checks.inputs import for_kernel, plain_pages

CPU = torch.device("cpu")


def facts(dtype="float32", arch="null") -> Facts:
    device = DeviceInfo("cpu", "no device", arch)
    return Facts(device, SMALL_DIMS, dtype=dtype, kv_dtype=dtype, page_size=4)


OFFERS = load_plugins(["null"]).offers(facts())
KERNELS = {k.op.name: k for k in OFFERS.kernels if k.provider == "null"}
LAYOUTS = {layout.name: layout for layout in OFFERS.layouts}
LAYOUT = LAYOUTS["null_pages"]


def nothing(cache: PagedCache) -> torch.Tensor:
    layout = LAYOUTS["null_index"] if cache.role == "index" else LAYOUT
    return load_attr(layout.allocate)(cache.rows.shape[0] // cache.page_size, facts(), CPU)


def results(op, path, case, encode):
    """What each call of a case returns, flattened."""
    target, saved = load_attr(path), {}
    if op.kind == "object":
        target = target(case.facts)
    for call in case.calls:
        if call.asks:  # what a kernel need not have
            continue
        args = [
            saved[a.name] if isinstance(a, Saved) else for_kernel(a, CPU, encode) for a in call.args
        ]
        function = getattr(target, call.method) if call.method else target
        if call.raises is not None:
            with pytest.raises(call.raises):
                function(*args)
            continue
        result = function(*args)
        if call.save:
            saved[call.save] = result
        if isinstance(result, Packed):
            yield result
        elif result is not None and not call.save:
            yield from result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("dtype", ["bfloat16"])
@pytest.mark.parametrize("name", [n for n, op in OPS.items() if not op.optional])
def test_same_forms_as_the_reference(name, dtype):
    kernel, op = KERNELS[name], OPS[name]
    assert signature_difference(kernel, facts(dtype)) == ""
    for case in load_attr(op.samples)(facts(dtype)):
        assert refusal(kernel, case.facts, *kernel.layouts) is None
        got = list(results(op, kernel.fn, case, nothing))
        want = list(results(op, op.reference, case, plain_pages))
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            if isinstance(w, Packed):
                assert g.nbytes == 0 and g.tensors == {} and g.shape == w.shape
            else:
                assert (g.shape, g.dtype) == (w.shape, w.dtype), case.label


def test_serves_nobody_else():
    for kernel in KERNELS.values():
        assert "only for the null platform" in kernel.refuse(facts(arch="x86_64"))


def test_the_cache_holds_nothing():
    cache = load_attr(LAYOUT.allocate)(1 << 20, facts(), CPU)
    assert cache.nbytes == 0


def test_platform_is_there_only_when_named():
    platform, _ = select_platform(load_plugins(["null"]), "null")
    assert platform.info().arch == "null" and platform.device() == CPU
    assert platform.memory().free == platform.memory().total > 0
    assert "null" not in load_plugins().reports


def test_logits_repeat_and_draws_follow_the_random_number():
    head = load_attr(KERNELS["linear"].fn)(replace(facts(), module="lm_head", shape=(50, 8)))
    packed = Packed("null.linear", (50, 8), {}, 0)
    logits = head.apply(torch.zeros(3, 8), packed)
    assert torch.equal(logits[0], logits[2]) and logits[0].unique().numel() > 40
    uniform = torch.tensor([0.0, 0.5, 0.999], dtype=torch.float64)
    off = torch.zeros(3)
    assert load_attr(KERNELS["sample"].fn)(logits, off, off, off, off, uniform).tolist() == [
        0,
        25,
        49,
    ]


def test_decides_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import ds_runtime_kit.devices.null as n\n"
        "from ds_runtime.engine.schedule import scheduler\n"
        "assert n.ds_platform().info().arch == 'null'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
