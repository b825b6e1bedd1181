"""Speculation on the accelerator that is here: rates beside plain decode, and what a cycle costs.

python benchmarks/device_speculative.py CHECKPOINT [--batch N ...] [--steps N ...] [--runs N]
    [--adaptive-only N ...] [--simulate P] [--temperature T] [--input-len N] [--output-len N]
    [--out FILE] [--profile BATCH:STEPS ...] [--set NAME=VALUE ...]

Two engines one after the other, plain and drafting; of the second every fixed number of steps and
the adaptive choice. Requests sample at a temperature of 1: greedy continuations of random weights
repeat themselves, so that a plain step reads fewer experts than one of real text. A rate is that of
the steps in which the whole batch decodes, from its 17th token on average to the first request's
last: of a batch of this size, not of what is left as it ends; medians. A cycle is the mean time of
such a step, a verification with the drafting behind it; its forwards alone are replays of its
captured pieces, back to back, in the midst of a run. A profile gives the device's kernels per
cycle, the time in which none ran and where, and what the host did. --set gives fields of
EngineConfig.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from device_decode import value

from ds_runtime import LLM, SamplingParams
from ds_runtime_bench.engine.one_batch import random_prompts
from ds_runtime_bench.record import append, environment, load_format

FIRST = 17


@dataclass(frozen=True)
class Prompts:
    """A batch, and what it is sampled with."""

    ids: list[list[int]]
    temperature: float


def run(llm: LLM, prompts: Prompts, tokens: int) -> int:
    """Verifications of all requests."""
    params = [
        SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=prompts.temperature, seed=i)
        for i in range(len(prompts.ids))
    ]
    before = llm.stats()
    llm.generate(prompts.ids, params)
    return llm.stats().verified - before.verified


def steps(llm: LLM, prompts: Prompts, tokens: int) -> list[tuple[float, int]]:
    """(seconds at which its results came, tokens in them) of every step of a run in which all
    requests decode, and have FIRST tokens on average."""
    runner, size = llm._alive().runner, len(prompts.ids)
    found, before, collect = list[tuple[float, int]](), [0], runner.collect

    def timed(handle: Any) -> Any:
        result, now = collect(handle), time.perf_counter()
        count = sum(len(work.tokens) for work in result.works)
        decoding = [work for work in handle.plan.works if work.tokens is None]
        if len(decoding) == size == len(handle.plan.works) and before[0] >= FIRST * size:
            found.append((now, count))
        before[0] += count
        return result

    runner.collect = timed  # type: ignore[method-assign]
    try:
        run(llm, prompts, tokens)
    finally:
        del runner.collect
    return found


def rate(llm: LLM, prompts: Prompts, tokens: int, runs: int) -> dict[str, Any]:
    """Tokens per second, tokens of a request per step, and milliseconds of a step."""
    run(llm, prompts, tokens)
    seen = [steps(llm, prompts, tokens) for _ in range(runs)]
    if any(len(each) < 2 for each in seen):
        raise SystemExit(
            f"{len(prompts.ids)} requests of {tokens} tokens hardly ever decode together: a larger "
            "--output-len, or --set kv_memory=BYTES"
        )
    seconds = [each[-1][0] - each[0][0] for each in seen]
    counts = [sum(count for _, count in each[1:]) for each in seen]
    rates = [count / time for count, time in zip(counts, seconds, strict=True)]
    number = sum(len(each) - 1 for each in seen)
    return {
        "tokens_per_s": round(statistics.median(rates), 1),
        "spread": round(max(rates) / min(rates), 3),
        "length": round(sum(counts) / number / len(prompts.ids), 2),
        "cycle_ms": round(sum(seconds) / number * 1e3, 3),
    }


def alone(llm: LLM, prompts: Prompts, drafts: int) -> dict[str, float]:
    """Milliseconds of a cycle's captured pieces, 20 replays each, in the midst of a run."""
    programs, found, calls = llm._alive().runner.programs, dict[str, float](), []
    if not programs.drafting:
        return found
    select = programs.select

    def selected(plan: Any) -> Any:
        program = select(plan)
        calls.append(1)
        if len(calls) == 6:
            measure(program)
        return program

    synchronize = llm._alive().runner.platform.synchronize

    def measure(program: Any) -> None:
        chain = programs.drafting[program.size, drafts]
        pieces = {
            "verify": program.replay,
            "draft": program.verdict.replay,
            "chain": chain.replay,
        }
        for name, piece in pieces.items():
            piece()
            synchronize()
            start = time.perf_counter()
            for _ in range(20):
                piece()
            synchronize()
            found[name] = round((time.perf_counter() - start) / 20 * 1e3, 3)

    programs.select = selected  # type: ignore[method-assign]
    run(llm, prompts, 40)
    del programs.select
    return found


