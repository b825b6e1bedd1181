"""Which share of each dimension a rank owns. Pure arithmetic; torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ds_runtime.description.tree import Axis, Ranks, Stored, padded
from ds_runtime.errors import ConfigError
from ds_runtime.parallel.mesh import AxisName, Mesh

_DIVIDING: tuple[AxisName, ...] = "tp", "attn_tp", "ep"
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
        part = padded(n, self.size)
        return Range(min(n, self.rank * part), min(n, (self.rank + 1) * part))


@dataclass(frozen=True, slots=True)
class Shards:
    """One rank among those that divide FFNs and the vocabulary, heads, and experts by number."""

    width: Shard
    heads: Shard
    experts: Shard = Shard()

    @classmethod
    def at(cls, mesh: Mesh, rank: int) -> Shards:
        """Those of one rank."""
        return cls(*(Shard(mesh.at(rank, axis), mesh.extent(axis)) for axis in _DIVIDING))

    @property
    def ranks(self) -> Ranks:
        """How many ranks there are of each."""
        return Ranks(self.width.size, self.heads.size, self.experts.size)

    def of(self, cut: Axis | None) -> Shard:
        """The share of what is cut so."""
        over = "width" if cut is None else cut.over
        if self.experts.size > 1 and over in ("expert", "shared"):
            count = self.ranks.of(over)  # neighbours
            return Shard(self.width.rank % count, count)
        return self.heads if over == "heads" else self.width

    def part(self, stored: Stored, piece: int = 0, pieces: int = 1) -> tuple[Range, Range]:
        """This rank's rows and columns of a matrix.

        piece: of the `pieces` equal ones, along what ranks divide, that the matrix is taken as.
        Raises ConfigError where ranks do not divide it.
        """
        found = [slice(0, n) for n in stored.shape]
        if (cut := stored.cut) is not None:
            shard, size = self.of(cut), stored.shape[cut.dim] // pieces
            if cut.over == "vocab":
                share = shard.padded_slice(size)
            else:
                share = shard.slice(size, f"{('rows', 'columns')[cut.dim]} of {stored.name}")
            found[cut.dim] = slice(piece * size + share.start, piece * size + share.stop)
        rows, cols = found
        return rows, cols
