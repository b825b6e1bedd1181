"""Which share of each dimension a rank owns. Pure arithmetic; torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ds_runtime.errors import ConfigError

Range: TypeAlias = slice  # inside the class, `slice` is the method


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of `size` that divide a dimension evenly among them."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(
                f"rank {self.rank} of {self.size}: a rank is between 0 and {self.size - 1}"
            )

    def slice(self, n: int, what: str) -> Range:
        """This rank's part of `n` things; `what` names them in the error if they do not divide."""
        if n % self.size:
            raise ConfigError(
                f"--tp {self.size}: {what} {n} is not divisible by it; give a divisor of {n}"
            )
        part = n // self.size
        return Range(self.rank * part, (self.rank + 1) * part)

    def padded_slice(self, n: int) -> Range:
        """This rank's part when every rank holds ⌈n / size⌉ places and the last ones stay empty."""
        part = -(-n // self.size)
        return Range(min(n, self.rank * part), min(n, (self.rank + 1) * part))
