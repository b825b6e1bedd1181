"""Rows on their way between attention and what is divided by width: FFNs, embedding and head.

Where attention is divided by heads, every rank has every row, and partial results are summed over
the ranks. Where it is divided by sequences, a rank has the rows of its own: those of all ranks are
gathered in front of a weight that is cut, and of the sums behind it each rank keeps its own.
"""

from __future__ import annotations

from torch import Tensor

from ds_runtime.ops.batch import Batch, Spread
from ds_runtime.platform.contract import Communicator


def gathered(comm: Communicator, x: Tensor, batch: Batch) -> Tensor:
    """This rank's rows [T, …] → those of all ranks [all, …], without any that fill up."""
    spread = batch.spread
    if spread is None or not spread.rows:
        return x
    rows = comm.gather_rows(_filled(x, spread.rows))
    return rows if spread.real is None else rows[spread.real]


def summed(comm: Communicator, y: Tensor, batch: Batch, count: int) -> Tensor:
    """A partial result of `gathered` rows [all, n] → its sum over the ranks, of the `count` rows
    that this rank gave: [count, n].
    """
    spread = batch.spread
    if spread is None:
        return comm.all_reduce(y)
    if not spread.rows:
        return y
    if spread.real is not None:
        every = y.new_zeros(comm.size * spread.rows, y.shape[1])
        y = every.index_copy_(0, spread.real, y)
    return comm.reduce_scatter(y)[:count]


def gathered_wanted(comm: Communicator, hidden: Tensor, spread: Spread) -> Tensor:
    """This rank's logit rows [rows, n] → those of the step, in the order of its works."""
    if not spread.wanted:
        return hidden
    rows = comm.gather_rows(_filled(hidden, spread.wanted))
    return rows if spread.order is None else rows[spread.order]


def _filled(x: Tensor, rows: int) -> Tensor:
    """The same with zero rows behind: every rank sends as many."""
    if x.shape[0] == rows:
        return x
    filled = x.new_zeros(rows, *x.shape[1:])
    filled[: x.shape[0]] = x
    return filled
