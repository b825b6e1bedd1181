"""How many files a decode step goes through, from the queue of requests to their tokens."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from ds_runtime import LLM, SamplingParams
from ds_runtime.engine.messages import Submit

ENGINE = Path(__file__).parents[2] / "core" / "ds_runtime" / "engine"
SETTINGS = {"platform": "cpu", "threads": 1, "kv_memory": 40_000_000, "context_length": 256}
# Of each room; that a step is launched, collected and told is the engine's own file.
MOST = {"engine.py": 1, "schedule": 2, "step": 5, "capture": 1, "device": 4, "speculate": 0}


@contextmanager
def walked() -> Iterator[set[str]]:
    """Files of the engine that are entered within."""
    entered = set[str]()

    def called(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ENGINE):
            entered.add(path.relative_to(ENGINE).as_posix())

    sys.setprofile(called)
    try:
        yield entered
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("replayed", [True, False], ids=["replayed", "op by op"])
def test_a_reader_of_a_decode_step_opens_few_files(replayed: bool) -> None:
    with LLM("demo", **SETTINGS, disable_graph=not replayed) as llm:
        engine = llm._alive()
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        engine.submit(Submit(rid="a", prompt=[5, 6, 7], params=params, seed=0))
        for _ in range(20):  # until such steps are replayed, where they are
            engine.step()
        with walked() as entered:
            told = engine.step()
    assert [len(message.tokens) for message in told] == [1]
    rooms = Counter(name.partition("/")[0] for name in entered)
    assert all(rooms[room] <= MOST[room] for room in rooms), sorted(entered)
    # From a plan to the device: inputs, and who decides how they run.
    roads = {n for n in entered if not n.startswith(("step/", "schedule/", "engine.py"))}
    assert "step/inputs.py" in entered and len(roads) <= 5, sorted(roads)


def test_from_a_plan_to_the_device_it_is_ten() -> None:
    """With what a step is made of, from inputs to draws."""
    with LLM("demo", **SETTINGS) as llm:
        engine = llm._alive()
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        engine.submit(Submit(rid="a", prompt=[5, 6, 7], params=params, seed=0))
        for _ in range(20):
            engine.step()
        plan = engine.scheduler.schedule()
        assert plan is not None and all(work.tokens is None for work in plan.works)
        with walked() as entered:
            handle = engine.runner.launch(plan)
        engine.scheduler.update(plan, engine.runner.collect(handle))
    roads = {name for name in entered if not name.startswith("step/")}
    assert "step/inputs.py" in entered and len(roads) <= 5, sorted(roads)
    assert len(entered) <= 10, sorted(entered)
