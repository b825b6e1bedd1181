"""A step's works, divided into two batches."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ds_runtime.engine.step.plan import Work
from ds_runtime.parallel.sums.halves import Halves


def divided(works: Sequence[Work], halves: Halves) -> tuple[Sequence[Work], ...]:
    """Those of each half, in their order: together they have the same tokens and logit rows. Those
    that attend as decode does are in the first one. Empty where the step is not divided."""
    place = _place(works, halves)
    if place is None:
        return ()
    at, taken = place
    if not taken:
        return works[:at], works[at:]
    first, second = _apart(works[at], taken)
    return [*works[:at], first], [second, *works[at + 1 :]]


def rows_of(works: Sequence[Work], halves: Halves) -> tuple[int, ...]:
    """How many rows each half has. Empty where the step is not divided."""
    place = _place(works, halves)
    if place is None:
        return ()
    lengths = [work.length for work in works]
    first = sum(lengths[: place[0]]) + place[1]
    return first, sum(lengths) - first


def _place(works: Sequence[Work], halves: Halves) -> tuple[int, int] | None:
    fixed = next((n for n, work in enumerate(works) if not work.as_decode), len(works))
    return halves.place([work.length for work in works], fixed)


def _apart(work: Work, taken: int) -> tuple[Work, Work]:
    """A prompt's first tokens, which draw nothing, and the others."""
    assert work.tokens is not None, "decode works are not divided"
    first = replace(work, length=taken, tokens=work.tokens[:taken], sample=False)
    rest = {"start": work.start + taken, "length": work.length - taken}
    return first, replace(work, **rest, tokens=work.tokens[taken:])
