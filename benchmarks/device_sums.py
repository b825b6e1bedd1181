"""Sums over the ranks of one machine: torch's own, and those that add the ranks in their order.

python benchmarks/device_sums.py [--ranks N] [--rows N ...] [--width N] [--replays N] [--out FILE]

Every figure is the microseconds of one sum of rows in bfloat16 in a captured graph of 20, the
slowest rank's median of 9: `library` (as without --batch-invariant), `gathered` (parts gathered and
added), `at once` (one kernel over memory that ranks share, where the platform has it). Bits of the
last two are compared in each of `--replays` replays, before which a rank waits at random.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_runtime.parallel.mesh import MANY
from ds_runtime.parallel.sums.in_order import InOrder
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.plugins.select_platform import select_platform

ROWS = (1, 8, 16, 32, 36, 37, 64, 128, 256, 512)
IN_ONE, ROUNDS = 20, 9


def timed(platform: Any, comm: Any, replay: Callable[[], None]) -> float:
    """Microseconds of one of the sums in a replay, on the slowest rank."""
    took = []
    for _ in range(ROUNDS):
        comm.barrier()
        platform.synchronize()
        start = time.perf_counter()
        replay()
        platform.synchronize()
        took.append(time.perf_counter() - start)
    return max(comm.gather_objects(statistics.median(took))) / IN_ONE * 1e6


def differing(
    platform: Any, comm: Any, x: Tensor, found: Tensor, replay: Callable[[], None], count: int
) -> int:
    """Replays with other bits than parts that are gathered and added; contents change each time."""
    gathered, wrong = InOrder(comm, here=False), 0
    draw = random.Random(comm.rank)
    torch.manual_seed(comm.rank)
    for _ in range(count):
        x.copy_(torch.randn_like(x))
        if draw.random() < 0.1:
            time.sleep(draw.random() * 2e-3)
        replay()
        wrong += not torch.equal(found, gathered.all_reduce(x))
    return sum(comm.gather_objects(wrong))


def measure(rank: int, args: argparse.Namespace, address: str, results: Any) -> None:
    try:
        results.put((rank, [*figures(rank, args, address)]))
    except BaseException:
        results.put((rank, traceback.format_exc()))


@torch.inference_mode()
def figures(rank: int, args: argparse.Namespace, address: str) -> Sequence[dict[str, Any]]:
    platform, _ = select_platform(load_plugins())
    platform.local_rank = rank
    platform.init_worker(rank, args.ranks, None)
    comm = platform.communicator(rank, args.ranks, address, 60.0)
    backend, device, found = platform.graph_backend(rank), platform.device(rank), []
    sums = {"library": comm, "gathered": InOrder(comm, here=False), "at once": InOrder(comm)}
    if sums["at once"]._at_once is None:
        del sums["at once"]
    for rows in args.rows:
        made: dict[str, Any] = {"ranks": args.ranks, "rows": rows, "width": args.width}
        made["device"] = platform.info(rank).name
        for name, group in sums.items():
            if name == "at once" and rows * args.width >= MANY:
                continue
            x = torch.zeros(rows, args.width, dtype=torch.bfloat16, device=device)
            out = torch.empty_like(x)

            def run(group: Any = group, x: Tensor = x, out: Tensor = out) -> None:
                for _ in range(IN_ONE):
                    out.copy_(group.all_reduce(x.clone()))

            run()
            platform.synchronize()
            replay = backend.capture(run)
            made[f"{name}, us"] = round(timed(platform, comm, replay), 1)
            if name == "at once":
                wrong = differing(platform, comm, x, out, replay, args.replays)
                made["replays with other bits"] = wrong
        found.append(made)
    comm.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--width", type=int, default=7168)
    parser.add_argument("--replays", type=int, default=200)
    parser.add_argument("--out", type=Path, help="add a JSON line for each size to this file")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        given = [(rank, args, f"file://{folder}/meet", results) for rank in range(args.ranks)]
        processes = [context.Process(target=measure, args=one) for one in given]
        for process in processes:
            process.start()
        told = dict(results.get(timeout=180) for _ in processes)
        for process in processes:
            process.join(30)
    for rank, said in told.items():
        if isinstance(said, str):
            raise SystemExit(f"rank {rank}: {said}")
    for line in told[0]:
        print(json.dumps(line), flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
