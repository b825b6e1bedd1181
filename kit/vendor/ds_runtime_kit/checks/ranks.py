"""Operations of groups of ranks, in a process for each, against a plain computation.

Every rank makes the inputs of all, so that each knows what it must get: sums in float64, everything
else to the bit. A rank may come late, have nothing to give, or die. Torch-free at import: a
platform's `process_env` is set in a rank's process before torch loads.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from ds_runtime.errors import ConfigError, DsRuntimeError
from ds_runtime.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch import Tensor

    from ds_runtime.platform.contract import Communicator, Platform

SUMS = ("all_reduce", "reduce_scatter")
MOVES = ("all_gather", "gather_rows", "all_to_all", "broadcast", "send_receive")
GROUP_OPS = (*SUMS, *MOVES, "barrier", "gather_objects")
LATE = 0.05  # seconds
ENDED = 10.0  # seconds in which all ranks of a group end once one is dead
_DEAD = "a dead rank"
_SHAPES = ((1, 8), (7, 33), (32, 7168))
_FLOATS = ("float32", "bfloat16", "float16")
_BITS = {"float32": 24, "bfloat16": 8, "float16": 11}


@dataclass(frozen=True)
class RankResult:
    """What one question found. group: its name and ranks; failure: of the first rank with one."""

    op: str
    group: str
    case: str
    failure: str = ""


def check_ranks(platform: str, plugins: Sequence[str] | None, size: int) -> Iterator[RankResult]:
    """Ask every question of the platform's communicator with `size` ranks. Raises ConfigError where
    there are fewer devices, or ranks cannot meet.
    """
    for killed in (None, size - 1):
        with tempfile.TemporaryDirectory(prefix="ds-runtime-conform-") as folder:
            yield from _collected(_Ranks(platform, plugins, size, f"{folder}/meet", killed))


class _Ranks:
    """The processes. killed: the rank that dies once all have met."""

    def __init__(
        self,
        platform: str,
        plugins: Sequence[str] | None,
        size: int,
        meet: str,
        killed: int | None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.size, self.killed = size, killed
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            args = (platform, plugins, rank, size, f"file://{meet}", theirs, killed)
            process = context.Process(target=_rank, args=args, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _collected(ranks: _Ranks) -> Iterator[RankResult]:
    """What the ranks found, joined; then what became of them where one was to die."""
    try:
        told, died = _heard(ranks)
    finally:
        ranks.end()
    first = next(iter(sorted(told)), None)
    for key in {} if first is None else told[first]:
        said = [f"rank {r}: {found[key]}" for r, found in sorted(told.items()) if found.get(key)]
        yield RankResult(*key, failure=said[0] if said else "")
    if ranks.killed is not None:
        yield RankResult("all_reduce", f"all {ranks.size}", _DEAD, died)


def _heard(ranks: _Ranks) -> tuple[dict[int, dict[tuple[str, str, str], str]], str]:
    told: dict[int, dict[tuple[str, str, str], str]] = {}
    open_, deadline, died = dict(enumerate(ranks.pipes)), None, ""
    while open_:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(list(open_.values()), left)
        if not ready:  # they wait for the dead one, as they may: whoever started them ends them
            break
        for rank, pipe in list(open_.items()):
            if pipe not in ready:
                continue
            try:
                kind, value = pipe.recv()
            except EOFError:
                del open_[rank]
                if ranks.killed is None and rank not in told:
                    raise ConfigError(
                        f"--ranks {ranks.size}: rank {rank} has ended without a word (exit code "
                        f"{_code(ranks, rank)})"
                    ) from None
                if rank == ranks.killed:
                    deadline = time.monotonic() + ENDED / 2
                continue
            if kind == "refused":
                raise ConfigError(f"--ranks {ranks.size}: {value}")
            if kind == "returned":
                died = f"rank {rank} got a sum although rank {ranks.killed} was dead"
            elif kind == "found":
                told[rank] = value
    return told, died


def _code(ranks: _Ranks, rank: int) -> int | None:
    ranks.processes[rank].join(1.0)
    return ranks.processes[rank].exitcode


def _rank(
    name: str,
    plugins: Sequence[str] | None,
    rank: int,
    size: int,
    meet: str,
    pipe: Connection,
    killed: int | None,
) -> None:
    """The life of one rank's process."""
    try:
        platform = _platform(name, plugins, rank, size)
        everyone = platform.communicator(rank, size, meet, 60.0)
        if killed is None:
            pipe.send(("found", dict(_asked(platform, everyone))))
            everyone.barrier()
            everyone.close()
            return
        everyone.barrier()
        if rank == killed:
            os._exit(1)
        with contextlib.suppress(Exception):  # an error is what it should get
            value = everyone.all_reduce(_input(platform, "float32", (4, 4), 0, rank))
            platform.synchronize()
            pipe.send(("returned", float(value.sum())))
        os._exit(0)
    except DsRuntimeError as e:
        pipe.send(("refused", str(e)))
    except BaseException:
        pipe.send(("refused", f"rank {rank}: {traceback.format_exc()}"))
    pipe.close()
    os._exit(1)  # other ranks may never answer again


