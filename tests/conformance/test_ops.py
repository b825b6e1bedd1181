"""Every kernel that every installed plugin offers here, over its op's samples."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import pytest

from ds_runtime.ops.binding.bind import refusal
from ds_runtime.ops.contract import DeviceInfo, Facts, Kernel, load_attr
from ds_runtime.ops.table import OPS
from ds_runtime.plugins.manager import Plugins, load_plugins
from ds_runtime_kit.checks.conformance import check_kernel
from ds_runtime_kit.kit import Subject, subjects

IN_TREE = tuple(f"ds_runtime_{name}" for name in ("cpu", "cuda", "rocm", "npu", "xpu", "triton"))
HOST = DeviceInfo("cpu", "host", "any")


def installed_plugins() -> Plugins:
    """All installed plugins; in a tree that is not installed, those of the tree as well."""
    modules = {report.module for report in load_plugins().reports.values()}
    missing = [m for m in IN_TREE if m not in modules and find_spec(m) is not None]
    return load_plugins(extra=[import_module(m) for m in missing])


def everything_offered() -> Iterator[Subject]:
    plugins = installed_plugins()
    working = (platform for platform, _ in plugins.platforms().values() if platform is not None)
    devices = {info.type: info for info in (HOST, *(p.info(0) for p in working))}
    for device in devices.values():
        yield from subjects(plugins, device)
    broken = {n: r.refusal for n, r in plugins.reports.items() if r.refusal is not None}
    assert not broken, broken


OFFERED = list(everything_offered())
RUNNING = [offered for offered in OFFERED if offered.kernel.refuse(offered.facts) is None]


def _marked(offered: Subject) -> object:
    marks = () if offered.facts.device.type == HOST.type else pytest.mark.gpu
    return pytest.param(offered, marks=marks, id=str(offered))


@pytest.mark.parametrize("offered", [_marked(o) for o in RUNNING])
def test_kernel_conforms(offered: Subject) -> None:
    results = check_kernel(offered.kernel, offered.facts, offered.offers)
    failures = [f"{r.case}: {r.failure}" for r in results if not r.ok]
    assert not failures, "\n".join(failures)


@cache
def samples(op: str, facts: Facts) -> tuple[tuple[str, Facts], ...]:
    """The label and the facts of every sample; the tensors take long to draw for each kernel."""
    return tuple((case.label, case.facts) for case in load_attr(OPS[op].samples)(facts))


def labels(kernel: Kernel, facts: Facts) -> set[str]:
    """What `cases_for` gives of this kernel, without tensors."""
    found = samples(kernel.op.name, facts)
    return {label for label, own in found if refusal(kernel, own) is None}


def test_the_references_run_every_sample_of_every_op() -> None:
    offers, serve = set[str](), set[str]()
    for offered in OFFERED:
        kernel = offered.kernel
        if kernel.provider == "reference" and not kernel.numerics:
            ran = labels(kernel, offered.facts)
            offers.add(kernel.name)
            if kernel.refuse(offered.facts) is None:  # else its layout holds another dtype
                serve.add(kernel.name)
                assert len(ran) >= 3, f"{offered} runs only {sorted(ran)}"
    assert offers == serve
    reached = {o.kernel.op.name for o in OFFERED if o.kernel.provider == "reference"}
    assert reached == set(OPS)


def test_every_kernel_of_a_device_that_is_here_either_runs_or_says_why_not() -> None:
    for offered in OFFERED:
        kernel, facts = offered.kernel, offered.facts
        sentence = kernel.refuse(facts)
        if labels(kernel, facts):
            assert sentence is None, f"{offered} refuses facts whose samples it accepts: {sentence}"
        else:
            assert sentence, f"{offered} accepts these facts but none of its op's samples"
