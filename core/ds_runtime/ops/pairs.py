"""Two kernels that share a weight and split the calls by their rows. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_runtime.ops.spec import Kernel


@dataclass(frozen=True, slots=True)
class Pair:
    """Two kernels that share a weight: `many` serves calls of many.from_rows rows or more."""

    few: Kernel
    many: Kernel

    def beside(self, best: Kernel) -> str:
        """The other one, and when it serves."""
        if best is self.few:
            return f"{self.many.name} from {self.many.from_rows} rows on"
        return f"{self.few.name} below {self.many.from_rows} rows"


def pair_of(accepted: Sequence[Kernel]) -> Pair | None:
    """The best kernel with the next one of its packing that takes the other sizes."""
    best = accepted[0]
    for other in accepted[1:]:
        if best.packing and other.packing == best.packing:
            if other.from_rows and not best.from_rows:
                return Pair(best, other)
            if best.from_rows and not other.from_rows:
                return Pair(other, best)
    return None