def _platform(name: str, plugins: Sequence[str] | None, rank: int, size: int) -> Platform:
    from ds_runtime.config import EngineConfig
    from ds_runtime.plugins.manager import load_plugins
    from ds_runtime.plugins.select_platform import select_platform

    platform, _ = select_platform(load_plugins(plugins), name)
    platform.configure(EngineConfig(tp=size))
    for variable, value in platform.process_env().items():
        os.environ.setdefault(variable, value)
    try:
        platform.info(rank)
    except Exception as e:
        raise ConfigError(f"device {rank} cannot be had: {e}") from e
    platform.local_rank = rank
    platform.init_worker(rank, size, 1)
    return platform


def _asked(
    platform: Platform, everyone: Communicator
) -> Iterator[tuple[tuple[str, str, str], str]]:
    """(op, group, case) and what is wrong with it, or ""."""
    for group, comm in _groups(everyone):
        for op in GROUP_OPS:
            for case, run in _cases(platform, comm, op):
                try:
                    failure = run()
                except Exception as e:
                    failure = f"{type(e).__name__}: {e}"
                yield (op, group, case), failure


def _groups(everyone: Communicator) -> Iterator[tuple[str, Communicator]]:
    """All ranks, the same once more as a group of its own, and both axes of a mesh of groups."""
    from ds_runtime.parallel.world import World

    size = everyone.size
    yield f"all {size}", everyone
    yield f"all {size}, split", everyone.split([list(range(size))])
    if size > 2 and size % 2 == 0:
        world = World(Mesh(size, 2), everyone)
        yield f"attn_tp {size // 2} of {size}", world.group("attn_tp")
        yield f"attn_dp 2 of {size}", world.group("attn_dp")


def _cases(
    platform: Platform, comm: Communicator, op: str
) -> Iterator[tuple[str, Callable[[], str]]]:
    ends = (0, comm.size - 1)
    if op in ("barrier", "gather_objects"):
        for late in (None, *ends):
            case = "plain" if late is None else f"rank {late} late"
            yield case, partial(_without_tensor, comm, op, late)
        return
    one, shape = partial(_one, platform, comm, op), _SHAPES[1]
    for dtype in (*_FLOATS, *(() if op in SUMS else ("int64", "uint8"))):
        for size in _SHAPES:
            yield f"{dtype} {size}", partial(one, dtype, size)
    yield "strided", partial(one, "float32", shape, strided=True)
    for rank in ends:
        yield f"rank {rank} late", partial(one, "bfloat16", shape, late=rank)
        yield f"rank {rank} empty", partial(one, "bfloat16", shape, empty=rank)
    yield "no rows", partial(one, "float32", (0, 8))


def _without_tensor(comm: Communicator, op: str, late: int | None) -> str:
    if comm.rank == late:
        time.sleep(LATE)
    if op == "gather_objects":
        want = [{"rank": r, "more": (r, "x")} for r in range(comm.size)]
        found = comm.gather_objects(want[comm.rank])
        return "" if found == want else f"{found} instead of {want}"
    began = time.monotonic()
    comm.barrier()
    ended = time.monotonic()
    others = comm.gather_objects((began, ended))
    last = max(one for one, _ in others)
    return "" if ended >= last else f"returned {last - ended:.3f} s before the last rank came"


def _input(
    platform: Platform, dtype: str, shape: Sequence[int], seed: int, rank: int, here: bool = True
) -> Tensor:
    """The same on every rank that makes it; here: on the device."""
    import torch

    draw = torch.Generator().manual_seed(1000 * seed + rank)
    kind = getattr(torch, dtype)
    if kind.is_floating_point:
        x = torch.randn(tuple(shape), generator=draw).to(kind)
    else:
        x = torch.randint(0, 200, tuple(shape), generator=draw).to(kind)
    return x.to(platform.device(platform.local_rank or 0)) if here else x


