"""Decode steps on the CPU op by op and as one native call, in turns in one process.

    python benchmarks/cpu_steps.py CHECKPOINT [--set quantize=int4] [--batch-size 1 4 16]
        [--no-record]

Greedy steps behind prompts of 16 tokens; medians of 10 turns of 16 steps each. `lies outside`: what
a step takes beside the recorded call. Rows go to benchmarks/results/cpu_steps.jsonl with machine,
versions and commit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_runtime.engine.process.entry import enter, set_environment
from ds_runtime_bench.record import append, environment

RESULTS = Path(__file__).parent / "results" / "cpu_steps.jsonl"
PROMPT, TURNS, STEPS = 16, 10, 16


class Steps:
    """Requests that decode side by side, up to `tokens` each. One page run of each, and a greedy
    row."""

    def __init__(
        self,
        model: str,
        settings: dict[str, Any],
        most: int,
        tokens: int = PROMPT + 2 * STEPS * (TURNS + 2),
    ) -> None:
        from ds_runtime.assembly.assemble import assemble
        from ds_runtime.config import EngineConfig
        from ds_runtime.kv.budget import FULL_CONTEXTS

        page = EngineConfig(model=model, **settings).page_size
        self._pages = -(-tokens // page)
        context = -(-most // FULL_CONTEXTS) * self._pages * page  # the cache holds so many of them
        given = {"context_length": context, "max_running_requests": most, **settings}
        config = EngineConfig(model=model, **given)
        assembly = assemble(config, tuple(given))
        set_environment(assembly.platform.process_env())
        from ds_runtime.engine.device.runner import Runner
        from ds_runtime.parallel.world import World

        enter(assembly.platform, threads=config.threads)
        self.runner = Runner(assembly, World.alone())
        self.runner.warm_up()
        assert most * self._pages <= self.runner.num_pages, "no memory for the caches of all"
        self.works: list[Any] = []

    def begin(self, count: int) -> None:
        """New requests, with their prompts computed."""
        from ds_runtime.engine.step.plan import RowInit, StepPlan, Work
        from ds_runtime.sampling_params import SamplingParams

        self.works, greedy = [], SamplingParams(temperature=0.0)
        for row in range(count):
            prompt = [(97 * row + 31 * i) % 1000 + 5 for i in range(PROMPT)]
            pages = list(range(row * self._pages, (row + 1) * self._pages))
            init = RowInit(row=row, params=greedy, seed=0, choice=0, prompt=prompt)
            work = Work(rid=str(row), row=row, start=0, length=PROMPT, pages=pages, tokens=prompt)
            self.runner.collect(self.runner.launch(StepPlan(step=0, works=[work], init=[init])))
            work = Work(rid=str(row), row=row, start=PROMPT - 1, length=1, pages=pages)
            self.works.append(work)

    def step(self) -> float:
        """Seconds of one decode step of all."""
        from ds_runtime.engine.step.plan import StepPlan

        for work in self.works:
            work.start += 1
        start = time.perf_counter()
        self.runner.collect(self.runner.launch(StepPlan(step=0, works=list(self.works))))
        return time.perf_counter() - start


def settings_of(pairs: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE pairs as fields of EngineConfig, numbers as such."""
    split = (pair.split("=", 1) for pair in pairs)
    return {name: int(value) if value.isdigit() else value for name, value in split}


def measured(steps: Steps, count: int) -> dict[str, Any]:
    """Milliseconds of steps of `count` requests, both ways."""
    runner, found = steps.runner, dict[str, list[float]](recorded=[], op_by_op=[], call=[])
    programs = runner.programs
    assert programs.sizes, "steps are not captured here"
    steps.begin(count)
    for _ in range(STEPS):  # it is recorded among these
        steps.step()
    program = programs.captured[count, 1]
    replay = program.replay
    assert replay is not None

    def timed() -> None:
        start = time.perf_counter()
        replay()
        found["call"].append(time.perf_counter() - start)

    for _ in range(TURNS):
        program.replay = timed
        found["recorded"] += [steps.step() for _ in range(STEPS)]
        program.replay, programs.serves = replay, False
        found["op_by_op"] += [steps.step() for _ in range(STEPS)]
        programs.serves = True
    times = {name: 1e3 * statistics.median(seconds) for name, seconds in found.items()}
    outside = [a - b for a, b in zip(found["recorded"], found["call"], strict=True)]
    return {
        "batch": count,
        "ms": times,
        "lies_outside_ms": 1e3 * statistics.median(outside),
        "ratio": times["op_by_op"] / times["recorded"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per batch size; record all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args(argv)
    settings = settings_of(args.set)
    steps = Steps(args.checkpoint, {"platform": "cpu", **settings}, max(args.batch_size))
    results = []
    for count in args.batch_size:
        results.append(row := measured(steps, count))
        ms = row["ms"]
        print(
            f"batch {count}: op by op {ms['op_by_op']:.2f} ms, recorded {ms['recorded']:.2f} "
            f"({row['ratio']:.3f} x), of which {row['lies_outside_ms']:.2f} outside the call"
        )
    if not args.no_record:
        model = {"model": Path(args.checkpoint).name, "settings": settings}
        append(RESULTS, {"bench": "cpu_steps", **model, "results": results, **environment()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
