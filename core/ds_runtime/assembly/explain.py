"""Why a kernel serves a site and others do not: every gate of each, and the nearest misses.

Torch-free. The binder stops at a kernel's first refusal; people who want another kernel need all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ds_runtime.assembly.plan import compress_sites
from ds_runtime.assembly.result import Assembly
from ds_runtime.ops.binding.bind import Binder, refusals
from ds_runtime.ops.binding.facts import site_facts
from ds_runtime.ops.binding.notes import Decision
from ds_runtime.ops.contract import Fixable, Kernel, Site


@dataclass(frozen=True, slots=True)
class Miss:
    """A kernel that would be preferred at some sites, but for refusals that the user can undo."""

    kernel: str
    chosen: str
    said: tuple[str, ...]
    remedies: tuple[str, ...]
    sites: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kernel}: {'; '.join(self.said)}"


class Explained:
    """All about one op of an assembly."""

    def __init__(self, assembly: Assembly, op: str) -> None:
        binding = assembly.binding
        self._base, self._tag = binding.base, binding.tag(op)
        self._kernels = Binder(assembly.offers, binding.base).by_op[op]
        self._mine = [(site, kernel) for site, kernel in binding.choices if site.op == op]
        self._decisions = {d.site: d for d in binding.decisions}
        self._shares = binding.shares

    def _said(self, kernel: Kernel, site: Site) -> tuple[str, ...]:
        return tuple(refusals(kernel, site_facts(self._base, site), self._tag))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every kernel, best first: {kernel, rank, provider, verdicts: {verdict: sites}}.

        A verdict that refuses names every reason.
        """
        for kernel in self._kernels:
            verdicts: dict[str, list[Decision]] = {}
            for site, chosen in self._mine:
                decision = self._decisions[site]
                said = "; ".join(self._said(kernel, site))
                lost = f"accepts, but {decision.kernel} is preferred"
                beside = self._shares.get((site.op, site.layer, site.module))
                if beside is not None and kernel in beside.kernels:
                    lost = f"serves {beside.calls_of(kernel)}"
                verdict = "chosen" if kernel is chosen else f"refused: {said}" if said else lost
                verdicts.setdefault(verdict, []).append(decision)
            yield {
                "kernel": kernel.name,
                "rank": kernel.rank,
                "provider": kernel.provider,
                "verdicts": {said: list(compress_sites(found)) for said, found in verdicts.items()},
            }

    def misses(self) -> list[Miss]:
        """Kernels ahead of the chosen one that can be had; the fewest refusals first."""
        found: dict[tuple[str, str, tuple[str, ...]], list[Decision]] = {}
        remedies: dict[tuple[str, ...], tuple[str, ...]] = {}
        for site, chosen in self._mine:
            decision = self._decisions[site]
            for kernel in self._kernels:
                if kernel is chosen or (chosen is None and kernel.rank <= decision.rank):
                    break
                said = self._said(kernel, site)
                fixable = [s for s in said if isinstance(s, Fixable)]
                if said and len(fixable) == len(said):
                    remedies[said] = tuple(dict.fromkeys(s.remedy for s in fixable))
                    found.setdefault((kernel.name, decision.kernel, said), []).append(decision)
        misses = [
            Miss(name, chosen, tuple(map(str, said)), remedies[said], compress_sites(at))
            for (name, chosen, said), at in found.items()
        ]
        return sorted(misses, key=lambda m: len(m.said))
