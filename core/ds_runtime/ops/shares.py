"""Kernels that share a weight and divide the calls by their rows. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_runtime.ops.spec import Kernel


@dataclass(frozen=True, slots=True)
class Shares:
    """Kernels of one packing at one place. `rest` packs the weight and serves every call that none
    of `some` asks for; of those that ask for the same call, the first one serves it."""

    rest: Kernel
    some: tuple[Kernel, ...]

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return (self.rest, *self.some)

    def beside(self, best: Kernel) -> str:
        """The other ones, and when they serve."""
        said = [f"{k.name} {_asked(k)}" for k in self.some if k is not best]
        if best is not self.rest:
            alone = len(self.some) == 1 and not best.below_rows
            when = f"below {best.from_rows} rows" if alone else "otherwise"
            said.append(f"{self.rest.name} {when}")
        return "; ".join(said)


def asks_for(kernel: Kernel, rows: int) -> bool:
    """Whether a call of so many rows lies within the kernel's bounds."""
    return kernel.from_rows <= rows and (not kernel.below_rows or rows < kernel.below_rows)


def _bounded(kernel: Kernel) -> bool:
    return bool(kernel.from_rows or kernel.below_rows)


def _asked(kernel: Kernel) -> str:
    if not kernel.below_rows:
        return f"from {kernel.from_rows} rows on"
    return f"from {kernel.from_rows} to {kernel.below_rows - 1} rows"


def shares_of(accepted: Sequence[Kernel]) -> Shares | None:
    """The best kernel with those of its packing that take other sizes."""
    best = accepted[0]
    alike = [k for k in accepted if best.packing and k.packing == best.packing]
    rest = next((k for k in alike if not _bounded(k)), best)
    some = tuple(k for k in alike if k is not rest and _bounded(k))
    return Shares(rest, some) if some else None
