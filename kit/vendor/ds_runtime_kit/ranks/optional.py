"""Questions to what a communicator may have besides the collectives that every one has."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from ds_runtime_kit.ranks.checks import (
    FLOATS,
    LATE,
    SHAPES,
    drawn,
    other_form,
    same_bits,
    sum_wrong,
    whole_numbers,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ds_runtime.platform.contract import Communicator, NormedSum, Platform

Cases: TypeAlias = Iterator[tuple[str, Callable[[], str]]]
NONE = "none here"  # the case of what a communicator does not have
_GROUP = 128  # values that share a scale
_CODES = 4e-2  # as AddRmsNormQuantize's tolerance


def _missing(platform: Platform, comm: Communicator, table: str, needed: bool) -> Cases:
    """The one case where nothing was set up. table: the platform's, which names sizes of groups by
    the link of its devices. needed: it promises this one. Else a device may be without it."""
    link = platform.info(platform.local_rank or 0).link
    named = comm.size in getattr(platform, table).get(link, ())
    over = link or "an unknown link"
    said = f"{table} of platform {platform.name} names {comm.size} ranks over {over}"
    if named and needed:
        yield "setting it up", lambda: f"{said}, and nothing was set up"
    else:
        yield f"{NONE}, though {said}" if named else NONE, lambda: ""


def _ordered(platform: Platform, comm: Communicator) -> Cases:
    """Of sums in order, which are set up wherever the platform names them."""
    most = max(math.prod(shape) for shape in SHAPES)
    made = comm.ordered_sum(most) if hasattr(comm, "ordered_sum") else None
    if made is None:
        yield from _missing(platform, comm, "ordered_sums", needed=True)
    else:
        for dtype in FLOATS:
            for shape in SHAPES:
                yield f"{dtype} {shape}", partial(_in_order, platform, comm, made, dtype, shape)
        yield "a rank late", partial(_in_order, platform, comm, made, "float32", SHAPES[0], 0)


def _async(platform: Platform, comm: Communicator) -> Cases:
    """Of sums that are started; no table of a platform names them."""
    if not hasattr(comm, "all_reduce_async"):
        yield NONE, lambda: ""
    else:
        for dtype in FLOATS:
            for shape in SHAPES:
                yield f"{dtype} {shape}", partial(_two_started, platform, comm, dtype, shape)
            whole = partial(_two_started, platform, comm, dtype, SHAPES[1], whole=True)
            yield f"{dtype} whole numbers", whole
        late = partial(_two_started, platform, comm, "float32", SHAPES[0], late=comm.size - 1)
        yield "a rank late", late


def _two_started(
    platform: Platform,
    comm: Communicator,
    dtype: str,
    shape: Sequence[int],
    late: int | None = None,
    whole: bool = False,
) -> str:
    """Two sums under way at once, and a product between them, which is as it is alone. whole: the
    second is one of numbers whose sum is exact."""
    import torch

    device, size = platform.device(platform.local_rank or 0), math.prod(shape)
    draw = partial(drawn, platform, dtype, shape, here=False)
    both = [[draw(size + n, rank) for rank in range(comm.size)] for n in range(2)]
    if whole:
        both[1] = whole_numbers(dtype, shape, comm.size)
    plain = drawn(platform, "float32", (64, 64), size, 0, here=False)
    between = plain.to(device)
    if comm.rank == late:
        time.sleep(LATE)
    ends = [comm.all_reduce_async(xs[comm.rank].to(device, copy=True)) for xs in both]
    product = (between @ between).cpu()
    found = [end().cpu() for end in ends]
    differ = [said for one in found if (said := same_bits(comm, one))]  # every rank asks
    for n, (one, xs) in enumerate(zip(found, both, strict=True)):
        if said := other_form(one, xs[0]) or sum_wrong(one, xs, exact=whole and n == 1):
            return said
    if not torch.allclose(product, plain @ plain, rtol=1e-2, atol=1e-2):
        return "what was computed during the sums is wrong"
    return differ[0] if differ else ""


def _fast(platform: Platform, comm: Communicator) -> Cases:
    """Of every kind; one at least is set up wherever the platform names them."""
    shapes = [(rows, 7168) for rows in (1, 7, 32, 512)] + [(1, 8)]
    most = max(math.prod(shape) for shape in shapes) * 4
    made = comm.fast_sums(most) if hasattr(comm, "fast_sums") else {}
    if not made:
        yield from _missing(platform, comm, "fast_sums", needed=True)
    for kind, run in made.items():
        for dtype in FLOATS[:2]:
            for shape in shapes:
                yield f"{kind} {dtype} {shape}", partial(_summed, platform, comm, run, dtype, shape)
            whole = partial(_summed, platform, comm, run, dtype, shapes[1], whole=True)
            yield f"{kind} {dtype} whole numbers", whole
        late = partial(_summed, platform, comm, run, "bfloat16", shapes[1], late=comm.size - 1)
        yield f"{kind}, a rank late", late
        apart = partial(_summed, platform, comm, run, "bfloat16", shapes[1], begin=4)
        yield f"{kind}, a part of a tensor", apart


def _normed(platform: Platform, comm: Communicator) -> Cases:
    """Of sums with their norm."""
    shapes = [(rows, 7168) for rows in (1, 7, 32, 512)] + [(3, 8), (2, 16384)]
    most = max(math.prod(shape) for shape in shapes) * 2
    made = comm.normed_sum(most) if hasattr(comm, "normed_sum") else None
    if made is None:
        yield from _missing(platform, comm, "fast_sums", needed=False)
    else:
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
    if differ := [said for one in (*normed, summed) if (said := same_bits(comm, one))]:
        return differ[0]
    if not torch.equal(own.cpu(), xs[comm.rank]):
        return "what was given has other values now"
    total = xs[0].float()
    for x in xs[1:]:
        total = total + x.float()
    want = total.bfloat16() + residual
    if said := other_form(summed, want):
        return said
    if wrong := int((summed != want).sum()):
        return f"{wrong} of {want.numel()} sums are not those from rank 0 on"
    exact = want.double()
    exact = exact * (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    if powers is not None:
        return _codes_wrong(exact.bfloat16(), normed[0], normed[1], powers)
    if said := other_form(normed[0], want):
        return said
    wrong = int(((normed[0].double() - exact).abs() > 2.0**-7 * exact.abs()).sum())
    return f"{wrong} of {want.numel()} values of the norm are off" if wrong else ""


def _codes_wrong(want: Tensor, codes: Tensor, scale: Tensor, powers: bool) -> str:
    """Codes of rows `want`, as the contract judges those of a norm that is fused."""
    from ds_runtime.ops.dtypes import fp8_vectors
    from ds_runtime.ops.reference import judging

    q, sizes = fp8_vectors(want.float().reshape(want.shape[0], -1, _GROUP), powers)
    given, wanted = (want, _GROUP, powers), (q.reshape(want.shape), sizes)
    for found, one in zip((codes, scale), wanted, strict=True):
        if said := other_form(found, one):
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
    whole: bool = False,
) -> str:
    """A new tensor with the sum, the same bits on all ranks; what was given is as it was. begin: of
    how many values what is given lies behind in its memory. whole: numbers whose sum is exact."""
    import torch

    size = math.prod(shape)
    flat = [drawn(platform, dtype, (begin + size,), size, r, here=False) for r in range(comm.size)]
    if whole:
        flat = whole_numbers(dtype, (begin + size,), comm.size)
    xs = [x[begin:].view(*shape) for x in flat]
    own = flat[comm.rank].to(platform.device(platform.local_rank or 0))[begin:].view(*shape)
    if comm.rank == late:
        time.sleep(LATE)
    found = run(own).cpu()
    differ = same_bits(comm, found)  # every rank asks, also one that found something
    if not torch.equal(own.cpu(), xs[comm.rank]):
        return "what was given has other values now"
    if found.dtype != xs[0].dtype or found.shape != xs[0].shape:
        return f"{found.dtype} {tuple(found.shape)} instead of {xs[0].dtype} {tuple(shape)}"
    return sum_wrong(found, xs, exact=whole) or differ


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


def _logits(platform: Platform, comm: Communicator) -> Cases:
    """Of gathers of logits."""
    # Rows, values of a rank's part, and those that fill up the last one's.
    shapes = [(1, 8, 0), (3, 64, 5), (1, 16160, 0), (33, 4096, 1), (512, 2048, 7), (2, 8, 9)]
    most = max(rows * n for rows, n, _ in shapes) * 2
    made = comm.gather_logits(most) if hasattr(comm, "gather_logits") else None
    if made is None:
        yield from _missing(platform, comm, "fast_sums", needed=False)
    else:
        for shape in shapes:
            if shape[2] < comm.size * shape[1]:
                yield f"{shape}", partial(_side_by_side, platform, comm, made, shape)
        late = partial(_side_by_side, platform, comm, made, shapes[1], late=comm.size - 1)
        yield "a rank late", late
        yield "no rows", partial(_side_by_side, platform, comm, made, (0, 8, 0))


def _side_by_side(
    platform: Platform,
    comm: Communicator,
    made: Callable[[Tensor, Tensor], None],
    shape: tuple[int, int, int],
    late: int | None = None,
) -> str:
    """Every part's values, widened; what lies around `out` is as it was."""
    import torch

    rows, n, spare = shape
    draw = partial(drawn, platform, "bfloat16", (rows, n), sum(shape), here=False)
    xs, width = [draw(r) for r in range(comm.size)], comm.size * n - spare
    device = platform.device(platform.local_rank or 0)
    around = torch.full((rows + 2, width), -1.0, device=device)
    own = xs[comm.rank].to(device)
    if comm.rank == late:
        time.sleep(LATE)
    made(own, around[1:-1])
    found = around.cpu()
    if not torch.equal(own.cpu(), xs[comm.rank]):
        return "what was given has other values now"
    if bool((found[[0, -1]] != -1).any()):
        return "rows before or after those of out have other values now"
    wrong = int((found[1:-1] != torch.cat(xs, 1).float()[:, :width]).sum())
    return f"{wrong} of {rows * width} logits are others" if wrong else ""


OPTIONAL: Mapping[str, Callable[[Platform, Communicator], Cases]] = {
    "ordered_sum": _ordered,
    "all_reduce_async": _async,
    "fast_sums": _fast,
    "normed_sum": _normed,
    "gather_logits": _logits,
}
"""By the communicator's method, the cases of it: where it has none, one that says so."""
