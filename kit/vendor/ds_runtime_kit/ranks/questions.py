"""Operations of groups of ranks, against a plain computation.

Every rank makes the inputs of all, so that each knows what it must get: sums in float64, everything
else to the bit. A rank may come late, or have nothing to give.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ds_runtime.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch import Tensor

    from ds_runtime.platform.contract import Communicator, NormedSum, Platform

SUMS = ("all_reduce", "reduce_scatter")
MOVES = ("all_gather", "gather_rows", "all_to_all", "broadcast", "send_receive")
GROUP_OPS = (*SUMS, *MOVES, "barrier", "gather_objects")
OPTIONAL = ("ordered_sum", "fast_sums", "normed_sum")
LATE = 0.05  # seconds
_SHAPES = ((1, 8), (7, 33), (32, 7168))
_FLOATS = ("float32", "bfloat16", "float16")
_GROUP = 128  # values that share a scale
_CODES = 4e-2  # as AddRmsNormQuantize's tolerance
_BITS = {"float32": 24, "bfloat16": 8, "float16": 11}


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
    if op == "ordered_sum":
        yield from _ordered(platform, comm)
        return
    if op == "fast_sums":
        yield from _fast(platform, comm)
        return
    if op == "normed_sum":
        yield from _normed(platform, comm)
        return
    one, shape = partial(_one, platform, comm, op), _SHAPES[1]
    for dtype in (*_FLOATS, *(() if op in SUMS else ("int64", "uint8"))):
        for size in _SHAPES:
            yield f"{dtype} {size}", partial(one, dtype, size)
    yield "strided", partial(one, "float32", shape, strided=True)
    for rank in ends:
        yield f"rank {rank} late", partial(one, "bfloat16", shape, late=rank)
        yield f"rank {rank} empty", partial(one, "bfloat16", shape, empty=rank)
    if op != "gather_rows":  # which has one at least
        yield "no rows", partial(one, "float32", (0, 8))


def _ordered(platform: Platform, comm: Communicator) -> Iterator[tuple[str, Callable[[], str]]]:
    """None of a communicator that has no such sum."""
    most = max(math.prod(shape) for shape in _SHAPES)
    made = comm.ordered_sum(most) if hasattr(comm, "ordered_sum") else None
    if made is not None:
        for dtype in _FLOATS:
            for shape in _SHAPES:
                yield f"{dtype} {shape}", partial(_in_order, platform, comm, made, dtype, shape)
        yield "a rank late", partial(_in_order, platform, comm, made, "float32", _SHAPES[0], 0)


def _fast(platform: Platform, comm: Communicator) -> Iterator[tuple[str, Callable[[], str]]]:
    """None of a communicator that has no such kinds."""
    shapes = [(rows, 7168) for rows in (1, 7, 32, 512)] + [(1, 8)]
    most = max(math.prod(shape) for shape in shapes) * 4
    made = comm.fast_sums(most) if hasattr(comm, "fast_sums") else {}
    for kind, run in made.items():
        for dtype in _FLOATS[:2]:
            for shape in shapes:
                yield f"{kind} {dtype} {shape}", partial(_summed, platform, comm, run, dtype, shape)
        late = partial(_summed, platform, comm, run, "bfloat16", shapes[1], late=comm.size - 1)
        yield f"{kind}, a rank late", late
        apart = partial(_summed, platform, comm, run, "bfloat16", shapes[1], begin=4)
        yield f"{kind}, a part of a tensor", apart


def _normed(platform: Platform, comm: Communicator) -> Iterator[tuple[str, Callable[[], str]]]:
    """None of a communicator that has no such sum."""
    shapes = [(rows, 7168) for rows in (1, 7, 32, 512)] + [(3, 8), (2, 16384)]
    most = max(math.prod(shape) for shape in shapes) * 2
    made = comm.normed_sum(most) if hasattr(comm, "normed_sum") else None
    if made is not None:
        ask = partial(_with_norm, platform, comm, made)
        for shape in shapes:
            yield f"{shape}", partial(ask, shape)
            for powers in (False, True) if shape[1] % _GROUP == 0 else ():
                kind = "power-of-two" if powers else "float"
                yield f"{kind} scales {shape}", partial(ask, shape, powers=powers)
        yield "float32 weight", partial(ask, shapes[0], weights="float32")
        yield "a rank late", partial(ask, shapes[1], late=comm.size - 1)
        yield "no rows", partial(ask, (0, 8))


def _with_norm(
    platform: Platform,
    comm: Communicator,
    made: NormedSum,
    shape: Sequence[int],
    weights: str = "bfloat16",
    late: int | None = None,
    powers: bool | None = None,
) -> str:
    """Sums with the bits of parts that are added one by one in float32; norms within a unit in the
    last place of those in float64, codes within AddRmsNormQuantize's; the same bits on all ranks.
    """
    import torch

    draw = partial(drawn, platform, "bfloat16", shape, sum(shape), here=False)
    xs, residual = [draw(r) for r in range(comm.size)], draw(comm.size)
    weight = drawn(platform, weights, shape[1:], 1, 0, here=False)
    device = platform.device(platform.local_rank or 0)
    own = xs[comm.rank].to(device)
    if comm.rank == late:
        time.sleep(LATE)
    given = own, residual.to(device), weight.to(device), 1e-6
    found = made(*given) if powers is None else made.quantized(*given, powers)
    *normed, summed = (one.cpu() for one in found)
    # Every rank asks the others, also one that found something.
    if differ := [said for one in (*normed, summed) if (said := _same_bits(comm, one))]:
        return differ[0]
    if not torch.equal(own.cpu(), xs[comm.rank]):
        return "what was given has other values now"
    total = xs[0].float()
    for x in xs[1:]:
        total = total + x.float()
    want = total.bfloat16() + residual
    if said := _other_form(summed, want):
        return said
    if wrong := int((summed != want).sum()):
        return f"{wrong} of {want.numel()} sums are not those from rank 0 on"
    exact = want.double()
    exact = exact * (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    if powers is not None:
        return _codes_wrong(exact.bfloat16(), normed[0], normed[1], powers)
    if said := _other_form(normed[0], want):
        return said
    wrong = int(((normed[0].double() - exact).abs() > 2.0**-7 * exact.abs()).sum())
    return f"{wrong} of {want.numel()} values of the norm are off" if wrong else ""


def _other_form(found: Tensor, want: Tensor) -> str:
    if (found.dtype, found.shape) == (want.dtype, want.shape):
        return ""
    return f"{found.dtype} {tuple(found.shape)} instead of {want.dtype} {tuple(want.shape)}"


def _codes_wrong(want: Tensor, codes: Tensor, scale: Tensor, powers: bool) -> str:
    """Codes of rows `want`, as the contract judges those of a norm that is fused."""
    from ds_runtime.ops.dtypes import fp8_vectors
    from ds_runtime.ops.reference import judging

    q, sizes = fp8_vectors(want.float().reshape(want.shape[0], -1, _GROUP), powers)
    given, wanted = (want, _GROUP, powers), (q.reshape(want.shape), sizes)
    for found, one in zip((codes, scale), wanted, strict=True):
        if said := _other_form(found, one):
            return said
    judged: str = judging.fused_codes(lambda x: x, given, (codes, scale), wanted, _CODES)[1]
    return judged


def _summed(
    platform: Platform,
    comm: Communicator,
    run: Callable[[Tensor], Tensor],
    dtype: str,
    shape: Sequence[int],
    late: int | None = None,
    begin: int = 0,
) -> str:
    """A new tensor with the sum, the same bits on all ranks; what was given is as it was. begin: of
    how many values what is given lies behind in its memory."""
    import torch

    size = math.prod(shape)
    flat = [drawn(platform, dtype, (begin + size,), size, r, here=False) for r in range(comm.size)]
    xs = [x[begin:].view(*shape) for x in flat]
    own = flat[comm.rank].to(platform.device(platform.local_rank or 0))[begin:].view(*shape)
    if comm.rank == late:
        time.sleep(LATE)
    found = run(own).cpu()
    differ = _same_bits(comm, found)  # every rank asks, also one that found something
    if not torch.equal(own.cpu(), xs[comm.rank]):
        return "what was given has other values now"
    if found.dtype != xs[0].dtype or found.shape != xs[0].shape:
        return f"{found.dtype} {tuple(found.shape)} instead of {xs[0].dtype} {tuple(shape)}"
    return _sum_wrong(found, _sum(xs), xs, dtype) or differ


def _same_bits(comm: Communicator, found: Tensor) -> str:
    """The ranks go on with the same numbers, to the bit."""
    import torch

    digest = hashlib.sha256(found.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    return "ranks have got different bits" if len(set(comm.gather_objects(digest))) > 1 else ""


def _in_order(
    platform: Platform,
    comm: Communicator,
    made: Callable[[Tensor], Tensor],
    dtype: str,
    shape: Sequence[int],
    late: int | None = None,
) -> str:
    """The bits of parts that are added one by one, in float32 from rank 0 on."""
    import torch

    xs = [drawn(platform, dtype, shape, sum(shape), r, here=False) for r in range(comm.size)]
    want = xs[0].float()
    for x in xs[1:]:
        want = want + x.float()
    if comm.rank == late:
        time.sleep(LATE)
    found = made(xs[comm.rank].to(platform.device(platform.local_rank or 0))).cpu()
    if found.dtype != torch.float32 or found.shape != (want.numel(),):
        return f"{found.dtype} {tuple(found.shape)} instead of float32 ({want.numel()},)"
    wrong = int((found != want.reshape(-1)).sum())
    return f"{wrong} of {want.numel()} sums are not those from rank 0 on" if wrong else ""


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


def drawn(
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
    xs = [drawn(platform, dtype, whole, seed, rank, here=False) for rank in range(comm.size)]
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
    if op == "all_reduce":
        said.append(_same_bits(comm, found))
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
