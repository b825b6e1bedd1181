"""Kernels of one place that divide the calls by their rows: those that share a weight, or of an op
that owns none. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap, takewhile

from ds_runtime.ops.contract import Kernel

_ALL = 1 << 62  # more rows than there are


@dataclass(frozen=True, slots=True)
class Shares:
    """Kernels of one packing, or that need none, at one place. `some`, best first, ask for calls of
    this many rows, and the first that does serves one; `rest` packs the weight and serves what none
    asks for. It may be one of `some`, where all of them ask."""

    rest: Kernel
    some: tuple[Kernel, ...]

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return self.some if self.rest in self.some else (self.rest, *self.some)

    def beside(self, best: Kernel) -> str:
        """The other ones, and when they serve."""
        others = [*self.some, *(() if self.rest in self.some else (self.rest,))]
        return "; ".join(
            f"{k.name} {self.calls_of(k)}" for k in others if k is not best and self._ranges(k)
        )

    def calls_of(self, kernel: Kernel) -> str:
        """Which calls one of `kernels` serves, in words."""
        ranges = self._ranges(kernel)
        if kernel in self.some:
            said = " and ".join(starmap(_words, ranges)) or "no call, as others do"
            return f"{' and '.join(sorted(kernel.rows.methods))} {said}".lstrip()
        (first, below), *more = ranges or [(0, _ALL)]
        return "otherwise" if first or more or below == _ALL else _words(first, below)

    def rows_of(self, kernel: Kernel, most: int) -> list[range]:
        """Rows, from 1 to `most`, of the calls that may be those of one of `kernels`, cut at the
        bounds of each. Calls of one range are all its own, or none is."""
        bounds = {n for k in self.some for n in (k.rows.first, k.rows.below or _ALL)}
        cuts = sorted({1, most + 1, *(n for n in bounds if 1 < n <= most)})
        every = kernel is self.rest or kernel.rows.methods
        return [
            range(first, below)
            for first, below in pairwise(cuts)
            if every or kernel.rows.holds(first)
        ]

    def _ranges(self, kernel: Kernel) -> list[tuple[int, int]]:
        """[first, below) of the rows of its calls, rising and apart."""
        free, taken = [(0, _ALL)], list[tuple[int, int]]()
        for each in self.some:
            asked = each.rows.first, each.rows.below or _ALL
            if each is kernel:
                taken = [r for other in free if (r := _common(other, asked))]
            outside = (0, asked[0]), (asked[1], _ALL)
            free = [r for other in free for part in outside if (r := _common(other, part))]
        if kernel is not self.rest:
            return taken
        joined = list[tuple[int, int]]()
        for first, below in sorted(taken + free):
            touches = joined and joined[-1][1] == first
            joined.append((joined.pop()[0], below) if touches else (first, below))
        return joined


def _common(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int] | None:
    both = max(one[0], other[0]), min(one[1], other[1])
    return both if both[0] < both[1] else None


def _words(first: int, below: int) -> str:
    if below == _ALL:
        return f"from {first} rows on"
    if first == below - 1:
        return f"of {first} rows"
    return f"from {first} to {below - 1} rows" if first else f"below {below} rows"


def shares_of(accepted: Sequence[Kernel]) -> Shares | None:
    """The best kernel with those of its packing that take other sizes. Functions need no packing:
    of those before the first that takes all sizes, each serves the sizes that it asks for."""
    best = accepted[0]
    alike = [k for k in accepted if best.rows.packing and k.rows.packing == best.rows.packing]
    if best.op.kind == "function":
        asking = [*takewhile(lambda k: k.rows.bounded, accepted)]
        alike = list(accepted[: len(asking) + 1])
    some = tuple(k for k in alike if k.rows.bounded)
    rest = next((k for k in alike if k not in some), best)
    return Shares(rest, some) if any(k is not rest for k in some) else None
