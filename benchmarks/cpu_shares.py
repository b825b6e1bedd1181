"""Decode steps on the CPU and plain reading of memory, in turns in one process: what share of the
read bandwidth a step reaches, also where other machines take a part of it that changes by the
minute.

    python benchmarks/cpu_shares.py CHECKPOINT [--set quantize=int4] [--batch-size 1 4 16]

Greedy steps behind prompts of 16 tokens, recorded as one native call. Every step's bytes per second
are held against the mean of a reading right before it and one right after, and steps are sorted by
it, for shared memory has more than one speed. Steps whose two readings differ by more than a fifth
are left out. Rows go to benchmarks/results/cpu_steps.jsonl with machine, versions and commit.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from cpu_experts import Reading
from cpu_steps import PROMPT, RESULTS, Steps, settings_of

from ds_runtime_bench.ops.step_work import step_bytes
from ds_runtime_bench.record import append, environment

FIRST, STEPS = 16, 150  # before anything is timed; timed
SPEEDS = ((0, 25), (25, 40), (40, 100), (100, 1000))  # GB/s


def measured(steps: Steps, reading: Reading, batch: int) -> list[dict[str, Any]]:
    """A row for each speed of memory that was met."""
    bound = step_bytes(steps.runner.assembly, (batch,), PROMPT + FIRST + STEPS // 2)[batch]
    nbytes = sum(work.nbytes for work in bound.values())
    steps.begin(batch)
    for _ in range(FIRST):
        steps.step()
    found, before = list[tuple[float, float]](), reading()
    for _ in range(STEPS):
        seconds = steps.step()
        after = reading()
        if abs(after - before) < 0.2 * max(after, before):
            found.append((seconds, (before + after) / 2))
        before = after
    rows = []
    for low, high in SPEEDS:
        some = [(s, r) for s, r in found if low <= r / 1e9 < high]
        if not some:
            continue
        rows.append(
            {
                "batch": batch,
                "steps": len(some),
                "read_gb_per_s": round(statistics.median(r for _, r in some) / 1e9, 1),
                "ms": round(statistics.median(s for s, _ in some) * 1e3, 2),
                "of_reading": round(statistics.median(nbytes / s / r for s, r in some), 3),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 4, 16])
    args = parser.parse_args()
    settings = settings_of(args.set)
    most = max(args.batch_size)
    steps = Steps(args.checkpoint, {"platform": "cpu", **settings}, most, PROMPT + FIRST + STEPS)
    reading, results = Reading(), []
    for batch in args.batch_size:
        for row in measured(steps, reading, batch):
            results.append(row)
            print(
                f"batch {batch}: {row['ms']:.2f} ms, {row['of_reading']:.0%} of reading at "
                f"{row['read_gb_per_s']} GB/s ({row['steps']} steps)",
                flush=True,
            )
    model = {"checkpoint": Path(args.checkpoint).name, "settings": settings}
    append(RESULTS, {"bench": "cpu-shares", **model, "results": results, **environment()})


if __name__ == "__main__":
    main()
