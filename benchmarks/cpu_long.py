"""Decode steps on the CPU behind a short and a long context, in turns in one process.

    python benchmarks/cpu_long.py CHECKPOINT [--set quantize=int4] [--context 128 8192]

One sequence; medians of TURNS turns of STEPS steps at either length, over a cache that holds zeros
beyond the prompt: what lies there does not change what is read and multiplied. `grown`: the longer
step's time above the shorter one's, over the larger of what its extra bytes and its extra FLOPs
take at the ceilings measured first. Rows go to benchmarks/results/cpu_steps.jsonl with machine,
versions and commit.
"""

from __future__ import annotations

import argparse
import json
import statistics

from cpu_steps import RESULTS, STEPS, TURNS, Steps

from ds_runtime.bench import work
from ds_runtime.bench.record import append, environment
from ds_runtime.bench.work import Work


def attention(steps: Steps, length: int) -> Work:
    """What decode reads and multiplies in all layers for a context."""
    assembly = steps.runner.assembly
    dims, model = assembly.model.dims(), assembly.model
    heads, latent, rope = dims["heads"], dims["kv_lora"], dims["qk_rope"]
    one = work.mla_decode(heads, latent, rope, "bfloat16", "bfloat16", (length,))
    return Work(reads=one.reads * model.layers, flops=one.flops * model.layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--context", type=int, nargs=2, default=[128, 8192], metavar="N")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    settings = dict(pair.split("=", 1) for pair in args.set)
    short, long = args.context
    steps = Steps(args.checkpoint, settings, 1, long + 2 * STEPS)
    ceilings = steps.runner.platform.ceilings(0)
    steps.begin(1)
    found: dict[int, list[float]] = {short: [], long: []}
    for turn in range(TURNS + 1):
        for length in (short, long) if turn % 2 else (long, short):
            steps.works[0].start = length
            each = statistics.median(steps.step() for _ in range(STEPS))
            if turn:  # the first one records the step
                found[length].append(each)
    times = {length: statistics.median(each) for length, each in found.items()}
    less, more = attention(steps, short), attention(steps, long)
    by_bytes = (more.reads - less.reads) / ceilings.bandwidth
    by_flops = (more.flops - less.flops) / ceilings.compute["bfloat16"]
    row = {
        "bench": "cpu-long",
        "checkpoint": args.checkpoint.rstrip("/").rpartition("/")[2],
        "settings": settings,
        "ms": {length: round(each * 1e3, 3) for length, each in times.items()},
        "rate": round(times[short] / times[long], 3),
        "extra_ms": {"bytes": round(by_bytes * 1e3, 3), "flops": round(by_flops * 1e3, 3)},
        "grown": round((times[long] - times[short]) / max(by_bytes, by_flops), 2),
        "bandwidth_gb_per_s": round(ceilings.bandwidth / 1e9, 1),
        "gflop_per_s": {k: round(v / 1e9) for k, v in ceilings.compute.items()},
        **environment(),
    }
    print(json.dumps({k: v for k, v in row.items() if k not in ("machine", "versions")}))
    append(RESULTS, row)


if __name__ == "__main__":
    main()
