"""`ds-runtime conform`: the kit over a plugin's kernels and loaders, and its receipt."""

from __future__ import annotations

import contextlib
import datetime
import platform as host
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ds_runtime._version import __version__
from ds_runtime.assembly.receipts import FORMAT, code_digest
from ds_runtime.errors import ConfigError
from ds_runtime.ops.binding.bind import refusal
from ds_runtime.ops.contract import DeviceInfo, Kernel, Offers, QuantLoader
from ds_runtime.ops.kernel import Layout
from ds_runtime.ops.table import OPS
from ds_runtime.platform.contract import GraphBackend, Platform
from ds_runtime.platform.page_copies import PageCopies
from ds_runtime.plugins.manager import PluginReport, Plugins
from ds_runtime_kit.bisect import repro_case
from ds_runtime_kit.checks.conformance import CaseResult, cases_for, check_case, facts_for
from ds_runtime_kit.kit import CHECKS, Subject, by_kernel, check_all, subjects
from ds_runtime_kit.layouts import LAYOUT, check_layout, layouts_of
from ds_runtime_kit.layouts import QUESTIONS as LAYOUT_QUESTIONS
from ds_runtime_kit.loaders.checks import QUESTIONS, check_loader
from ds_runtime_kit.selection import check_names

LOADER = "loader"  # stands for an op's name
ALL_CHECKS = (*CHECKS, *QUESTIONS, *LAYOUT_QUESTIONS)

_SHOWN = 3  # failures per kernel in a receipt


@dataclass
class Verdict:
    """What the kit found of one kernel, loader or layout; skipped says why nothing was asked."""

    kernel: Kernel | QuantLoader | Layout
    results: list[CaseResult] = field(default_factory=list)
    formats: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    skipped: str = ""

    @property
    def op(self) -> str:
        """The kernel's op, or `LOADER`, or `LAYOUT`."""
        if isinstance(self.kernel, Kernel):
            return self.kernel.op.name
        return LOADER if isinstance(self.kernel, QuantLoader) else LAYOUT

    @property
    def name(self) -> str:
        """With the provider in front, or a layout's tag."""
        if isinstance(self.kernel, Layout):
            return self.kernel.tag
        return self.kernel.name if isinstance(self.kernel, Kernel) else self.kernel.full_name

    @property
    def failures(self) -> list[CaseResult]:
        """Those that are wrong."""
        return [r for r in self.results if not r.ok]

    def to_dict(self) -> dict[str, Any]:
        """The kernel's entry in a receipt."""
        asked: dict[str, dict[str, float]] = {}
        for r in self.results:
            row = asked.setdefault(r.check, {"cases": 0, "failed": 0, "worst": 0.0})
            row["cases"] += 1
            row["failed"] += not r.ok
            if r.ok and r.tolerance:
                row["worst"] = max(row["worst"], round(r.error / r.tolerance, 4))
        kernel = self.kernel if isinstance(self.kernel, Kernel) else None
        return {
            "op": self.op,
            "kernel": self.name,
            "contract": 1 if kernel is None else kernel.contract,
            "numerics": "" if kernel is None else kernel.numerics,
            "dtypes": list(self.dtypes),
            "formats": list(self.formats),
            "batch_invariant": kernel is not None and kernel.promises.batch_invariant,
            "cases": len(self.results),
            "checks": asked,
            "skipped": self.skipped,
            "failures": [f"{r.check}: {r.case}: {r.failure}" for r in self.failures[:_SHOWN]],
        }


@dataclass(frozen=True)
class Wanted:
    """What to ask: of which ops (`LOADER` for loaders) and kernels, which questions; empty means
    all.
    """

    ops: Collection[str] = ()
    kernels: Collection[str] = ()
    checks: Collection[str] = ALL_CHECKS

    def __post_init__(self) -> None:
        check_names("--op", self.ops, (*OPS, LOADER, LAYOUT))
        check_names("--check", self.checks, ALL_CHECKS)

    def asks(self, op: str, name: str) -> bool:
        """Whether this kernel, loader or layout is asked anything."""
        checks = {LOADER: QUESTIONS, LAYOUT: LAYOUT_QUESTIONS}.get(op, CHECKS)
        of_it = (not self.ops or op in self.ops) and (not self.kernels or name in self.kernels)
        return of_it and any(check in self.checks for check in checks)


