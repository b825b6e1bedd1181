"""Which kind of all-reduce serves a message of a size. Torch-free.

Small messages wait for latency, and large ones for the link. With `one_shot` every rank reads the
parts of all others, and adds them itself: one exchange of signals, and most bytes. With `two_shot`
each rank adds a share, and then all read the sums: two exchanges, and fewest bytes. The library's
own serves whatever is larger. Where one kind hands over to the next depends on the device, its
links and the number of ranks, so it is measured (`measured/sums.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

LIBRARY: Final = "all_reduce"
ONE_SHOT: Final = "one_shot"
TWO_SHOT: Final = "two_shot"
FAST: Final = (ONE_SHOT, TWO_SHOT)
"""Kinds beside the library's, those for smaller messages first."""

OVERLAPPED: Final = "all_reduce_async"
"""The library's, in steps of two halves: it overlaps the compute of the other half."""

IN_ORDER: Final = "in_order"
"""What serves every size where ranks are added in their order; `sums/in_order.py` divides it."""

MOST = 1 << 26
"""Bytes of a message beyond which the library's own always serves."""

SUMMED: Final = ("float32", "bfloat16")
"""Dtypes that fast kinds sum."""

NORMED: Final = "bfloat16"
"""The dtype of sums that are one kernel with the norm after them, and of logits that one kernel
gathers."""

GATHER_LOGITS: Final = "gather_logits"
"""The head's gather in one kernel; `parallel/sums/logits.py`."""

GATHERED: Final = "all_gather"
"""The library's gather, which serves the head's other sizes."""

GATHERED_BY: Final = 8
"""Values of which a rank's part of a row is a multiple, where one kernel gathers."""

INSTEAD: Final = {**dict.fromkeys(FAST, LIBRARY), GATHER_LOGITS: GATHERED}
"""The library's kind in place of each fast one."""

ALIGNED = 16
"""Bytes of which a message of a fast kind is a multiple."""


def received(kind: str, ranks: int) -> float:
    """Bytes that a rank receives for each byte of the message."""
    return ranks - 1 if kind == ONE_SHOT else 2 * (ranks - 1) / ranks


@dataclass(frozen=True, slots=True)
class SumSizes:
    """Of groups of one size. upto: the most bytes of a message for each kind besides the library's
    that serves, rising."""

    upto: tuple[tuple[str, int], ...] = ()

    def kind(self, nbytes: float) -> str:
        """The kind that serves a message of this size."""
        if nbytes > 0 and nbytes % ALIGNED == 0:
            return next((kind for kind, most in self.upto if nbytes <= most), LIBRARY)
        return LIBRARY

    @property
    def most(self) -> int:
        """Bytes that are shared with the other ranks; 0 where the library alone serves."""
        return max((most for _, most in self.upto), default=0)

    def __str__(self) -> str:
        parts = [f"{kind} up to {spelled(most)}" for kind, most in self.upto]
        return ", ".join([*parts, f"{LIBRARY} of the library above" if parts else LIBRARY])


LIBRARY_ALONE: Final = SumSizes()


@dataclass(frozen=True, slots=True)
class Sums:
    """Of the ranks that divide heads, whose sums follow attention and FFNs. said: for the plan, ""
    where the platform has the library's kind alone. at_once: where ranks add in their order, one
    kernel adds few values. normed: sums of the one-shot kind are one kernel with the add and the
    norm after them, if ranks can set it up. gathered: bytes of the logits of all ranks that divide
    the vocabulary, up to which one kernel gathers them."""

    sizes: SumSizes = LIBRARY_ALONE
    said: str = ""
    at_once: bool = False
    normed: bool = False
    gathered: int = 0


LIBRARY_SUMS: Final = Sums()


def chosen(
    curves: Mapping[str, Mapping[int, float]], kinds: Sequence[str] = (*FAST, LIBRARY)
) -> SumSizes:
    """What follows from seconds by kind and bytes. kinds: those for smaller messages first; the
    last is the library's, and was measured.

    Each kind serves up to one of the sizes that all were measured at. Of all such limits those are
    taken whose times are least, each divided by the fastest at its size, so that every size has the
    same weight. Of equal ones the library's kind has the most.
    """
    order = [kind for kind in kinds if kind in curves]
    fast = order[:-1]
    sizes = sorted(set.intersection(*(set(curves[kind]) for kind in order)))
    sizes = [size for size in sizes if size <= MOST]
    # cost[i]: the least of the first sizes so far, if kind i serves the last of them
    best = [(0.0 if i == 0 else math.inf, tuple[int, ...]()) for i in range(len(order))]
    for at in sizes:
        least = min(curves[kind][at] for kind in order)
        reached = []
        for i, kind in enumerate(order):
            cost, path = min(best[: i + 1], key=lambda one: (one[0], tuple(-k for k in one[1])))
            reached.append((cost + curves[kind][at] / least, (*path, i)))
        best = reached
    _, path = min(best, key=lambda one: (one[0], tuple(-k for k in one[1])))
    upto = []
    for i, kind in enumerate(fast):
        if served := [size for size, by in zip(sizes, path, strict=True) if by == i]:
            upto.append((kind, served[-1]))
    return SumSizes(tuple(upto))


def spelled(size: int) -> str:
    """Bytes, in the largest unit of which they are a multiple."""
    for unit, shift in (("MiB", 20), ("KiB", 10)):
        if size >> shift and not size % (1 << shift):
            return f"{size >> shift} {unit}"
    return f"{size} B"
