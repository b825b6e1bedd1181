"""Decode steps and prefill at long contexts, of a whole engine on the accelerator that is here.

python benchmarks/device_long.py CHECKPOINT [--batch 32] [--short 2048] [--long 65536]
    [--prefill 32768 65536] [--profile] [--set NAME=VALUE ...]

--short: prompts of so many random tokens are computed, then decoded.
--long: prompts of so many random tokens, distinct, whose computation is left out: their pages are
taken from the engine's pool, filled as each layer would from random normed hidden states at their
positions (its own projections, its own ops that write latents and index keys), and put into the
prefix cache. The requests then match it, and all that is timed is the engine's own: scheduler, page
tables, captured decode steps. Attention to random latents is spread evenly; its cost does not
depend on that.
--prefill: one prompt of random tokens, from submission to its first token.

A decode step's figure is the mean time between the engine's last 64 steps of a run, the median of
three runs; prefill is the median of two runs with other tokens, after one that is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from device_decode import step_profile, value

from ds_runtime import LLM
from ds_runtime.engine.engine import Engine
from ds_runtime.model.deepseek import DeepSeekModel
from ds_runtime.model.indexer import Selection
from ds_runtime.ops.batch import Batch
from ds_runtime.ops.contracts.caches import Caches
from ds_runtime_bench.engine.one_batch import generate_seconds, random_prompts
from ds_runtime_bench.record import append, environment, load_format

STEPS, WARM = 64, 16
ROWS = 4096  # tokens whose caches are filled at a time


def engine_of(llm: LLM) -> Engine:
    """The engine in this process."""
    engine = llm._engine
    assert engine is not None, "the engine is closed"
    return engine


@torch.inference_mode()
def fill(llm: LLM, prompts: Sequence[Sequence[int]]) -> None:
    """Put all full pages of the prompts into the prefix cache, with latents and index keys of
    random hidden states. The prompts' first pages differ, and nothing runs."""
    engine = engine_of(llm)
    runner, (held,) = engine.runner, engine.scheduler.holdings.groups
    prefix, size = held.prefix, runner.config.page_size
    assert prefix is not None, "the prefix cache is off"
    model, _ = runner.model, torch.manual_seed(7)
    for prompt in prompts:
        count = (len(prompt) - 1) // size
        pages = held.pool.alloc(count)
        prefix.lock(prefix.root())
        match, twins = prefix.extend(prefix.root(), prompt[: count * size], pages)
        assert not twins, "two prompts begin alike"
        prefix.unlock(match.node)
        table = torch.tensor(pages, device=runner.device)
        for first in range(0, count * size, ROWS):
            positions = torch.arange(first, min(first + ROWS, count * size), device=runner.device)
            slots = table[positions // size] * size + positions % size
            write(model, Batch(positions, positions, slots, positions[:0]), runner.caches)
    runner.platform.synchronize()


def write(model: DeepSeekModel, batch: Batch, caches: Caches) -> None:
    """Every layer's latents and index keys of random normed hidden states."""
    for block, step in model._layers(caches, batch, Selection()):
        at, shape = block.attention, (batch.num_tokens, model.config.hidden)
        x = torch.randn(shape, device=batch.slots.device).to(model.dtype)
        made = at.project(x, step)
        if made.query is not None:
            at._index(x, made.query, made.keys, step)


def step_ms(llm: LLM, prompts: Sequence[Sequence[int]]) -> float:
    """Milliseconds between the engine's last STEPS steps."""
    engine, ends = engine_of(llm), list[float]()
    plain = engine.step

    def timed() -> Any:
        found = plain()
        ends.append(time.perf_counter())
        return found

    engine.step = timed  # type: ignore[method-assign]
    try:
        generate_seconds(llm, prompts, WARM + STEPS)
    finally:
        del engine.step
    last = ends[:-2]  # the last two launch nothing, or a part of the batch
    return (last[-1] - last[-1 - STEPS + 4]) / (STEPS - 4) * 1e3


def prefill_ms(llm: LLM, length: int, vocab: int) -> float:
    """Of one prompt."""
    runs = [generate_seconds(llm, random_prompts(1, length, vocab, seed), 1) for seed in (1, 2, 3)]
    return statistics.median(runs[1:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="its folder, or one of a config.json alone")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--short", type=int, nargs="*", default=[2048])
    parser.add_argument("--long", type=int, nargs="*", default=[65536])
    parser.add_argument("--prefill", type=int, nargs="*", default=[32768, 65536])
    parser.add_argument("--profile", action="store_true", help="of the decode steps")
    parser.add_argument("--out", type=Path, help="add one JSON line to this file")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    settings = {name: value(text) for name, text in (s.split("=", 1) for s in args.set)}
    settings.setdefault("load_format", load_format(args.checkpoint))
    vocab = json.loads((args.checkpoint / "config.json").read_text())["vocab_size"]
    most = max([*args.short, *args.long, *args.prefill]) + 512
    start = time.perf_counter()
    with LLM(args.checkpoint, **{"context_length": most, **settings}) as llm:
        report: dict[str, Any] = {
            "bench": "device-long",
            "model": args.checkpoint.name,
            "command": " ".join(sys.argv),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
            "ready_s": time.perf_counter() - start,
            "kernels": sorted(f"{r.op} {r.kernel} {' '.join(r.sites)[:70]}" for r in llm.plan.rows),
            "results": [],
        }
        print(f"ready after {report['ready_s']:.1f} s", *report["kernels"], sep="\n", flush=True)

        def found(**row: Any) -> None:
            report["results"].append(row)
            print({k: v for k, v in row.items() if k != "kernels"}, flush=True)
            for kernel in row.get("kernels", []):
                print("   ", *kernel, flush=True)

        for length in args.long:
            prompts = random_prompts(args.batch, length + 1, vocab, seed=4)
            start = time.perf_counter()
            fill(llm, prompts)
            print(f"filled in {time.perf_counter() - start:.1f} s", flush=True)
            runs = [step_ms(llm, prompts) for _ in range(3)]
            row = {"prompt": length, "batch": args.batch, "filled": True}
            found(**row, step_ms=statistics.median(runs), runs=runs)
            if args.profile:
                found(**row, **step_profile(llm, prompts))
            llm.flush_cache()
        for length in args.short:
            prompts = random_prompts(args.batch, length, vocab)
            runs = [step_ms(llm, prompts) for _ in range(3)]
            row = {"prompt": length, "batch": args.batch}
            found(**row, step_ms=statistics.median(runs), runs=runs)
            if args.profile:
                found(**row, **step_profile(llm, prompts))
            llm.flush_cache()
        for length in args.prefill:
            found(prompt=length, batch=1, prefill_ms=prefill_ms(llm, length, vocab))
            llm.flush_cache()
    if args.out:
        append(args.out, {**report, **environment()})


if __name__ == "__main__":
    main()
