"""What collectives take between ranks of this machine, by kind and size. Torch-free until then."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any, TypeAlias

from ds_runtime.common.patience import STOPPED
from ds_runtime.common.stopped import is_stopped
from ds_runtime.engine.process.entry import enter
from ds_runtime.errors import DsRuntimeError
from ds_runtime.measured.costs import KINDS, Collective
from ds_runtime.parallel.sums.kinds import GATHER_LOGITS, GATHERED, GATHERED_BY, INSTEAD, MOST

if TYPE_CHECKING:
    from torch import Tensor

    from ds_runtime.platform.contract import Communicator, Platform

SIZES = tuple(1 << power for power in range(12, 28))  # bytes of the whole
_EVERYWHERE = tuple(kind for kind in KINDS if kind not in INSTEAD)  # of every communicator
_WIDE = 1 << 18  # bytes of a row, at most, where the last dimension is gathered
_CALLS, _RUNS = 16, 12  # in a captured run; of it
_LONG, _ENOUGH = 2e-3, 2e-2  # seconds of a call: from which it is run alone; the larger ones not
_PATIENCE = 300.0  # seconds for all of it
_POLL, _CAUSE = 0.5, 2.0  # seconds: to look at ranks; to find who made others fail
_ITEM = 2  # bytes of a value
_Seconds: TypeAlias = dict[str, dict[int, float]]  # by kind and size


def measure(platform: Platform, ranks: int, sizes: Sequence[int] = SIZES) -> dict[str, Collective]:
    """By kind, seconds of collectives of `ranks` ranks, each a process with a device of its own.

    Raises DsRuntimeError with the rank that fails and what it said, or that ends or is stopped.
    """
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        at = f"file://{Path(folder) / 'ranks'}"
        given = [(platform, rank, ranks, at, tuple(sizes), results) for rank in range(ranks)]
        processes = [context.Process(target=_rank, args=args, daemon=True) for args in given]
        for process in processes:
            process.start()
        try:
            found = _answers(results, processes)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return {
        kind: {
            ranks: rising((size, max(one[kind][size] for one in found)) for size in found[0][kind])
        }
        for kind in found[0]
    }


def rising(points: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """(bytes, seconds), sizes rising, without noise that makes one longer than a larger one."""
    found, least = list[tuple[int, float]](), math.inf
    for size, seconds in sorted(points, reverse=True):
        least = min(least, seconds)
        found.append((size, least))
    return tuple(reversed(found))


def _answers(results: Any, processes: Sequence[Any]) -> list[_Seconds]:
    """Of all ranks. Raises DsRuntimeError, which names the rank that all others wait for: others
    fail once one has ended, so one that has ended is looked for before one that failed."""
    found, failed = dict[int, _Seconds](), dict[int, str]()
    since, end = dict[int, float](), time.monotonic() + _PATIENCE
    while len(found) < len(processes):
        with contextlib.suppress(Empty):
            rank, said = results.get(timeout=_POLL)
            if isinstance(said, str):
                failed[rank] = said
                end = min(end, time.monotonic() + _CAUSE)
            else:
                found[rank] = said
        now = time.monotonic()
        for rank, process in enumerate(processes):
            if rank in found or rank in failed:
                continue
            if process.exitcode:
                raise DsRuntimeError(f"tune comm: rank {rank} {_ended(process.exitcode)}")
            if not is_stopped(process.pid):
                since.pop(rank, None)
            elif now - since.setdefault(rank, now) > STOPPED:
                raise DsRuntimeError(
                    f"tune comm: rank {rank} (process {process.pid}) is stopped, and the other "
                    "ranks wait for it"
                )
        if now > end:
            for rank, said in failed.items():
                raise DsRuntimeError(f"tune comm: rank {rank}: {said}")
            names = ", ".join(str(n) for n in range(len(processes)) if n not in found)
            raise DsRuntimeError(f"tune comm: rank {names}: no answer within {_PATIENCE:g} s")
    return [found[rank] for rank in sorted(found)]


def _ended(code: int) -> str:
    if code > 0:
        return f"ended with code {code}"
    return f"was killed ({signal.Signals(-code).name})"


def _rank(
    platform: Platform, rank: int, ranks: int, at: str, sizes: tuple[int, ...], results: Any
) -> None:
    try:
        enter(platform, rank, ranks)
        comm = platform.communicator(rank, ranks, at, timeout=_PATIENCE)
        kinds: dict[str, Callable[[Any], Any]] = {k: getattr(comm, k) for k in _EVERYWHERE}
        curves = {k: _curve(platform, comm, k, call, sizes) for k, call in kinds.items()}
        small = [size for size in sizes if size <= MOST]
        fast = comm.fast_sums(max(small)) if small and hasattr(comm, "fast_sums") else {}
        curves |= {k: _curve(platform, comm, k, call, small) for k, call in fast.items()}
        if small and hasattr(comm, "gather_logits"):
            gather = comm.gather_logits(-(-max(small) // ranks))
            if all(comm.gather_objects(gather is not None)):
                call = partial(_widened, gather, ranks)
                curves[GATHER_LOGITS] = _curve(platform, comm, GATHER_LOGITS, call, small)
        results.put((rank, curves))
        comm.barrier()
        comm.close()
    except BaseException as e:
        results.put((rank, " ".join(f"{type(e).__name__}: {e}".split())))


def _widened(gather: Any, ranks: int, x: Tensor) -> None:
    """As the head's gather: into float32."""
    import torch

    rows, n = x.shape
    gather(x, torch.empty(rows, n * ranks, dtype=torch.float32, device=x.device))


def _input(platform: Platform, comm: Communicator, kind: str, size: int) -> Tensor:
    """Of one rank, for a collective of `size` bytes in all."""
    import torch

    values = size // _ITEM
    rows = max(1, size // _WIDE)  # where the last dimension is gathered
    wide = values // rows // comm.size
    shape = {
        "gather_rows": (1, values // comm.size),
        GATHERED: (rows, wide),
        GATHER_LOGITS: (rows, wide // GATHERED_BY * GATHERED_BY),
        "reduce_scatter": (comm.size, values // comm.size),
    }.get(kind, (values,))
    return torch.zeros(shape, dtype=torch.bfloat16, device=platform.device(comm.rank))


def _curve(
    platform: Platform,
    comm: Communicator,
    kind: str,
    collective: Callable[[Any], Any],
    sizes: Sequence[int],
) -> dict[int, float]:
    """Seconds by size, up to the first that takes long on any rank."""
    found = dict[int, float]()
    for size in sizes:
        call = partial(collective, _input(platform, comm, kind, size))
        found[size] = _seconds(platform, comm, call)
        if max(comm.gather_objects(found[size])) > _ENOUGH:
            break
    return found


def _seconds(platform: Platform, comm: Communicator, call: Callable[[], Any]) -> float:
    """The median of a call, captured where the device can, so that no host time counts."""
    call()
    platform.synchronize()
    start = time.perf_counter()
    call()
    platform.synchronize()
    long = max(comm.gather_objects(time.perf_counter() - start)) > _LONG
    calls = 1 if long else _CALLS

    def run() -> None:
        for _ in range(calls):
            call()

    replay: Callable[[], Any] = run
    if platform.asynchronous and platform.captures:
        replay = platform.graph_backend(comm.rank).capture(run)
    times = []
    for _ in range(_RUNS):
        comm.barrier()
        start = time.perf_counter()
        replay()
        platform.synchronize()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times[2:])
