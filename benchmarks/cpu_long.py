"""Decode steps on the CPU behind a short and a long context, in turns in one process.

    python benchmarks/cpu_long.py CHECKPOINT [--set quantize=int4] [--context 128 8192]

One sequence, over a cache that holds zeros beyond the prompt: what lies there does not change what
is read and multiplied. A step of either length follows one of the other, for memory may give twice
as much in one second as in the next: `rate` and `grown` are medians over PAIRS of neighbours.
`grown`: the longer step's time above the shorter one's, over the larger of what its extra bytes and
its extra FLOPs take at the ceilings, the better of those measured before and after. Rows go to
benchmarks/results/cpu_steps.jsonl with machine, versions and commit.
"""

from __future__ import annotations

import argparse
import json
import statistics

from cpu_steps import RESULTS, Steps

from ds_runtime.ops.declare import OpWork
from ds_runtime_bench.ops.step_work import step_bytes
from ds_runtime_bench.record import append, environment

PAIRS, WARM = 200, 16  # the first ones record the step


def attention(steps: Steps, length: int) -> OpWork:
    """What decode reads and multiplies in all layers for a context."""
    return step_bytes(steps.runner.assembly, (1,), length, ["mla_decode"])[1]["mla_decode"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--context", type=int, nargs=2, default=[128, 8192], metavar="N")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    settings = dict(pair.split("=", 1) for pair in args.set)
    short, long = args.context
    steps = Steps(args.checkpoint, settings, 1, long + 2 * WARM)
    before = steps.runner.platform.ceilings(0)
    steps.begin(1)

    def step(length: int) -> float:
        steps.works[0].start = length
        return steps.step()

    pairs = [(step(short), step(long)) for _ in range(WARM + PAIRS)][WARM:]
    after = steps.runner.platform.ceilings(0)
    bandwidth = max(before.bandwidth, after.bandwidth)
    compute = {k: max(v, after.compute[k]) for k, v in before.compute.items()}
    each = {length: [pair[i] for pair in pairs] for i, length in enumerate((short, long))}
    extra = statistics.median(b - a for a, b in pairs)
    less, more = attention(steps, short), attention(steps, long)
    by_bytes = (more.cached - less.cached) / bandwidth
    by_flops = (more.flops - less.flops) / compute["bfloat16"]
    row = {
        "bench": "cpu-long",
        "checkpoint": args.checkpoint.rstrip("/").rpartition("/")[2],
        "settings": settings,
        "ms": {length: round(statistics.median(t) * 1e3, 3) for length, t in each.items()},
        "rate": round(statistics.median(a / b for a, b in pairs), 3),
        "extra_ms": {
            "bytes": round(by_bytes * 1e3, 3),
            "flops": round(by_flops * 1e3, 3),
            "seen": round(extra * 1e3, 3),
        },
        "grown": round(extra / max(by_bytes, by_flops), 2),
        "bandwidth_gb_per_s": round(bandwidth / 1e9, 1),
        "gflop_per_s": {k: round(v / 1e9) for k, v in compute.items()},
        **environment(),
    }
    print(json.dumps({k: v for k, v in row.items() if k not in ("machine", "versions")}))
    append(RESULTS, row)


if __name__ == "__main__":
    main()
