"""Whose rows of a step lie where, once those of all ranks are gathered: index arrays on the host.

Only where attention is divided by sequences. Every rank makes the same from the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ds_runtime.engine.step.inputs import num_logit_rows
from ds_runtime.engine.step.plan import Work
from ds_runtime.engine.step.prompts import adapters_of
from ds_runtime.engine.step.transfer import Upload
from ds_runtime.ops.batch import Spread

Ints = npt.NDArray[np.int64]


def by_rank(works: Sequence[Work], ranks: int) -> list[list[Work]]:
    """Every rank's own works, in their order."""
    found: list[list[Work]] = [[] for _ in range(ranks)]
    for work in works:
        found[work.rank].append(work)
    return found


@dataclass(frozen=True, slots=True)
class Spreading:
    """A Spread before its transfer: numbers of arrays in the upload instead of tensors."""

    rows: int
    wanted: int
    real: int | None
    order: int | None
    adapters: int | None
    logit_adapters: int | None

    @staticmethod
    def of(works: Sequence[Work], ranks: int, upload: Upload) -> Spreading:
        """Of a step's works on `ranks` ranks; adds to its upload."""
        own = by_rank(works, ranks)
        counts = [sum(w.length for w in some) for some in own]
        rows, real = max(counts), None
        if min(counts) < rows:
            places = [np.arange(r * rows, r * rows + n) for r, n in enumerate(counts)]
            real = upload.add(np.concatenate(places).astype(np.int64))
        wanted = max(sum(num_logit_rows(w) for w in some) for some in own)
        adapters = logit_adapters = None
        if any(w.adapter >= 0 for w in works):
            gathered = [w for some in own for w in some]
            adapters = upload.add(adapters_of(gathered, [w.length for w in gathered]))
            logit_adapters = upload.add(adapters_of(works, [num_logit_rows(w) for w in works]))
        order = logit_places(works, ranks, wanted)
        in_order = np.array_equal(order, np.arange(ranks * wanted))
        number = None if in_order else upload.add(order)
        return Spreading(rows, wanted, real, number, adapters, logit_adapters)

    def sent(self, upload: Upload) -> Spread:
        """Once the upload is."""
        real, order, adapters, logit_adapters = (
            None if number is None else upload[number]
            for number in (self.real, self.order, self.adapters, self.logit_adapters)
        )
        return Spread(self.rows, self.wanted, real, order, adapters, logit_adapters)


def logit_places(works: Sequence[Work], ranks: int, wanted: int) -> Ints:
    """Where each logit row lies among `wanted` of each rank: [rows] int64, in the works' order."""
    free = [rank * wanted for rank in range(ranks)]
    places: list[int] = []
    for work in works:
        begin = free[work.rank]
        free[work.rank] += num_logit_rows(work)
        places += range(begin, free[work.rank])
    return np.array(places, np.int64)


def sequence_places(works: Sequence[Work], ranks: int, size: int) -> list[int]:
    """Where the sequence of each work lies among `size` of each rank."""
    if ranks == 1:
        return list(range(len(works)))
    free = [rank * size for rank in range(ranks)]
    places = list[int]()
    for work in works:
        places.append(free[work.rank])
        free[work.rank] += 1
    return places


class Placed:
    """A step's works among the places of a captured one, `size` sequences of `queries` tokens on
    each rank. sequences: the place of each work; rows: [draws] of each draw, among the rows of all
    ranks. whole: these are the first ones, in order.
    """

    def __init__(self, works: Sequence[Work], ranks: int, size: int, queries: int) -> None:
        self.sequences = sequence_places(works, ranks, size)
        lengths = tuple(w.length for w in works)
        self.rows, self.whole = _rows_at(tuple(self.sequences), lengths, queries)

    def own(self, works: Sequence[Work], rank: int) -> tuple[Ints, Ints]:
        """Which draws and which works are those of one rank."""
        ranks = np.array([w.rank for w in works], np.int64)
        owners = ranks.repeat([w.length for w in works])
        return np.flatnonzero(owners == rank), np.flatnonzero(ranks == rank)


@lru_cache(maxsize=256)  # nobody writes to it
def _rows_at(
    sequences: tuple[int, ...], lengths: tuple[int, ...], queries: int
) -> tuple[Ints, bool]:
    places = zip(sequences, lengths, strict=True)
    rows = np.array([place * queries + j for place, n in places for j in range(n)], np.int64)
    return rows, bool(np.array_equal(rows, np.arange(len(rows))))
