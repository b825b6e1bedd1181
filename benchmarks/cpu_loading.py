"""How fast a checkpoint in the page cache becomes packed weights on the CPU.

    ds-runtime bench make-checkpoint --shape lite-2 DIR
    python benchmarks/cpu_loading.py DIR [DIR …] [--runs N] [--threads N]

From the first open to the last packed tensor, in a fresh process per run, beside the rate at which
two threads copy memory, measured before each. So are the rates at which they read the files into
memory that is used again, and fill new memory in large pages: what reads, fills new memory and
writes it once more goes at `bound` at most. Memory that a virtual machine gave back to its host is
slow to come again: as much as a load needs is touched before each. Rows go to
benchmarks/results/cpu_loading.jsonl.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from device_loading import read_rate

from ds_runtime_bench.record import append, environment

RESULTS = Path(__file__).parent / "results" / "cpu_loading.jsonl"
COPIED = 1 << 28  # bytes per thread and copy
LOAD = """
import json, sys, time, torch
from ds_runtime.assembly.assemble import assemble
from ds_runtime.config import EngineConfig
from ds_runtime.weights.load import load_model
from ds_runtime.ops.binding.bound import BoundOps
from ds_runtime.parallel.world import World

torch.set_num_threads(int(sys.argv[2]))
assembly = assemble(EngineConfig(model=sys.argv[1], platform="cpu", context_length=2048))
bound = BoundOps(assembly.binding)
begin = time.perf_counter()
model = load_model(assembly, bound, World.alone(), torch.device("cpu"))
print(json.dumps({"seconds": time.perf_counter() - begin, "layers": len(model.blocks)}))
"""


def new_rate(size: int, threads: int = 2) -> float:
    """Bytes per second that so many threads write into new memory in large pages, which the
    process before them had: the second of two times."""
    rates = []
    for _ in range(2):
        with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room:
            room.madvise(mmap.MADV_HUGEPAGE)
            parts = np.array_split(np.frombuffer(room, np.uint8), threads)
            workers = [threading.Thread(target=part.fill, args=(1,)) for part in parts]
            begin = time.perf_counter()
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            rates.append(size / (time.perf_counter() - begin))
            del parts, workers
    return rates[-1]


def memcpy_rate(threads: int = 2, runs: int = 7) -> float:
    """Bytes per second that so many threads copy between them, into memory already touched."""
    pairs = [(np.ones(COPIED, np.uint8), np.zeros(COPIED, np.uint8)) for _ in range(threads)]
    rates = []
    for _ in range(runs):
        workers = [threading.Thread(target=np.copyto, args=(b, a)) for a, b in pairs]
        begin = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        rates.append(threads * COPIED / (time.perf_counter() - begin))
    return statistics.median(rates)


def measure(folder: Path, runs: int, threads: int) -> dict[str, Any]:
    """Medians over runs, each with its own copy rate."""
    files = sorted(folder.glob("*.safetensors"))
    size = sum(f.stat().st_size for f in files)
    for file in files:  # into the page cache
        with file.open("rb") as handle:
            while handle.read(1 << 24):
                pass
    copies, loads, news, reads = [], [], [], []
    for _ in range(runs):
        copies.append(memcpy_rate())
        reads.append(read_rate(files[0], 2))
        news.append(new_rate(2 * size))
        command = [sys.executable, "-c", LOAD, str(folder), str(threads)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        loads.append(size / json.loads(done.stdout.splitlines()[-1])["seconds"])
    return {
        "bench": "cpu_loading",
        "model": folder.name,
        "threads": threads,
        "bytes": size,
        "rates": loads,
        "memcpy": copies,
        "reads": reads,
        "new": news,
        "share": statistics.median(a / b for a, b in zip(loads, copies, strict=True)),
        "bound": 1 / sum(1 / statistics.median(rates) for rates in (copies, reads, news)),
        **environment(),
    }


def main() -> int:
    """Measure, record and print."""
    parser = argparse.ArgumentParser(description="Loading speed from the page cache, on the CPU.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="checkpoints")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="(default: 3)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="(default: 2)")
    parser.add_argument("--dry", action="store_true", help="record nothing")
    args = parser.parse_args()
    for folder in args.folders:
        row = measure(folder, args.runs, args.threads)
        if not args.dry:
            append(RESULTS, row)
        rate, copy = (statistics.median(row[k]) / 1e9 for k in ("rates", "memcpy"))
        print(
            f"{row['model']}: {row['bytes'] / 1e9:.2f} GB at {rate:.2f} GB/s, two threads copy "
            f"{copy:.2f} GB/s: {row['share']:.0%}; bound {row['bound'] / 1e9:.2f} GB/s",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
