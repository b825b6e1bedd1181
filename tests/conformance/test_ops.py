"""Every kernel that every installed plugin offers here, over its op's samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import pytest

from ds_runtime.ops.spec import DeviceInfo, Facts, Kernel, Offers
from ds_runtime.ops.table import OPS
from ds_runtime.plugins import Plugins, load_plugins
from ds_runtime.testing.conformance import (
    SMALL_DIMS,
    TRUE_DIMS,
    cases_for,
    check_kernel,
    facts_for,
)

IN_TREE = tuple(f"ds_runtime_{name}" for name in ("cpu", "cuda", "rocm", "npu", "xpu", "triton"))
HOST = DeviceInfo("cpu", "host", "any")
DTYPES = ("float32", "bfloat16", "float16")
# Where the latent's and the heads' widths matter, the true ones are run as well.
WIDTHS = {
    "small": (SMALL_DIMS, 4, frozenset(OPS)),
    "true": (
        TRUE_DIMS,
        16,
        frozenset(n for n, op in OPS.items() if op.layout)
        | {"mla_absorb", "mha_prefill", "rope", "mla_decode"},
    ),
}


@dataclass(frozen=True)
class Offered:
    """One kernel under one set of facts, and what else is on the table."""

    kernel: Kernel
    facts: Facts
    offers: Offers
    width: str

    def __str__(self) -> str:
        return f"{self.kernel.op.name}-{self.kernel.name}-{self.facts.dtype}-{self.width}"


def installed_plugins() -> Plugins:
    """All installed plugins; in a tree that is not installed, those of the tree as well."""
    modules = {report.module for report in load_plugins().reports.values()}
    missing = [m for m in IN_TREE if m not in modules and find_spec(m) is not None]
    return load_plugins(extra=[import_module(m) for m in missing])


def everything_offered() -> Iterator[Offered]:
    plugins = installed_plugins()
    working = (platform for platform, _ in plugins.platforms().values() if platform is not None)
    devices = {info.type: info for info in (HOST, *(p.info(0) for p in working))}
    for device in devices.values():
        for width, (dims, page_size, ops) in WIDTHS.items():
            for dtype in DTYPES:
                facts = facts_for(device, dtype, dims, page_size)
                offers = plugins.offers(facts)
                for kernel in offers.kernels:
                    if kernel.op.name in ops:
                        yield Offered(kernel, facts, offers, width)
    broken = {n: r.refusal for n, r in plugins.reports.items() if r.refusal is not None}
    assert not broken, broken


OFFERED = list(everything_offered())


@pytest.mark.parametrize("offered", OFFERED, ids=str)
def test_kernel_conforms(offered: Offered) -> None:
    results = check_kernel(offered.kernel, offered.facts, offered.offers)
    failures = [f"{r.case}: {r.failure}" for r in results if not r.ok]
    assert not failures, "\n".join(failures)


def test_the_references_run_every_sample_of_every_op() -> None:
    for offered in OFFERED:
        kernel = offered.kernel
        if kernel.provider == "reference" and not kernel.numerics:
            ran = {case.label for _, case in cases_for((kernel,), offered.facts)}
            assert len(ran) >= 3, f"{offered} runs only {sorted(ran)}"
    reached = {o.kernel.op.name for o in OFFERED if o.kernel.provider == "reference"}
    assert reached == set(OPS)


def test_every_kernel_of_a_device_that_is_here_either_runs_or_says_why_not() -> None:
    for offered in OFFERED:
        kernel, facts = offered.kernel, offered.facts
        if not cases_for((kernel,), facts):
            sentence = kernel.refuse(facts)
            assert sentence, f"{offered} accepts these facts but none of its op's samples"