def _one(
    platform: Platform,
    comm: Communicator,
    op: str,
    dtype: str,
    shape: Sequence[int],
    strided: bool = False,
    late: int | None = None,
    empty: int | None = None,
) -> str:
    """empty: a rank that has no rows of its own, and fills them with zeros as steps do."""
    import torch

    whole = (shape[0] * comm.size, *shape[1:]) if op in ("reduce_scatter", "all_to_all") else shape
    seed = sum(map(ord, op + dtype)) + sum(whole)
    xs = [_input(platform, dtype, whole, seed, rank, here=False) for rank in range(comm.size)]
    if empty is not None:
        xs[empty] = torch.zeros_like(xs[empty])
    own = xs[comm.rank].to(platform.device(platform.local_rank or 0))
    if strided:
        own = own.T.contiguous().T
    if comm.rank == late:
        time.sleep(LATE)
    said = []
    for got, want, exact in _run(comm, op, own, xs):
        found = got.cpu()
        if found.dtype != xs[0].dtype or found.shape != want.shape:
            return (
                f"{found.dtype} {tuple(found.shape)} instead of {xs[0].dtype} {tuple(want.shape)}"
            )
        if exact:
            said.append("" if torch.equal(found, want) else "other values than were given")
        else:
            said.append(_sum_wrong(found, want, xs, dtype))
    if op == "all_reduce":  # the ranks go on with the same numbers, to the bit
        digest = hashlib.sha256(found.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        if len(set(comm.gather_objects(digest))) > 1:
            said.append("ranks have got different bits")
    return next(filter(None, said), "")


def _run(
    comm: Communicator, op: str, own: Tensor, xs: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """(what this rank gets, what it should get, whether to the bit)."""
    import torch

    rank, size = comm.rank, comm.size
    if op == "all_reduce":
        yield comm.all_reduce(own.clone()), _sum(xs), False
    elif op == "reduce_scatter":
        yield comm.reduce_scatter(own.clone()), _sum(xs).tensor_split(size)[rank], False
    elif op == "all_gather":
        yield comm.all_gather(own), torch.cat(list(xs), -1), True
    elif op == "gather_rows":
        yield comm.gather_rows(own), torch.cat(list(xs)), True
    elif op == "all_to_all":
        parts = [x.tensor_split(size)[rank] for x in xs]
        yield comm.all_to_all(own), torch.cat(parts), True
    elif op == "broadcast":
        for source in range(size):
            yield comm.broadcast(own.clone(), source), xs[source], True
    else:
        yield _passed_on(comm, own), xs[rank - 1], True


def _passed_on(comm: Communicator, own: Tensor) -> Tensor:
    """Around the ring: even ranks send first."""
    if comm.size == 1:
        return own
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.rank % 2 == 0:
        comm.send(own, after)
        return comm.receive(own.shape, own.dtype, before)
    got = comm.receive(own.shape, own.dtype, before)
    comm.send(own, after)
    return got


def _sum(xs: Sequence[Tensor]) -> Tensor:
    import torch

    return torch.stack([x.double() for x in xs]).sum(0)


def _sum_wrong(found: Tensor, want: Tensor, xs: Sequence[Tensor], dtype: str) -> str:
    """Every addition may round once: half a unit in the last place of a partial sum."""
    if not want.numel():
        return ""
    most = max(float(sum(x.double().abs().max() for x in xs)), 1e-30)
    bound = len(xs) * most * 2.0 ** -_BITS[dtype]
    error = float((found.double() - want).abs().max())
    return "" if error <= bound else f"off by {error:.3g}, more than {bound:.3g}"


def as_lines(found: Sequence[RankResult]) -> list[str]:
    """A line per op and group, and below it what is wrong."""
    grouped: dict[tuple[str, str], list[RankResult]] = {}
    for one in found:
        grouped.setdefault((one.op, one.group), []).append(one)
    lines = []
    for (op, group), results in grouped.items():
        wrong = [r for r in results if r.failure]
        lines.append(
            f"{op:<15}{group:<18}{'FAILED' if wrong else 'conforms'} ({len(results)} cases)"
        )
        lines += [f"  {r.case}: {r.failure}" for r in wrong]
    return lines


def as_dict(found: Sequence[RankResult]) -> list[dict[str, Any]]:
    """For JSON."""
    return [{"op": r.op, "group": r.group, "case": r.case, "failure": r.failure} for r in found]
