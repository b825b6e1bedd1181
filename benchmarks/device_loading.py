"""How fast a checkpoint in the page cache becomes packed weights on an accelerator.

    ds-runtime bench make-checkpoint --shape v3-slice DIR
    python benchmarks/device_loading.py DIR [--runs N] [--out FILE]

From the first open to the last packed tensor, in a fresh process per run, beside what bounds it on
this machine: the rate from page-locked memory to the device, and that at which threads read the
files from the page cache into memory already touched. share: of the lower of the two. Bytes are
those that the model needs: a draft layer in the files is not read. Peaks while
loading: bytes on the device beyond those that stay, and the host's anonymous and shared memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ds_runtime.common.progress import Progress
from ds_runtime_bench.record import append, environment

SIZE = 1 << 30
READERS = (4, 8, 16)


def to_device_rate(device: torch.device, runs: int = 5) -> float:
    """Bytes per second from page-locked memory."""
    host = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
    there, rates = torch.empty(SIZE, dtype=torch.uint8, device=device), []
    for _ in range(runs):
        torch.accelerator.synchronize(device)
        begin = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.accelerator.synchronize(device)
        rates.append(SIZE / (time.perf_counter() - begin))
    return statistics.median(rates)


def read_rate(file: Path, threads: int) -> float:
    """Bytes per second that so many threads read from the page cache between them."""
    size = min(SIZE, file.stat().st_size)
    room = memoryview(torch.zeros(size, dtype=torch.uint8).numpy().data)
    each, handle = size // threads, os.open(file, os.O_RDONLY)

    def read(part: int) -> None:
        done, last = part * each, (part + 1) * each
        while done < last:
            done += os.preadv(handle, [room[done:last]], done)

    rates = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(4):
            begin = time.perf_counter()
            list(pool.map(read, range(threads)))
            rates.append(each * threads / (time.perf_counter() - begin))
    os.close(handle)
    return statistics.median(rates)


def held_by_host() -> int:
    """Anonymous and shared bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")}
    return 1024 * (int(found["RssAnon"]) + int(found["RssShmem"]))


def load(folder: str) -> dict[str, float]:
    """One load, in this process."""
    from ds_runtime.assembly.assemble import assemble
    from ds_runtime.config import EngineConfig
    from ds_runtime.engine.process.entry import enter
    from ds_runtime.ops.binding.bound import BoundOps
    from ds_runtime.parallel.world import World
    from ds_runtime.weights import load as weights

    assembly = assemble(EngineConfig(model=folder, context_length=2048))
    bound = BoundOps(assembly.binding)
    enter(assembly.platform)
    device = assembly.platform.device(0)
    torch.zeros(1, device=device)
    torch.accelerator.synchronize(device)
    before, peak, over = held_by_host(), held_by_host(), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.02):
            peak = max(peak, held_by_host())

    totals = []

    class Counted(Progress):
        def __init__(self, label: str, total: int, **named: Any) -> None:
            totals.append(total)
            super().__init__(label, total, **named)

    weights.Progress = Counted  # type: ignore[misc]
    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.perf_counter()
    model = weights.load_model(assembly, bound, World.alone(), device)
    torch.accelerator.synchronize(device)
    seconds = time.perf_counter() - begin
    over.set()
    watcher.join()
    stays = torch.accelerator.memory_allocated(device)
    return {
        "seconds": seconds,
        "layers": len(model.blocks),
        "bytes": totals[0],
        "device_bytes": stays,
        "device_above": torch.accelerator.max_memory_reserved(device) - stays,
        "host_bytes": peak,
        "host_before": before,
    }


def measure(folder: Path, runs: int) -> dict[str, Any]:
    files = sorted(folder.glob("*.safetensors"))
    for file in files:  # into the page cache
        with file.open("rb") as handle:
            while handle.read(1 << 24):
                pass
    device = torch.accelerator.current_accelerator()
    assert device is not None, "no accelerator is here"
    row: dict[str, Any] = {
        "bench": "device_loading",
        "model": folder.name,
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else str(device),
        "file_bytes": sum(f.stat().st_size for f in files),
        "to_device": to_device_rate(device),
        "reads": {n: read_rate(files[0], n) for n in READERS},
        "runs": [],
    }
    bound = min(row["to_device"], max(row["reads"].values()))
    for _ in range(runs):
        command = [sys.executable, __file__, "--load", str(folder)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        run = json.loads(done.stdout.splitlines()[-1])
        row["runs"].append(run)
        print(f"{run['bytes'] / run['seconds'] / 1e9:.2f} GB/s", run, flush=True)
    row["rate"] = statistics.median(r["bytes"] / r["seconds"] for r in row["runs"])
    return {**row, "share": row["rate"] / bound, **environment()}


def main() -> int:
    """Measure, record and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="a checkpoint")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="(default: 3)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="add a line of JSON to it")
    parser.add_argument("--load", action="store_true", help="load once here, and say how it went")
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load(str(args.folder))))
        return 0
    row = measure(args.folder, args.runs)
    if args.out:
        append(args.out, row)
    reads = ", ".join(f"{n} threads {rate / 1e9:.1f}" for n, rate in row["reads"].items())
    print(
        f"{row['model']}: {row['runs'][0]['bytes'] / 1e9:.1f} GB at {row['rate'] / 1e9:.2f} GB/s, "
        f"{row['share']:.0%} of what bounds it; to the device {row['to_device'] / 1e9:.1f} GB/s; "
        f"page cache: {reads} GB/s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
