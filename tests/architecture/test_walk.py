"""How many files a decode step goes through, from its launch to the device."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

from ds_runtime import LLM, SamplingParams
from ds_runtime.engine.messages import Submit

ENGINE = Path(__file__).parents[2] / "core" / "ds_runtime" / "engine"
SETTINGS = {"platform": "cpu", "threads": 1, "kv_memory": 40_000_000, "context_length": 256}


def test_a_reader_of_a_decode_step_opens_few_files() -> None:
    entered = set[str]()

    def called(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ENGINE):
            entered.add(path.relative_to(ENGINE).as_posix())

    with LLM("demo", **SETTINGS) as llm:
        engine = llm._alive()
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        engine.submit(Submit(rid="a", prompt=[5, 6, 7], params=params, seed=0))
        for _ in range(20):  # until such steps are replayed, where they are
            engine.step()
        plan = engine.scheduler.schedule()
        assert plan is not None and all(work.tokens is None for work in plan.works)
        sys.setprofile(called)
        try:
            handle = engine.runner.launch(plan)
        finally:
            sys.setprofile(None)
        engine.scheduler.update(plan, engine.runner.collect(handle))
    roads = {name for name in entered if not name.startswith("step/")}
    assert "step/inputs.py" in entered and len(roads) <= 6, sorted(roads)
    assert len(entered) <= 13, sorted(entered)  # with what a step is made of, from inputs to draws
