"""RouterLogits and Route."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from ds_runtime.api import Facts, Routing
from ds_runtime_triton.config import tuned
from ds_runtime_triton.jit.router import (
    route_kernel,
    router_narrow_kernel,
    router_rows_kernel,
    router_sum_kernel,
    router_tiles_kernel,
    router_whole_kernel,
)
from ds_runtime_triton.launch import cdiv, pow2
from ds_runtime_triton.machine import architecture

_SHORT = 4096  # columns of a row from which more than _FEW tokens are multiplied in pieces
_FEW, _ROWS_LIMIT = 8, 128  # tokens up to which long rows, and short ones, are streamed
_LONG_VALUES, _VALUES = 32768, 16384  # of a program that streams rows: what hides memory's latency
_PROGRAMS = 132  # that rows of more than 64 tokens are cut for, twice as many from _MANY tokens on
_MANY, _PROGRAMS_OF_64 = 512, 224
_COLUMNS, _PIECES = 64, 8  # of a row that is multiplied in one order: at once, and pieces of it
_SUM = 1024  # columns that the matrix unit sums by itself


class Streamed(NamedTuple):
    """Programs that stream rows of the weight: `each` of them for `few` tokens."""

    few: int
    each: int
    block: int
    warps: int


class Tiled(NamedTuple):
    """Tiles of the matrix unit, of `block` tokens, `each` experts and `columns` columns at once, in
    pieces of the row; looks: experts of whose values it is asked whether x's dtype holds them."""

    block: int
    each: int
    columns: int
    warps: int
    stages: int
    span: int
    pieces: int
    looks: int


def _way(tokens: int, n: int, experts: int, size: int) -> Streamed | Tiled:
    """How a call is made, of values of `size` bytes."""
    if tokens <= (_FEW if n >= _SHORT else _ROWS_LIMIT):
        few = min(4 if tokens <= 32 else 8, pow2(tokens))
        each = 1 if tokens == 1 else 2
        values, warps = (_LONG_VALUES, 8) if n >= _SHORT else (_VALUES, 4)
        return Streamed(few, each, min(values // (few * each), pow2(n, 16)), warps)
    if tokens <= 64:
        block, each, columns, warps, stages = pow2(tokens, 16), 64, 128, 4, 2
        programs = _PROGRAMS_OF_64
    else:
        each = 64 if cdiv(tokens, 128) * cdiv(experts, 64) >= 8 else 32  # few tiles: narrow ones
        stages = 3 if size == 2 else 2  # wider values would not fit on many chips
        block, columns, warps = 128, 64, 8
        programs = _PROGRAMS * (2 if tokens >= _MANY else 1)
    tiles = cdiv(tokens, block) * cdiv(experts, each)
    span = cdiv(cdiv(n, columns), max(1, programs // tiles)) * columns
    looks = pow2(experts) if size == 2 and _narrows(tokens) else 0
    return Tiled(block, each, columns, warps, stages, span, cdiv(n, span), looks)


def variant(facts: Facts, rows: int) -> Hashable:
    """`Compiles.variant` of RouterLogits."""
    dims, size = facts.dims, 4 if facts.dtype == "float32" else 2
    counts = [dims[name] for name in ("experts", "index_heads") if dims.get(name)]
    ways = [_way(rows, dims["hidden"], count, size) for count in counts]
    return tuple(way._replace(span=0, pieces=pow2(way.pieces)) if isinstance(way, Tiled) else way
                 for way in ways)  # fmt: skip


def router_logits_ordered(x: Tensor, weight: Tensor) -> Tensor:
    """As router_logits, each row in one order: pieces and tiles are those of the shape."""
    n, experts = x.shape[1], weight.shape[0]
    span = cdiv(cdiv(n, _COLUMNS), _PIECES) * _COLUMNS
    return _logits(
        x, weight, Tiled(64, min(64, pow2(experts, 16)), _COLUMNS, 4, 2, span, cdiv(n, span), 0)
    )


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """RouterLogits: exact products, fp32 sums."""
    return _logits(x, weight, _way(x.shape[0], x.shape[1], weight.shape[0], x.dtype.itemsize))


def _logits(x: Tensor, weight: Tensor, way: Streamed | Tiled) -> Tensor:
    (tokens, n), experts = x.shape, weight.shape[0]
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    if tokens == 0:
        return logits
    if isinstance(way, Streamed):
        few, each, block, warps = way
        router_rows_kernel[(cdiv(experts, each), cdiv(tokens, few))](
            x, weight, logits, tokens, experts, n, x.stride(0), weight.stride(0), few, each, block,
            num_warps=warps,
        )  # fmt: skip
        return logits
    block, each, columns, warps, stages, span, pieces, looks = way
    tiles = cdiv(tokens, block), cdiv(experts, each)
    out = logits if pieces == 1 else logits.new_empty(pieces, tokens, experts)
    lost = out  # not read
    if looks:
        narrow = torch.empty(experts, n, dtype=x.dtype, device=x.device)
        lost = torch.empty(experts, dtype=torch.int32, device=x.device)
        router_narrow_kernel[(experts,)](
            weight, narrow, lost, n, weight.stride(0), min(pow2(n, 16), 2048), num_warps=8
        )
        wide = min(pow2(experts, 16), 128)
        router_whole_kernel[(tiles[0], cdiv(experts, wide), pieces)](
            x, narrow, lost, out, tokens, experts, n, span, x.stride(0), looks, block, wide,
            columns, _SUM, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    router_tiles_kernel[(*tiles, pieces)](
        x, weight, out, tokens, experts, n, span, x.stride(0), weight.stride(0), lost, looks,
        x.dtype == torch.bfloat16, block, each, columns, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if pieces > 1:
        size = tokens * experts
        router_sum_kernel[(cdiv(size, 128),)](out, logits, size, pieces, pow2(pieces), 128)
    return logits


def _narrows(tokens: int) -> bool:
    """Whether it pays to look if x's dtype holds the weight."""
    return bool(tuned(architecture(), "router").at(tokens)["NARROW"])


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Route: one program per token."""
    tokens, experts = logits.shape
    width = routing.top_k + routing.shared
    weights = torch.empty(tokens, width, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, width, dtype=torch.int32, device=logits.device)
    if tokens == 0:
        return weights, ids
    paired = routing.method == "noaux_tc"
    limited = routing.method != "greedy" and routing.topk_group < routing.n_group
    groups = routing.n_group if limited else 1
    per_group = experts // groups
    biased = paired and bias is not None
    route_kernel[(tokens,)](
        logits.contiguous(), bias if biased else logits, weights, ids, experts, groups, per_group,
        routing.topk_group, routing.scale, routing.scoring == "softmax", limited, paired, biased,
        routing.renormalize, routing.top_k, routing.shared, pow2(width), pow2(groups),
        pow2(per_group),
        num_warps=1,
    )  # fmt: skip
    return weights, ids
