"""The order of the rows of a step, once those of all groups are gathered: index arrays on the host.
And what is one group's of what all have.

Only where attention is divided by sequences. Every rank makes the same from the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

Ints = npt.NDArray[np.int64]


class StepShare(Protocol):
    """What is to be known of a request's share of a step: see `engine.step.plan.Work`."""

    @property
    def group(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def adapter(self) -> int: ...
    @property
    def logit_rows(self) -> int: ...


class Arrays(Protocol):
    """Arrays of the host as tensors, by their numbers: see `engine.step.transfer.Upload`."""

    def add(self, array: npt.NDArray[Any], /) -> int: ...
    def __getitem__(self, number: int, /) -> Tensor: ...


def adapters_of(works: Sequence[StepShare], counts: Sequence[int]) -> npt.NDArray[np.int32]:
    """[rows] int32: the adapter of every row, `counts` rows of each work."""
    return np.repeat(np.array([w.adapter for w in works], np.int32), counts)


def totals(owners: Iterable[int], counts: Iterable[int], groups: int) -> list[int]:
    """What each group has in all."""
    found = [0] * groups
    for owner, count in zip(owners, counts, strict=True):
        found[owner] += count
    return found


def real_places(counts: Sequence[int], rows: int) -> Ints:
    """Where the rows are, among `rows` of each group of which `counts` are real: [all] int64."""
    places = [np.arange(group * rows, group * rows + n) for group, n in enumerate(counts)]
    return np.concatenate(places).astype(np.int64)


def places(owners: Sequence[int], counts: Sequence[int], groups: int, size: int) -> Ints:
    """Where each of `counts` things of every work lies among `size` of each group, in the order of
    the works: int64.
    """
    free = [group * size for group in range(groups)]
    found: list[int] = []
    for owner, count in zip(owners, counts, strict=True):
        begin = free[owner]
        free[owner] += count
        found += range(begin, free[owner])
    return np.array(found, np.int64)


class Placed:
    """A step's works among the places of a captured one, with `queries` tokens for each sequence.
    sequences: the place of each work; rows: [draws] of each draw, among the rows of all groups.
    whole: these are the first ones, in order.
    """

    def __init__(self, works: Sequence[StepShare], sequences: Sequence[int], queries: int) -> None:
        self.sequences = sequences
        lengths = tuple(w.length for w in works)
        self.rows, self.whole = _rows_at(tuple(sequences), lengths, queries)


@lru_cache(maxsize=256)  # nobody writes to it
def _rows_at(
    sequences: tuple[int, ...], lengths: tuple[int, ...], queries: int
) -> tuple[Ints, bool]:
    at = zip(sequences, lengths, strict=True)
    rows = np.array([place * queries + j for place, n in at for j in range(n)], np.int64)
    return rows, bool(np.array_equal(rows, np.arange(len(rows))))


class Pick:
    """What is this group's of values of all groups: here everything."""

    def __call__(self, values: Tensor) -> Tensor:
        """[all, …] → [own, …]."""
        return values

    def back(self, values: Tensor, count: int) -> Tensor:
        """[own] → [count], each at its place among all; 0 elsewhere."""
        return values

    def local(self, numbers: Tensor) -> Tensor:
        """Numbers of rows of all groups → among this group's; any row for those of others."""
        return numbers


ALL = Pick()


class Numbered(Pick):
    def __init__(self, number: int, upload: Arrays) -> None:
        self._number, self._upload = number, upload

    def __call__(self, values: Tensor) -> Tensor:
        return values[self._upload[self._number]]

    def back(self, values: Tensor, count: int) -> Tensor:
        return values.new_zeros(count).index_copy_(0, self._upload[self._number], values)


class Section(Pick):
    """`size` of each group, the groups one after the other."""

    def __init__(self, group: int, size: int) -> None:
        self._first, self._size = group * size, size

    def __call__(self, values: Tensor) -> Tensor:
        return values[self._first : self._first + self._size]

    def local(self, numbers: Tensor) -> Tensor:
        return (numbers - self._first).clamp(0, self._size - 1)
