"""Kernels that share a weight and divide the calls by their rows. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_runtime.ops.spec import Kernel


@dataclass(frozen=True, slots=True)
class Shares:
    """Kernels of one packing at one place. `some`, best first, ask for calls of so many rows, and
    the first that does serves one; `rest` packs the weight and serves what none asks for. It may be
    one of `some`, where all of them ask."""

    rest: Kernel
    some: tuple[Kernel, ...]

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return self.some if self.rest in self.some else (self.rest, *self.some)

    def beside(self, best: Kernel) -> str:
        """The other ones, and when they serve."""
        others = [*self.some, *(() if self.rest in self.some else (self.rest,))]
        return "; ".join(f"{k.name} {self.calls_of(k)}" for k in others if k is not best)

    def calls_of(self, kernel: Kernel) -> str:
        """Which calls one of `kernels` serves, in words."""
        if kernel in self.some:
            return _bounds(kernel)
        first, alone = self.some[0], len(self.some) == 1
        return f"below {first.from_rows} rows" if alone and not first.below_rows else "otherwise"


def asks_for(kernel: Kernel, rows: int) -> bool:
    """Whether a call of so many rows lies within the kernel's bounds."""
    return kernel.from_rows <= rows and (not kernel.below_rows or rows < kernel.below_rows)


def _bounds(kernel: Kernel) -> str:
    if not kernel.below_rows:
        return f"from {kernel.from_rows} rows on"
    if not kernel.from_rows:
        return f"up to {kernel.below_rows - 1} rows"
    return f"from {kernel.from_rows} to {kernel.below_rows - 1} rows"


def shares_of(accepted: Sequence[Kernel]) -> Shares | None:
    """The best kernel with those of its packing that take other sizes."""
    best = accepted[0]
    alike = [k for k in accepted if best.packing and k.packing == best.packing]
    some = tuple(k for k in alike if k.from_rows or k.below_rows)
    rest = next((k for k in alike if k not in some), best)
    return Shares(rest, some) if any(k is not rest for k in some) else None
