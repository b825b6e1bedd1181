"""FlashMLA's decode by the library's own plan and by this project's, on the device that is here.

python benchmarks/flash_mla_plans.py [--heads N] [--out FILE]

Equal sequences (within 32 tokens) in bfloat16, one query each; medians of five replays of captured
calls over caches in turns that no cache of the device holds, sums of pieces included, without what
the adapter launches in front. Microseconds, in how many pieces the sequences are, and of how many
parts of the device each plan makes use.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from flash_mla import flash_mla_with_kvcache, get_mla_decoding_metadata, get_mla_metadata
from torch import Tensor

from ds_runtime_bench.record import append, environment
from ds_runtime_cuda import flash_mla_plan

SIZES = ((1, 600), (1, 2000), (1, 8192), (1, 32768), (4, 600), (8, 600), (16, 600), (32, 600))
SIZES += ((64, 600), (96, 600), (128, 600), (256, 600), (4, 8192), (8, 8192), (32, 2000))
SIZES += ((32, 8192), (100, 1500))
APART = 400 << 20  # bytes between two uses of a cache


def timed(rows: int, length: int, heads: int) -> dict[str, Any]:
    """Both plans of one size."""
    draw = torch.Generator().manual_seed(0)
    lens = torch.randint(length - 32, length + 33, (rows,), generator=draw, dtype=torch.int32)
    pages = -(-int(lens.max()) // 64)
    count = min(40, APART // (rows * length * 1152) + 2)
    shape = (rows * pages, 64, 1, 576)
    caches = [torch.randn(shape, device="cuda").bfloat16() for _ in range(count)]
    table = torch.randperm(rows * pages, dtype=torch.int32, device="cuda").view(rows, pages)
    q = torch.randn(rows, 1, heads, 576, device="cuda").bfloat16()
    lens = lens.cuda()
    theirs = get_mla_decoding_metadata(lens, heads, 1, heads, use_legacy=True)
    plans = {"library": theirs, "own": flash_mla_plan.plan(lens, theirs[0].shape[0], heads)}
    found: dict[str, Any] = {"rows": rows, "length": length, "heads": heads}
    for name, (tiles, splits) in plans.items():
        schedule, _ = get_mla_metadata()
        schedule.tile_scheduler_metadata, schedule.num_splits = tiles, splits

        def call(cache: Tensor, schedule: Any = schedule) -> None:
            flash_mla_with_kvcache(
                q, cache, table, lens, 512, schedule, None,
                softmax_scale=0.07, causal=False, use_legacy=True,
            )  # fmt: skip

        call(caches[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for cache in caches:
                call(cache)
        each = []
        for _ in range(6):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            each.append(begin.elapsed_time(end) * 1e3 / count)
        found[name] = {
            "us": round(statistics.median(each[1:]), 2),
            "pieces": int(splits.diff().max()),
            "parts": int((tiles[:, 0] < rows).sum()),
        }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per size; record all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    results = []
    for rows, length in SIZES:
        results.append(row := timed(rows, length, args.heads))
        print(row, flush=True)
    if args.out is not None:
        device = torch.cuda.get_device_name()
        about = {"bench": "flash-mla-plans", "command": " ".join(sys.argv), "device": device}
        about["results"] = results
        append(args.out, about | environment())
    return 0


if __name__ == "__main__":
    sys.exit(main())
