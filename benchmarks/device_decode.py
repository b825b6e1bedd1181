"""Decode steps and prefill of a whole engine on the accelerator that is here, and where time goes.

python benchmarks/device_decode.py CHECKPOINT [--batch N ...] [--profile N ...]
    [--profile-prefill N ...] [--prompts N ...] [--set NAME=VALUE ...]

A step's figure is (t(161 tokens) − t(33)) / 128 through LLM.generate, scheduler included, median of
three, prompts of 512 random tokens, and beside it the median between the ends of steps by the
device's events; prefill is t(1 token), for --prompts of single prompts of these lengths, median of
seven. A profile runs 48 more steps and sums the device's kernels by name over the last 32, with
the time in which none ran. All is captured first that a server captures while idle:
`prefill_graphs` has the tokens of captured steps with prompts. --set gives fields of EngineConfig.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ds_runtime import LLM
from ds_runtime_bench.engine.one_batch import generate_seconds, random_prompts
from ds_runtime_bench.record import append, environment, load_format

PROMPT, FIRST, LAST = 512, 33, 161


def all_captured(llm: LLM) -> list[int]:
    """Do what a server does while idle, which an `LLM` never is: capture what the start has left.
    Returns the tokens of the steps with prompts that are captured."""
    engine = llm._alive()
    while engine.prepare():
        pass
    prefills = engine.runner.programs.op_by_op.prefills
    return [] if prefills is None else list(prefills.sizes)


def by_events(llm: LLM, prompts: Sequence[Sequence[int]]) -> float:
    """Milliseconds between the ends of steps on the device, median of as many as `step` counts."""
    runner, events = llm._alive().runner, list[torch.Event]()
    launch = runner.launch

    def noted(plan: Any) -> Any:
        handle = launch(plan)
        events.append(torch.Event(enable_timing=True))
        events[-1].record()
        return handle

    runner.launch = noted  # type: ignore[method-assign]
    try:
        generate_seconds(llm, prompts, LAST)
    finally:
        del runner.launch
    torch.accelerator.synchronize()
    ends = events[FIRST - LAST - 1 :]
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(ends))


def step(llm: LLM, batch: int, vocab: int) -> dict[str, float]:
    """Milliseconds per decode step, and of prefill."""
    prompts = random_prompts(batch, PROMPT, vocab)
    generate_seconds(llm, prompts, 3)
    prefill = statistics.median(generate_seconds(llm, prompts, 1) for _ in range(3))
    each = [
        (generate_seconds(llm, prompts, LAST) - generate_seconds(llm, prompts, FIRST))
        / (LAST - FIRST)
        for _ in range(3)
    ]
    return {
        "batch": batch,
        "step_ms": statistics.median(each) * 1e3,
        **({"device_ms": by_events(llm, prompts)} if torch.accelerator.is_available() else {}),
        "prefill_ms": prefill * 1e3,
        "prefill_tokens_per_s": batch * PROMPT / prefill,
    }


def prompt(llm: LLM, length: int, vocab: int) -> dict[str, float]:
    """Milliseconds from a prompt to its first token."""
    prompts = random_prompts(1, length, vocab)
    generate_seconds(llm, prompts, 3)
    every = [generate_seconds(llm, prompts, 1) for _ in range(7)]
    return {"prompt": length, "prefill_ms": statistics.median(every) * 1e3}


def device_spans(
    llm: LLM, prompts: Sequence[Sequence[int]], tokens: int
) -> list[tuple[float, float, str]]:
    """(start, end, name) in microseconds of all that the device did for one generate()."""
    generate_seconds(llm, prompts, 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as run:
        generate_seconds(llm, prompts, tokens)
    return sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in run.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    )


def profile_prefill(llm: LLM, batch: int, vocab: int) -> dict[str, Any]:
    """Microseconds of a whole prefill by kernel."""
    spans = device_spans(llm, random_prompts(batch, PROMPT, vocab), 1)
    by_name: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for start, end, name in spans:
        by_name[name] += end - start
        launches[name] += 1
    return {
        "batch": batch,
        "prefill_us": max(end for _, end, _ in spans) - spans[0][0],
        "busy_us": sum(by_name.values()),
        "kernels": [[n[:90], launches[n], round(us, 1)] for n, us in by_name.most_common(25)],
    }


def profile(llm: LLM, batch: int, vocab: int) -> dict[str, Any]:
    """Microseconds per step by kernel, of the steps at the end of a run."""
    return {"batch": batch, **step_profile(llm, random_prompts(batch, PROMPT, vocab))}


def step_profile(llm: LLM, prompts: Sequence[Sequence[int]], steps: int = 32) -> dict[str, Any]:
    """The same of the last `steps` steps of these prompts."""
    spans = device_spans(llm, prompts, steps + 16)
    # A step samples once: the last launch of a name that occurs once per step marks its end.
    counts = Counter(name for _, _, name in spans)
    once = [n for n, c in counts.items() if steps + 14 <= c <= steps + 17]
    if not once:
        return {"note": "no kernel runs once per step"}
    ends = [end for _, end, name in spans if name == once[-1]]
    begin, finish = ends[-1 - steps], ends[-1]
    busy, until, gap = 0.0, begin, dict.fromkeys(ends[-1 - steps :], 0.0)
    bounds = list(gap)
    by_name: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for start, end, name in spans:
        if begin <= start and end <= finish:
            by_name[name] += end - start
            launches[name] += 1
            busy += max(0.0, end - max(start, until))
            step_end = bounds[bisect_left(bounds, end)]
            gap[step_end] = max(gap[step_end], start - until)
            until = max(until, end)
    return {
        "step_us": (finish - begin) / steps,
        "idle_us": (finish - begin - busy) / steps,
        "largest_gap_us": statistics.median(list(gap.values())[1:]),
        "launches": sum(launches.values()) / steps,
        "kernels": [
            [name[:90], round(launches[name] / steps, 2), round(us / steps, 2)]
            for name, us in by_name.most_common(40)
        ],
    }


def value(text: str) -> Any:
    """A number or a flag as JSON writes it, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="its folder, or one of a config.json alone")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32, 64, 128])
    parser.add_argument("--profile", type=int, nargs="*", default=[])
    parser.add_argument("--profile-prefill", type=int, nargs="*", default=[], metavar="N")
    parser.add_argument("--prompts", type=int, nargs="*", default=[], metavar="N")
    parser.add_argument("--out", type=Path, help="add one JSON line to this file")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    settings = {name: value(text) for name, text in (s.split("=", 1) for s in args.set)}
    settings.setdefault("load_format", load_format(args.checkpoint))
    vocab = json.loads((args.checkpoint / "config.json").read_text())["vocab_size"]
    start = time.perf_counter()
    with LLM(args.checkpoint, disable_radix_cache=True, **settings) as llm:
        ready = time.perf_counter() - start
        first = generate_seconds(llm, random_prompts(1, PROMPT, vocab, 1), 1)
        print(f"ready after {ready:.1f} s, first token {first:.2f} s later")
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        report: dict[str, Any] = {
            "bench": "device-decode",
            "model": args.checkpoint.name,
            "command": " ".join(sys.argv),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
            "ready_s": ready,
            "device_peak_bytes": peak,
            "prefill_graphs": all_captured(llm),
            "kernels": sorted(f"{r.op} {r.kernel} {' '.join(r.sites)[:70]}" for r in llm.plan.rows),
            "steps": [],
        }
        print("\n".join(report["kernels"]))
        for batch in args.batch:
            report["steps"].append(found := step(llm, batch, vocab))
            print({k: round(v, 3) for k, v in found.items()}, flush=True)
        for length in args.prompts:
            report["steps"].append(found := prompt(llm, length, vocab))
            print({k: round(v, 3) for k, v in found.items()}, flush=True)
        profiles = [(profile, b) for b in args.profile]
        profiles += [(profile_prefill, b) for b in args.profile_prefill]
        for what, batch in profiles:
            shown = what(llm, batch, vocab)
            print({k: v for k, v in shown.items() if k != "kernels"})
            for row in shown.get("kernels", []):
                print("   ", *row)
            sys.stdout.flush()
            report.setdefault("profiles", []).append(shown)
    if args.out:
        append(args.out, {**report, **environment()})


if __name__ == "__main__":
    main()
