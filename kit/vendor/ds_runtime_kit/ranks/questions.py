"""Operations of groups of ranks, against a plain computation.

Every rank makes the inputs of all, so that each knows what it must get. Sums are right within what
their additions round, and to the bit where nothing is rounded. Everything else is right to the bit.
A rank may come late, or have nothing to give.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ds_runtime.parallel.mesh import Mesh
from ds_runtime_kit.ranks.checks import (
    FLOATS,
    LATE,
    SHAPES,
    drawn,
    same_bits,
    sum_wrong,
    whole_numbers,
)
from ds_runtime_kit.ranks.optional import OPTIONAL

if TYPE_CHECKING:
    from torch import Tensor

    from ds_runtime.platform.contract import Communicator, Platform

SUMS = ("all_reduce", "reduce_scatter")
MOVES = ("all_gather", "gather_rows", "all_to_all", "broadcast", "send_receive")
GROUP_OPS = (*SUMS, *MOVES, "barrier", "gather_objects")


Key = tuple[str, str, str]  # op, group, case


def questions(
    platform: Platform, everyone: Communicator
) -> Iterator[tuple[Key, Callable[[], str]]]:
    """Each with a call that says what is wrong, or ""."""
    for group, comm in _groups(everyone):
        for op in (*GROUP_OPS, *OPTIONAL):
            for case, run in _cases(platform, comm, op):
                yield (op, group, case), run


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
    if op in OPTIONAL:
        yield from OPTIONAL[op](platform, comm)
        return
    one, shape = partial(_one, platform, comm, op), SHAPES[1]
    for dtype in (*FLOATS, *(() if op in SUMS else ("int64", "uint8"))):
        for size in SHAPES:
            yield f"{dtype} {size}", partial(one, dtype, size)
        if op in SUMS:
            yield f"{dtype} whole numbers", partial(one, dtype, shape, whole=True)
    yield "strided", partial(one, "float32", shape, strided=True)
    for rank in ends:
        yield f"rank {rank} late", partial(one, "bfloat16", shape, late=rank)
        yield f"rank {rank} empty", partial(one, "bfloat16", shape, empty=rank)
    if op != "gather_rows":  # which has one at least
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


def _one(
    platform: Platform,
    comm: Communicator,
    op: str,
    dtype: str,
    shape: Sequence[int],
    strided: bool = False,
    late: int | None = None,
    empty: int | None = None,
    whole: bool = False,
) -> str:
    """empty: a rank that has no rows of its own, and fills them with zeros as steps do. whole:
    numbers whose sums are exact."""
    import torch

    given = (shape[0] * comm.size, *shape[1:]) if op in ("reduce_scatter", "all_to_all") else shape
    seed = sum(map(ord, op + dtype)) + sum(given)
    xs = [drawn(platform, dtype, given, seed, rank, here=False) for rank in range(comm.size)]
    if whole:
        xs = whole_numbers(dtype, given, comm.size)
    if empty is not None:
        xs[empty] = torch.zeros_like(xs[empty])
    own = xs[comm.rank].to(platform.device(platform.local_rank or 0))
    if strided:
        own = own.T.contiguous().T
    if comm.rank == late:
        time.sleep(LATE)
    said = []
    for got, parts in _run(comm, op, own, xs):
        found, want = got.cpu(), parts[0]
        if found.dtype != want.dtype or found.shape != want.shape:
            return f"{found.dtype} {tuple(found.shape)} instead of {want.dtype} {tuple(want.shape)}"
        if op in SUMS:
            said.append(sum_wrong(found, parts, whole))
        else:
            said.append("" if torch.equal(found, want) else "other values than were given")
    if op == "all_reduce":
        said.append(same_bits(comm, found))
    return next(filter(None, said), "")


def _run(
    comm: Communicator, op: str, own: Tensor, xs: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Sequence[Tensor]]]:
    """(what this rank gets, what it should get: of a sum, its parts)."""
    import torch

    rank, size = comm.rank, comm.size
    if op == "all_reduce":
        yield comm.all_reduce(own.clone()), xs
    elif op == "reduce_scatter":
        yield comm.reduce_scatter(own.clone()), [x.tensor_split(size)[rank] for x in xs]
    elif op == "all_gather":
        yield comm.all_gather(own), [torch.cat(list(xs), -1)]
    elif op == "gather_rows":
        yield comm.gather_rows(own), [torch.cat(list(xs))]
    elif op == "all_to_all":
        parts = [x.tensor_split(size)[rank] for x in xs]
        yield comm.all_to_all(own), [torch.cat(parts)]
    elif op == "broadcast":
        for source in range(size):
            yield comm.broadcast(own.clone(), source), [xs[source]]
    else:
        yield _passed_on(comm, own), [xs[rank - 1]]


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
