"""All-reduces over the ranks of one machine, kind by kind: the library's, those that read other
ranks' memory, and those that add the ranks in their order.

python benchmarks/device_collectives.py [--ranks N] [--rows N ...] [--width N] [--replays N]
    [--out FILE]

A JSON line for each number of rows and kind, as soon as it is measured: the microseconds of one sum
of rows in bfloat16 on the slowest rank, `eager` and `captured`: the median of 9 runs of 20, each of
a fresh copy. Kinds: `library`; `one_shot` and `two_shot`, where the platform has them; `gathered`
(parts gathered and added in order, as for --batch-invariant); `at_once` (the same by one kernel,
where the platform has it). Behind a sum come the add of a residual and an RMSNorm: `normed` is all
of it in one kernel, where the platform has that, and `composed` is one_shot and Triton's
add_rms_norm. Both also copy the residual, as the norm may overwrite it. `wrong` counts replays on
any rank, of `--replays` of two sums behind each other, with new contents, before which a rank waits
at random on the host or on the device. Ranks have other bits there, or a sum is off by more than
rounding allows; of kinds in order and of `normed`, bits are not those of parts that are added one
by one. Of `normed` and `composed` that is the new residual, where the one before is 0. `seconds`:
what the line took. Standard error says
when ranks had met and set up their sums.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # ranks import torch side by side, and do not wait until this process has
    from torch import Tensor

ROWS = (1, 2, 4, 8, 16, 32, 36, 64, 128, 256, 512)
IN_ONE, ROUNDS = 20, 9
IN_ORDER = ("gathered", "at_once", "normed")
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
    platform: Any,
    comm: Any,
    backend: Any,
    kind: str,
    sum_up: Callable[[Tensor], Tensor],
    x: Tensor,
    n: int,
) -> int:
    """Replays whose sums are not as they should be, on any rank. The device compares and counts:
    the host reads the count once, behind all replays."""
    import torch

    given = torch.zeros(2, x.numel(), dtype=x.dtype, device=x.device)
    sums = torch.zeros_like(given)

    def step() -> None:
        for one, out in zip(given, sums, strict=True):
            out.copy_(sum_up(one.view(x.shape).clone()).view(-1))

    step()
    platform.synchronize()
    replay = backend.capture(step)
    count = torch.zeros((), dtype=torch.int64, device=x.device)
    draw, busy = random.Random(comm.rank), torch.ones(BUSY, BUSY, device=x.device)
    torch.manual_seed(comm.rank)
    for _ in range(n):
        given.normal_()
        parts = comm.gather_rows(given.view(1, -1))  # [ranks, values]
        chance = draw.random()
        if chance < 0.05:
            time.sleep(draw.random() * 2e-3)
        elif chance < 0.15:
            busy @ busy
        replay()
        every = comm.gather_rows(sums.view(1, -1))
        fails = (every.view(torch.int16) != every[0].view(torch.int16)).any()
        if kind in IN_ORDER:
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part
            fails |= (every[0] != total.to(x.dtype)).any()
        else:
            parts = parts.double()
            error = (every[0].double() - parts.sum(0)).abs()
            fails |= (error > 2.0**-8 * parts.abs().sum(0) * comm.size).any()
        count += fails
    return sum(comm.gather_objects(int(count)))


def with_norm(
    normed: Any, one_shot: Callable[[Tensor], Tensor], like: Tensor
) -> dict[str, Callable[[Tensor], Tensor]]:
    """The sum, the add and the norm, in one kernel and in two, for rows like these: functions of a
    part that return the new residual."""
    import torch

    from ds_runtime_triton.norm import add_rms_norm

    weight, before = torch.ones_like(like[0]), torch.zeros_like(like)

    def fused(x: Tensor) -> Tensor:
        summed: Tensor = normed(x, before.clone(), weight, 1e-6)[1]
        return summed

    def composed(x: Tensor) -> Tensor:
        return add_rms_norm(one_shot(x), before.clone(), weight, 1e-6)[1]

    return {"normed": fused, "composed": composed}


def measure(rank: int, args: argparse.Namespace, address: str, results: Any) -> None:
    """Rank 0 tells every line; each rank tells its end, with what went wrong, or ""."""
    try:
        import torch

        with torch.inference_mode():
            for line in figures(rank, args, address):
                if rank == 0:
                    results.put(line)
        results.put((rank, ""))
    except BaseException:
        results.put((rank, traceback.format_exc()))


def figures(rank: int, args: argparse.Namespace, address: str) -> Iterator[dict[str, Any]]:
    import torch

    from ds_runtime.engine.process.entry import enter
    from ds_runtime.parallel.sums.in_order import InOrder
    from ds_runtime.parallel.sums.sizes import MANY
    from ds_runtime.plugins.manager import load_plugins
    from ds_runtime.plugins.select_platform import select_platform

    def tell(what: str) -> None:
        if rank == 0:
            took = f"{time.time() - args.begin:.1f} s"
            print(f"device_collectives: {what} after {took}", file=sys.stderr, flush=True)

    tell("rank 0 has imported torch")
    platform, _ = select_platform(load_plugins())
    enter(platform, rank, args.ranks)
    comm = platform.communicator(rank, args.ranks, address, 60.0)
    backend, device = platform.graph_backend(rank), platform.device(rank)
    name = platform.info(rank).name
    comm.barrier()
    tell("ranks have met")
    most = max(args.rows) * args.width
    sums: dict[str, Callable[[Tensor], Tensor]] = {"library": comm.all_reduce}
    sums |= comm.fast_sums(2 * most)
    sums["gathered"] = InOrder(comm, here=False).all_reduce
    at_once = comm.ordered_sum(min(most, MANY))
    normed = comm.normed_sum(2 * most)
    tell("sums are set up")
    for rows in args.rows:
        x = torch.zeros(rows, args.width, dtype=torch.bfloat16, device=device)
        kinds = dict(sums)
        if at_once is not None and x.numel() <= MANY:
            kinds["at_once"] = lambda x: at_once(x).to(x.dtype).view(x.shape)
        if normed is not None and "one_shot" in sums:
            kinds |= with_norm(normed, sums["one_shot"], x)
        for kind, sum_up in kinds.items():
            start = time.perf_counter()

            def run(sum_up: Any = sum_up, x: Tensor = x) -> None:
                for _ in range(IN_ONE):
                    sum_up(x.clone())

            run()
            platform.synchronize()
            made: dict[str, Any] = {"kind": kind, "ranks": args.ranks, "rows": rows}
            made |= {"width": args.width, "bytes": 2 * x.numel()}
            made["eager, us"] = timed(platform, comm, run)
            made["captured, us"] = timed(platform, comm, backend.capture(run))
            made["replays"] = args.replays
            made["wrong"] = wrong(platform, comm, backend, kind, sum_up, x, args.replays)
            made["device"] = name
            made["seconds"] = round(time.perf_counter() - start, 2)
            yield made
    comm.close()


def lines(processes: list[Any], results: Any) -> Iterator[dict[str, Any]]:
    """What rank 0 tells, as it comes. Ends with the ranks; exits with the words of one that
    failed."""
    working = {*range(len(processes))}
    while working:
        try:
            told = results.get(timeout=1)
        except queue.Empty:
            if gone := [n for n in working if processes[n].exitcode not in (None, 0)]:
                status = processes[gone[0]].exitcode
                raise SystemExit(f"rank {gone[0]}: ended with status {status}") from None
            continue
        if isinstance(told, dict):
            yield told
            continue
        rank, why = told
        if why:
            raise SystemExit(f"rank {rank}: {why}")
        working.discard(rank)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--width", type=int, default=7168)
    parser.add_argument("--replays", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="add the JSON lines to this file")
    args = parser.parse_args()
    args.begin = time.time()
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        given = [(rank, args, f"file://{folder}/meet", results) for rank in range(args.ranks)]
        processes = [context.Process(target=measure, args=one) for one in given]
        for process in processes:
            process.start()
        try:
            for line in lines(processes, results):
                print(json.dumps(line), flush=True)
                if args.out:
                    with args.out.open("a") as file:
                        file.write(json.dumps(line) + "\n")
        finally:
            for process in processes:
                process.join(30 if sys.exc_info()[0] is None else 0)
                process.kill()


if __name__ == "__main__":
    main()
