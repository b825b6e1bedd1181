"""Rows on their way between attention and what is divided by width: FFNs, embedding and head.

Where attention is divided by heads, every rank has every row, and partial results are summed over
the ranks (`Sum`). Where it is divided by sequences, each of some groups of ranks has the rows of
its own sequences. Rows of all groups are gathered before a weight that is cut. Of the sums after it
each group keeps its own (`GatherScatter`). Inside a group all ranks have the same rows.

The model asks for the way of rows (`enter`, `leave`, `collect`). A step asks what of it is this
group's, and in what order rows lie: arrays of the host that go up with its own. Nobody asks which
kind it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias, TypeVar

import numpy as np
from torch import Tensor

from ds_runtime.ops.batch import Batch, RowOrder
from ds_runtime.parallel import together
from ds_runtime.parallel.row_order import (
    ALL,
    Arrays,
    Numbered,
    Pick,
    Section,
    StepShare,
    adapters_of,
    places,
    real_places,
    totals,
)
from ds_runtime.parallel.sums.by_size import later
from ds_runtime.parallel.sums.normed import Summable
from ds_runtime.parallel.world import World
from ds_runtime.platform.contract import Communicator

W = TypeVar("W", bound=StepShare)
Order: TypeAlias = RowOrder | None
Pending: TypeAlias = Callable[[], Order]
"""A row order whose arrays are in an upload. Call it once that is sent."""


class RowExchange(ABC):
    """How the rows of a step reach the ranks that hold a weight, and come back.

    groups: how many groups of ranks have sequences of their own; group: the number of this rank's.
    An `Order` belongs to the exchange that made it. The methods here are those of one group. One
    group has all rows in the order of the works, so its order is None.
    """

    group = 0
    groups = 1
    brings = False  # whether rows that enter come from other ranks, too

    def enter(self, x: Tensor, order: Order) -> Tensor:
        """This group's rows [T, …] → those of all groups [all, …], without any that fill up."""
        return x

    def enter_together(self, parts: Sequence[Tensor], order: Order) -> Sequence[Tensor]:
        """Several tensors [T, n] at once, each as `enter` takes it, of any dtypes. The rows of
        what is returned may be strided; those of the first begin at whole 16 bytes."""
        return parts

    def entered(self, count: int, order: Order) -> int:
        """How many rows `enter` gives of this many."""
        return count

    @abstractmethod
    def leave(self, y: Tensor, order: Order, count: int, own: Tensor | None = None) -> Tensor:
        """A partial result of rows that have entered [all, n] → its sum over the ranks, of the
        `count` rows that this group gave: [count, n]. own: what is added to these, a partial
        result of the ranks of the group [count, n]. `y` must not be used afterwards.
        """

    def leave_later(
        self, y: Tensor, order: Order, count: int, own: Tensor | None = None
    ) -> Summable:
        """As `leave`, whose result goes into an add with an RMSNorm after it: a sum that is not
        made yet where one kernel does all of it."""
        return self.leave(y, order, count, own)

    def collect(self, hidden: Tensor, order: Order) -> Tensor:
        """This group's logit rows [rows, n] → those of the step, in the order of its works."""
        return hidden

    def adapters(self, batch: Batch) -> Tensor | None:
        """As in Batch, of rows that have entered."""
        return batch.adapters

    def logit_adapters(self, batch: Batch) -> Tensor | None:
        """As in Batch, of the step's logit rows."""
        return None if batch.adapters is None else batch.adapters[batch.logit_rows]

    def plain(self, batch: Batch) -> Batch:
        """The same without adapters."""
        return batch if batch.adapters is None else replace(batch, adapters=None)

    def most(self, count: int, order: Order) -> int:
        """Rows of the group that has the most of an order; count: of this one."""
        return count

    def logits_alone(self, order: Order) -> Order:
        """The order of a step's logit rows, as if there were no others."""
        return None

    def own(self, works: Sequence[W]) -> Sequence[W]:
        """Those of this group."""
        return works

    def numbers(self, works: Sequence[StepShare]) -> list[int]:
        """Which of the works are this group's."""
        return list(range(len(works)))

    def sequences(self, works: Sequence[StepShare], size: int) -> list[int]:
        """Where the sequence of each work lies among `size` of each group."""
        return list(range(len(works)))

    def largest(self, works: Sequence[StepShare]) -> int:
        """Works of the group that has the most."""
        return len(works)

    def sizes_of_steps(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Tokens of a whole step with which a group has as many as `sizes`, where that follows."""
        return sizes

    def order(self, works: Sequence[StepShare], upload: Arrays) -> Pending:
        """Of a step's rows."""
        return _nothing

    def each(self, works: Sequence[StepShare], rows: int, upload: Arrays) -> Pending:
        """Of this many rows of each work, all of them wanted, without adapters."""
        return _nothing

    def captured(
        self, works: Sequence[StepShare], size: int, queries: int, adapts: bool, upload: Arrays
    ) -> Pending:
        """Of a captured step: `size` sequences of `queries` rows in each group."""
        return _nothing

    def even(self, rows: int, adapters: Tensor | None = None) -> Order:
        """Of as many rows in each group, all of them wanted. adapters: in the `room` for them."""
        return None

    def room(self, adapters: Tensor) -> Tensor | None:
        """For the adapters of the rows of all groups, each of which has as many as these; None
        where they are these very ones.
        """
        return None

    def fill(self, room: Tensor, batch: Batch) -> None:
        """With the adapters of a step, which may have fewer rows."""
        raise AssertionError("there is no such room")

    def pick(self, numbers: Sequence[int], upload: Arrays) -> Pick:
        """Of things of which these are this group's."""
        return ALL

    def picks(
        self, works: Sequence[StepShare], counts: Sequence[int], upload: Arrays
    ) -> tuple[Pick, Pick]:
        """Of things of which each work has this many, and of works."""
        return ALL, ALL

    def section(self, size: int) -> Pick:
        """Of `size` of each group, the groups one after the other."""
        return ALL


def _nothing() -> None:
    return None


class Sum(RowExchange):
    """Every rank has every row."""

    def __init__(self, tp: Communicator) -> None:
        """tp: of the ranks that divide the weights."""
        self._tp = tp

    def leave(self, y: Tensor, order: Order, count: int, own: Tensor | None = None) -> Tensor:
        return self._tp.all_reduce(y if own is None else y.add_(own))

    def leave_later(
        self, y: Tensor, order: Order, count: int, own: Tensor | None = None
    ) -> Summable:
        return later(self._tp, y if own is None else y.add_(own))


class GatherScatter(RowExchange):
    """Every group has the rows of its own sequences."""

    brings = True

    def __init__(self, groups: Communicator, inside: Communicator) -> None:
        """groups: of one rank of each group; inside: of the ranks of this one. Together they reach
        all ranks that divide the weights.
        """
        self._across, self._inside = groups, inside
        self.group, self.groups = groups.rank, groups.size

    def enter(self, x: Tensor, order: Order) -> Tensor:
        assert order is not None
        if not order.rows:
            return x
        rows = self._across.gather_rows(_filled(x, order.rows))
        return rows if order.real is None else rows[order.real]

    def enter_together(self, parts: Sequence[Tensor], order: Order) -> Sequence[Tensor]:
        return together.apart(self.enter(together.joined(parts), order), parts)

    def entered(self, count: int, order: Order) -> int:
        assert order is not None
        return self.groups * order.rows if order.real is None else order.real.shape[0]

    def leave(self, y: Tensor, order: Order, count: int, own: Tensor | None = None) -> Tensor:
        assert order is not None
        if not order.rows:
            return y
        if order.real is not None:
            every = y.new_zeros(self.groups * order.rows, y.shape[1])
            y = every.index_copy_(0, order.real, y)
        summed = self._across.reduce_scatter(y)
        if own is not None:
            summed[:count].add_(own)
        return self._inside.all_reduce(summed)[:count]

    def collect(self, hidden: Tensor, order: Order) -> Tensor:
        assert order is not None
        if not order.wanted:
            return hidden
        rows = self._across.gather_rows(_filled(hidden, order.wanted))
        return rows if order.order is None else rows[order.order]

    def adapters(self, batch: Batch) -> Tensor | None:
        assert batch.order is not None
        return batch.order.adapters

    def logit_adapters(self, batch: Batch) -> Tensor | None:
        assert batch.order is not None
        return batch.order.logit_adapters

    def plain(self, batch: Batch) -> Batch:
        order = batch.order
        if order is None or order.adapters is None:
            return batch
        order = replace(order, adapters=None, logit_adapters=None)
        return replace(batch, adapters=None, order=order)

    def most(self, count: int, order: Order) -> int:
        assert order is not None
        return order.rows

    def logits_alone(self, order: Order) -> Order:
        assert order is not None
        own, adapters = order.order, order.logit_adapters
        return RowOrder(order.wanted, order.wanted, own, own, adapters, adapters)

    def own(self, works: Sequence[W]) -> Sequence[W]:
        return [work for work in works if work.group == self.group]

    def numbers(self, works: Sequence[StepShare]) -> list[int]:
        return [number for number, work in enumerate(works) if work.group == self.group]

    def sequences(self, works: Sequence[StepShare], size: int) -> list[int]:
        owners = [work.group for work in works]
        found: list[int] = places(owners, [1] * len(works), self.groups, size).tolist()
        return found

    def largest(self, works: Sequence[StepShare]) -> int:
        return max(self._totals(works, [1] * len(works)))

    def sizes_of_steps(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return ()  # a step does not say how many rows a group has of it

    def order(self, works: Sequence[StepShare], upload: Arrays) -> Pending:
        lengths, wanted = [w.length for w in works], [w.logit_rows for w in works]
        adapters = logit_adapters = None
        if any(w.adapter >= 0 for w in works):
            entered = sorted(works, key=lambda work: work.group)  # which keeps their order
            adapters = upload.add(adapters_of(entered, [w.length for w in entered]))
            logit_adapters = upload.add(adapters_of(works, wanted))
        return self._order(works, lengths, wanted, upload, (adapters, logit_adapters))

    def each(self, works: Sequence[StepShare], rows: int, upload: Arrays) -> Pending:
        counts = [rows] * len(works)
        return self._order(works, counts, counts, upload)

    def _totals(self, works: Sequence[StepShare], counts: Sequence[int]) -> list[int]:
        return totals([work.group for work in works], counts, self.groups)

    def _order(
        self,
        works: Sequence[StepShare],
        lengths: Sequence[int],
        wanted: Sequence[int],
        upload: Arrays,
        adapters: tuple[int | None, int | None] = (None, None),
    ) -> Pending:
        counts, most = self._totals(works, lengths), max(self._totals(works, wanted))
        rows, real, order = max(counts), None, None
        if min(counts) < rows:
            real = upload.add(real_places(counts, rows))
        at = places([work.group for work in works], wanted, self.groups, most)
        if not np.array_equal(at, np.arange(self.groups * most)):
            order = upload.add(at)
        return partial(_sent, upload, rows, most, (real, order, *adapters))

    def captured(
        self, works: Sequence[StepShare], size: int, queries: int, adapts: bool, upload: Arrays
    ) -> Pending:
        number, rows = None, size * queries
        if adapts:
            every = np.full((self.groups * size, queries), -1, np.int32)
            every[self.sequences(works, size)] = adapters_of(works, [1] * len(works))[:, None]
            number = upload.add(every.reshape(-1))
        return partial(_sent, upload, rows, rows, (None, None, number, number))

    def even(self, rows: int, adapters: Tensor | None = None) -> Order:
        return RowOrder(rows, rows, adapters=adapters, logit_adapters=adapters)

    def room(self, adapters: Tensor) -> Tensor | None:
        return adapters.repeat(self.groups)

    def fill(self, room: Tensor, batch: Batch) -> None:
        order, every = batch.order, room.fill_(-1).view(self.groups, -1)
        assert order is not None
        if order.adapters is None:
            return
        if order.real is None:
            every[:, : order.rows] = order.adapters.view(self.groups, -1)
        else:
            every[order.real // order.rows, order.real % order.rows] = order.adapters

    def pick(self, numbers: Sequence[int], upload: Arrays) -> Pick:
        return Numbered(upload.add(np.array(numbers, np.int64)), upload)

    def picks(
        self, works: Sequence[StepShare], counts: Sequence[int], upload: Arrays
    ) -> tuple[Pick, Pick]:
        owners = np.array([work.group for work in works], np.int64)
        found = (np.flatnonzero(all_ == self.group) for all_ in (owners.repeat(counts), owners))
        things, own = (Numbered(upload.add(numbers), upload) for numbers in found)
        return things, own

    def section(self, size: int) -> Pick:
        return Section(self.group, size)


def exchange_of(world: World) -> RowExchange:
    """That of the ranks of a model."""
    groups = world.group("attn_dp")
    if groups.size == 1:
        return Sum(world.group("tp"))
    return GatherScatter(groups, world.group("attn_tp"))


def _sent(upload: Arrays, rows: int, wanted: int, numbers: tuple[int | None, ...]) -> RowOrder:
    return RowOrder(rows, wanted, *(None if n is None else upload[n] for n in numbers))


def _filled(x: Tensor, rows: int) -> Tensor:
    """The same with zero rows behind: every group sends as many."""
    if x.shape[0] == rows:
        return x
    filled = x.new_zeros(rows, *x.shape[1:])
    filled[: x.shape[0]] = x
    return filled
