"""The arrays of a step's halves are those of steps that have their works alone, at a small cost."""

from __future__ import annotations

import statistics
import time
from dataclasses import fields, is_dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_runtime.engine.step.halves import added, divided
from ds_runtime.engine.step.inputs import StepInputs
from ds_runtime.engine.step.plan import Work
from ds_runtime.engine.step.transfer import Upload
from ds_runtime.parallel.sums.halves import Halves
from examples import examples

PAGE = 16


class Hung:
    """Drafts that branch: what it makes shows what it was given."""

    def hang(self, places, starts, nodes):
        return starts + nodes, places + 2 * nodes


def made(row, start, length, tokens=True, **more):
    count = -(-(start + length) // PAGE)
    ids = [(7 * row + n) % 90 for n in range(length)] if tokens else None
    pages = [100 * row + n for n in range(count)]
    return Work(rid=str(row), row=row, start=start, length=length, pages=pages, tokens=ids, **more)


@st.composite
def steps(draw):
    adapts, drafts = draw(st.booleans()), draw(st.sampled_from([1, 3]))
    shapes = [
        (draw(st.integers(1, 90)), drafts, {"tokens": False})
        for _ in range(draw(st.integers(0, 5)))
    ]
    shapes += [
        (draw(st.integers(0, 90)), draw(st.integers(1, 9)), {"absorbed": True})
        for _ in range(draw(st.integers(0, 2)))
    ]
    for _ in range(draw(st.integers(1, 6))):
        scored = draw(st.sampled_from([None, 2]))
        more = {"prompt_logprobs": scored, "sample": draw(st.booleans())}
        shapes.append((draw(st.sampled_from([0, 16, 75])), draw(st.integers(1, 200)), more))
    works = []
    for row, (start, length, more) in enumerate(shapes):
        works.append(
            made(row, start, length, adapter=draw(st.integers(-1, 2)) if adapts else -1, **more)
        )
    return works


def batches(inputs, works, halves, packed, branched):
    """Of both halves: as parts of the step, and each made by itself."""
    sent = Upload(torch.device("cpu"), packed)
    parts = added(inputs.add(works, sent, branched=branched), halves, inputs, sent)
    alone = [inputs.add(half, sent, branched=branched) for half in halves]
    sent.send()
    return [[one.batch(sent, {}) for one in some] for some in (parts, alone)]


def check_same(found, wanted):
    """Every field of two batches, to the bit."""
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(found, wanted)
    elif is_dataclass(wanted):
        for one in fields(wanted):
            check_same(getattr(found, one.name), getattr(wanted, one.name))
    elif isinstance(wanted, tuple | list):
        assert len(found) == len(wanted)
        for pair in zip(found, wanted, strict=True):
            check_same(*pair)
    else:
        assert found == wanted


@settings(max_examples=examples(150), deadline=None)
@given(
    steps(),
    st.sampled_from([0.0, 0.25, 0.48]),
    st.sampled_from([5, 64, 4096]),
    st.booleans(),
    st.booleans(),
)
def test_a_half_is_a_step_of_its_works(works, share, chunk, packed, branched):
    halves = divided(works, Halves(8, share))
    if not halves:
        return
    inputs = StepInputs(PAGE, 64, 1024, torch.arange(48), chunk, width=3)
    for found, wanted in zip(
        *batches(inputs, works, halves, packed, Hung() if branched else None), strict=True
    ):
        check_same(found, wanted)


def seconds(run, times=60):
    """On this thread, of the fastest half of the runs."""
    taken = []
    for _ in range(times):
        begin = time.thread_time()
        run()
        taken.append(time.thread_time() - begin)
    return statistics.median(sorted(taken)[: times // 2])


@pytest.mark.parametrize("packed", [False, True])
def test_dividing_a_step_of_128_prompts_is_cheap(packed):
    """Beside making the step: to make the halves anew cost as much again, and more."""
    works, halves = [made(row, 0, 64) for row in range(128)], Halves(1024, 0.48)
    inputs = StepInputs(PAGE, 256, 4096, torch.zeros(129, dtype=torch.int64), 4096)

    def step(both):
        sent = Upload(torch.device("cpu"), packed)
        whole = inputs.add(works, sent)
        parts = added(whole, divided(works, halves), inputs, sent) if both else ()
        sent.send()
        return [one.batch(sent, {}) for one in (whole, *parts)]

    assert len(step(True)) == 3
    whole, both = seconds(lambda: step(False)), seconds(lambda: step(True))
    assert both < 1.7 * whole, (whole, both)