def profile(llm: LLM, prompts: Prompts, tokens: int) -> dict[str, Any]:
    """Per verification: kernels, idle time and what it lies in front of; the host's functions."""
    run(llm, prompts, tokens)
    host = cProfile.Profile()
    host.enable()
    _ = run(llm, prompts, tokens)
    host.disable()
    text = io.StringIO()
    pstats.Stats(host, stream=text).sort_stats("tottime").print_stats(30)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        verified = run(llm, prompts, tokens)
    spans = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in seen.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    )
    steps = max(1.0, verified / len(prompts.ids))
    names, launches, gaps, number = Counter(), Counter(), Counter(), Counter()
    until = spans[0][0]
    for start, end, name in spans:
        names[name] += end - start
        launches[name] += 1
        if start > until + 5:
            gaps[name] += start - until
            number[name] += 1
        until = max(until, end)
    return {
        "batch": len(prompts.ids),
        "cycles": steps,
        "device_us": round((until - spans[0][0]) / steps, 1),
        "idle_us": {
            n[:70]: [round(us / steps, 1), round(number[n] / steps, 2)]
            for n, us in gaps.most_common(12)
        },
        "kernels": [
            [n[:70], round(launches[n] / steps, 2), round(us / steps, 1)]
            for n, us in names.most_common(30)
        ],
        "host": [line[:110] for line in text.getvalue().splitlines() if line.strip()][:40],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="its folder, or one of a config.json alone")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32, 64, 128])
    parser.add_argument("--steps", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--simulate", type=float, default=0.8)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--adaptive-only", type=int, nargs="*", default=[], metavar="BATCH")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=145)
    parser.add_argument("--profile", nargs="*", default=[], metavar="BATCH:STEPS")
    parser.add_argument("--out", type=Path, help="add one JSON line to this file")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    settings = {name: value(text) for name, text in (s.split("=", 1) for s in args.set)}
    settings.setdefault("load_format", load_format(args.checkpoint))
    settings = {"disable_radix_cache": True, "graph_sizes": tuple(args.batch), **settings}
    settings |= {"max_running_requests": max(args.batch)}
    vocab = json.loads((args.checkpoint / "config.json").read_text())["vocab_size"]
    batches = {
        size: Prompts(random_prompts(size, args.input_len, vocab), args.temperature)
        for size in args.batch
    }
    report: dict[str, Any] = {
        "bench": "device-speculative",
        "model": args.checkpoint.name,
        "command": " ".join(sys.argv),
        "simulated": args.simulate,
        "temperature": args.temperature,
        "input_len": args.input_len,
        "output_len": args.output_len,
        **environment(),
        "results": [],
        "profiles": [],
    }
    if torch.cuda.is_available():
        report["device"] = torch.cuda.get_device_name()
    plain = dict[int, float]()

    def measured(llm: LLM, size: int, name: str, drafts: int | None) -> None:
        figure = {"batch_size": size, "engine": name, "steps": drafts}
        figure |= rate(llm, batches[size], args.output_len, args.runs)
        if drafts and name == "forced":
            pieces = alone(llm, batches[size], drafts)
            figure["forwards_alone_ms"] = pieces
            if pieces:
                figure["cycle_over_forwards"] = round(figure["cycle_ms"] / sum(pieces.values()), 3)
        plain.setdefault(size, figure["tokens_per_s"])
        figure["over_plain"] = round(figure["tokens_per_s"] / plain[size], 3)
        report["results"].append(figure)
        print(json.dumps(figure), flush=True)

    plainly = {k: v for k, v in settings.items() if not k.startswith("speculative_")}
    with LLM(args.checkpoint, **plainly) as llm:
        for size in args.batch:
            measured(llm, size, "plain", 0)
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    chain = {"speculative_algorithm": "NEXTN", "speculative_num_steps": max(args.steps)}
    with LLM(args.checkpoint, speculative_adaptive=True, **chain, **settings) as llm:
        llm.simulate_acceptance(args.simulate)
        for size in args.batch:
            for drafts in args.steps if size not in args.adaptive_only else ():
                llm.force_drafts(drafts)
                measured(llm, size, "forced", drafts)
            llm.force_drafts(None)
            measured(llm, size, "adaptive", None)
        for which in args.profile:
            size, drafts = (int(part) for part in which.split(":"))
            llm.force_drafts(drafts)
            report["profiles"].append(profile(llm, batches[size], args.output_len))
            print(json.dumps(report["profiles"][-1], indent=1), flush=True)
    if args.out is not None:
        append(args.out, report)


if __name__ == "__main__":
    main()