def verdicts(
    plugins: Plugins,
    device: DeviceInfo,
    plugin: str,
    wanted: Wanted,
    backend: GraphBackend | None = None,
    copies: PageCopies | None = None,
) -> Iterator[Verdict]:
    """One verdict after the other, in the order of the offers. Samples run on one thread. copies:
    the platform's; None: torch's."""
    offers = plugins.offers(facts_for(device, "float32"))
    providers = {provider for provider, owner in plugins.owners.items() if owner == plugin}
    every = by_kernel(subjects(plugins, device, providers))
    for (op, name), mine in every.items():
        if wanted.asks(op, name):
            yield _verdict(mine, wanted.checks, backend)
    for loader in questioned(offers, providers):
        if wanted.asks(LOADER, loader.full_name):
            yield loader_verdict(loader, wanted.checks)
    for layout in layouts_of(offers, providers):
        if wanted.asks(LAYOUT, layout.tag):
            own = [c for c in wanted.checks if c in LAYOUT_QUESTIONS]
            yield Verdict(layout, check_layout(layout, device, own, copies))


def questioned(offers: Offers, providers: Collection[str]) -> list[QuantLoader]:
    """The loaders of these providers that the kit asks: third parties' all, those of the tree where
    they bring samples."""
    mine = [x for x in offers.quant_loaders if x.provider in providers]
    return [x for x in mine if x.samples or x.provider in offers.third_party]


def loader_verdict(loader: QuantLoader, checks: Collection[str] = tuple(QUESTIONS)) -> Verdict:
    """What the kit found of one loader; with numbers of float32, on the host."""
    results = check_loader(loader, [c for c in checks if c in QUESTIONS])
    formats = sorted({r.dtype for r in results} - {"none"})
    return Verdict(loader, results, tuple(formats), ("float32",))


def _verdict(mine: list[Subject], checks: Collection[str], backend: GraphBackend | None) -> Verdict:
    kernel = mine[0].kernel
    accepted = [(s, case) for s in mine for _, case in cases_for((kernel,), s.facts)]
    if not accepted:
        said = refusal(kernel, mine[0].facts) or "accepts none of its op's samples"
        return Verdict(kernel, skipped=said)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = list(check_all(mine, backend, checks))
    finally:
        torch.set_num_threads(threads)
    formats = sorted({c.facts.weight_format for _, c in accepted} - {""})
    dtypes = dict.fromkeys(s.facts.dtype for s, _ in accepted)
    return Verdict(kernel, results, tuple(formats), tuple(dtypes))


def receipt(
    report: PluginReport,
    platform: Platform,
    device: DeviceInfo,
    found: Collection[Verdict],
    checks: Collection[str] = CHECKS,
) -> dict[str, Any]:
    """A plugin's receipt: kernels, contracts, questions, device, versions, digest of the code."""
    return {
        "format": FORMAT,
        "made": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "plugin": report.name,
        "distribution": report.distribution,
        "version": report.version,
        "digest": code_digest(report.module),
        "platform": platform.name,
        "device": device.name,
        "arch": device.arch,
        "versions": dict(versions(report)),
        "not_asked": [c for c in CHECKS if c not in checks],
        "kernels": [v.to_dict() for v in found],
    }


def versions(report: PluginReport | None = None) -> Mapping[str, str]:
    """What a result depends on besides the kernel's own code."""
    found = {
        "python": host.python_version(),
        "ds-runtime": __version__,
        "torch": str(torch.__version__),
    }
    found["kernel"] = host.release()
    if report is not None and report.distribution:
        with contextlib.suppress(PackageNotFoundError):
            found[report.distribution] = version(report.distribution)
    return found


def replay(plugins: Plugins, device: DeviceInfo, path: str, name: str = "") -> CaseResult:
    """Run a recorded case on the kernel that it names, or on another of the same op."""
    held = repro_case.load(Path(path))
    facts = replace(held.case.facts, device=device)
    offers = plugins.offers(facts)
    wanted = name or held.kernel
    mine = [k for k in offers.kernels if k.op.name == held.op]
    for kernel in mine:
        if kernel.name == wanted:
            return check_case(kernel, replace(held.case, facts=facts), offers)
    known = ", ".join(k.name for k in mine) or "none"
    raise ConfigError(f"--case {path}: {held.op} has no kernel {wanted!r} here; it has {known}")
