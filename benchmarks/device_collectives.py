"""All-reduces over the ranks of one machine, kind by kind: the library's, those that read other
ranks' memory, and those that add the ranks in their order.

python benchmarks/device_collectives.py [--ranks N] [--rows N ...] [--width N] [--replays N]
    [--out FILE]

A JSON line for each number of rows and kind: the microseconds of one sum of rows in bfloat16 on the
slowest rank, `eager` and `captured`: the median of 9 runs of 20, each of a fresh copy. Kinds:
`library`; `one_shot` and `two_shot`, where the platform has them; `gathered` (parts gathered and
added in order, as for --batch-invariant); `at_once` (the same by one kernel, where the platform has
it). `wrong` counts replays on any rank, of `--replays` with new contents, before which a rank waits
at random on the host or on the device. Ranks have other bits there, or a sum is off by more than
rounding allows; of kinds in order, bits are not those of parts that are added one by one.
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

ROWS = (1, 2, 4, 8, 16, 32, 36, 64, 128, 256, 512)
IN_ONE, ROUNDS = 20, 9
IN_ORDER = ("gathered", "at_once")
BUSY = 2048  # rows of a matmul that keeps a device busy


def timed(platform: Any, comm: Any, run: Callable[[], None]) -> float:
    """Microseconds of one of the sums in a run, on the slowest rank."""
    took = []
    for _ in range(ROUNDS):
        comm.barrier()
        platform.synchronize()
        start = time.perf_counter()
        run()
        platform.synchronize()
        took.append(time.perf_counter() - start)
    slowest: float = max(comm.gather_objects(statistics.median(took)))
    return round(slowest / IN_ONE * 1e6, 2)


def wrong(
    comm: Any, kind: str, x: Tensor, found: Tensor, replay: Callable[[], None], n: int
) -> int:
    """Replays whose sums are not as they should be, on any rank."""
    count = torch.zeros((), dtype=torch.int64, device=x.device)
    draw, busy = random.Random(comm.rank), torch.ones(BUSY, BUSY, device=x.device)
    torch.manual_seed(comm.rank)
    for _ in range(n):
        x.copy_(torch.randn_like(x))
        parts = comm.gather_rows(x.view(1, -1))  # [ranks, values]
        chance = draw.random()
        if chance < 0.05:
            time.sleep(draw.random() * 2e-3)
        elif chance < 0.15:
            busy @ busy
        replay()
        every = comm.gather_rows(found.view(1, -1))
        fails = (every.view(torch.int16) != every[0].view(torch.int16)).any()
        if kind in IN_ORDER:
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part
            fails |= (every[0] != total.to(x.dtype)).any()
        else:
            error = (every[0].double() - parts.double().sum(0)).abs()
            fails |= (error > 2.0**-8 * parts.double().abs().sum(0) * comm.size).any()
        count += fails
    return sum(comm.gather_objects(int(count)))


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
    most = max(args.rows) * args.width
    sums: dict[str, Callable[[Tensor], Tensor]] = {"library": comm.all_reduce}
    sums |= comm.fast_sums(2 * most)
    sums["gathered"] = InOrder(comm, here=False).all_reduce
    at_once = comm.ordered_sum(min(most, MANY))
    for rows in args.rows:
        x = torch.zeros(rows, args.width, dtype=torch.bfloat16, device=device)
        kinds = dict(sums)
        if at_once is not None and x.numel() <= MANY:
            kinds["at_once"] = lambda x: at_once(x).to(x.dtype).view(x.shape)
        for kind, sum_up in kinds.items():
            last: list[Tensor] = []  # of a captured run: where its replays leave the sum

            def run(sum_up: Any = sum_up, x: Tensor = x, last: list[Tensor] = last) -> None:
                for _ in range(IN_ONE):
                    last[:] = [sum_up(x.clone())]

            run()
            platform.synchronize()
            made: dict[str, Any] = {"kind": kind, "ranks": args.ranks, "rows": rows}
            made |= {"width": args.width, "bytes": 2 * x.numel()}
            made["eager, us"] = timed(platform, comm, run)
            replay = backend.capture(run)
            made["captured, us"] = timed(platform, comm, replay)
            made["replays"] = args.replays
            made["wrong"] = wrong(comm, kind, x, last[0], replay, args.replays)
            made["device"] = platform.info(rank).name
            found.append(made)
    comm.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--width", type=int, default=7168)
    parser.add_argument("--replays", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="add the JSON lines to this file")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        given = [(rank, args, f"file://{folder}/meet", results) for rank in range(args.ranks)]
        processes = [context.Process(target=measure, args=one) for one in given]
        for process in processes:
            process.start()
        told = dict(results.get(timeout=500) for _ in processes)
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
