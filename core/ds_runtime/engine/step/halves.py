"""A step's works, divided into two batches, and the arrays of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as changed

import numpy as np
from msgspec.structs import replace

from ds_runtime.engine.step.inputs import Added, StepInputs
from ds_runtime.engine.step.plan import Work
from ds_runtime.engine.step.transfer import Upload
from ds_runtime.parallel.sums.halves import Halves


def divided(works: Sequence[Work], halves: Halves) -> tuple[Sequence[Work], ...]:
    """The works of each half, in the order of the step. Both halves together have the step's tokens
    and logit rows. Works that attend as decode does are in the first half. Returns () where the
    step is not divided."""
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


def added(
    whole: Added, halves: Sequence[Sequence[Work]], inputs: StepInputs, upload: Upload
) -> list[Added]:
    """What `inputs.add` makes of each half's works, cut out of the whole step's arrays in the same
    upload. To make them again would cost the host as much as the step."""
    assert whole.prompts is not None and whole.logit_rows is not None, "prompts are divided"
    wanted, table = upload.array(whole.logit_rows), upload.array(whole.prompts.table)
    found, begin = list[Added](), 0
    for number, works in enumerate(halves):
        end = begin + sum(work.length for work in works)
        ids, positions, slots = (upload.array(n)[begin:end] for n in whole.numbers)
        own = wanted[slice(*np.searchsorted(wanted, (begin, end)))] - begin
        half = changed(
            whole,
            rows=whole.rows._replace(ids=ids, positions=positions, slots=slots),
            numbers=[upload.add(array) for array in (ids, positions, slots)],
            logit_rows=upload.add(own),
            adapters=None,
            prompts=None,
        )
        if adapts := any(work.adapter >= 0 for work in works):
            assert whole.adapters is not None, "a row has one"
            half.adapters = upload.add(upload.array(whole.adapters)[begin:end])
        if number:  # decode rows are in the first half
            half.rows, half.branched = half.rows._replace(lens=[]), None
        if prompts := [work for work in works if not work.as_decode]:
            pages = table[-len(prompts) :] if number else table
            half.prompts = inputs.prompts(prompts, pages, adapts, upload)
        found.append(half)
        begin = end
    return found


def _place(works: Sequence[Work], halves: Halves) -> tuple[int, int] | None:
    fixed = next((n for n, work in enumerate(works) if not work.as_decode), len(works))
    return halves.place([work.length for work in works], fixed)


def _apart(work: Work, taken: int) -> tuple[Work, Work]:
    """A prompt's first tokens, which draw nothing, and the others."""
    assert work.tokens is not None, "decode works are not divided"
    first = replace(work, length=taken, tokens=work.tokens[:taken], sample=False)
    rest = {"start": work.start + taken, "length": work.length - taken}
    return first, replace(work, **rest, tokens=work.tokens[taken:])
