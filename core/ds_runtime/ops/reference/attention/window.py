"""Torch references of attention over a window and compressed entries."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.ops.dtypes import fp8_vectors, is_fp8, wide
from ds_runtime.ops.reference.attention.rope import rotated

_ELEMENTS = 1 << 24  # rows are taken in groups so that what is gathered stays below this many


def turned(x: Tensor, positions: Tensor, cos_sin: Tensor, sign: int = 1) -> Tensor:
    """x [tokens, heads, d] with its last dims rotated, as pairs."""
    table = cos_sin[positions].to(x.dtype).unsqueeze(1)
    cos, sin = table.chunk(2, dim=-1)
    r = table.shape[-1]
    return torch.cat((x[..., :-r], rotated(x[..., -r:], cos, sin * sign)), dim=-1)


def _rounded(x: Tensor, group: int) -> Tensor:
    """As e4m3 times a power of two for each group of the last dim would hold it."""
    made = []
    for part in torch.split(x, group, dim=-1):
        q, scale = fp8_vectors(part)
        made.append(q.to(x.dtype) * scale.unsqueeze(-1))
    return torch.cat(made, dim=-1)


def norm_rope(
    x: Tensor, weight: Tensor | None, eps: float, positions: Tensor, cos_sin: Tensor, group: int
) -> Tensor:
    """Reference of NormRope."""
    y = x.to(wide(x.dtype))
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    y = turned(y if weight is None else y * weight.to(y.dtype), positions, cos_sin)
    if group:
        plain = x.shape[-1] - cos_sin.shape[-1]
        y = torch.cat((_rounded(y[..., :plain], group), y[..., plain:]), dim=-1)
    return y.to(x.dtype).contiguous()


def rope_back(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Reference of RopeBack."""
    return turned(x.to(wide(x.dtype)), positions, cos_sin, -1).to(x.dtype).contiguous()


def _before(blocks: Tensor, some: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """(steps back [span], from span − 1 to 0; whether the row so far in front of each of `some` is
    of its sequence [some, span])."""
    back = torch.arange(span - 1, -1, -1, device=blocks.device)
    there = some.unsqueeze(1) - back
    same = blocks[there.clamp(min=0)] == blocks[some].unsqueeze(1)
    return back, same & (there >= 0)


def _seen(
    rows: Tensor | None, cache: Tensor, positions: Tensor, blocks: Tensor, some: Tensor, span: int
) -> tuple[Tensor, Tensor]:
    """(rows of the last `span` positions of each of `some` [some, span, width]; which of them are
    in front of position 0). Those of this call are in `rows`, all others in `cache`."""
    back, here = _before(blocks, some, span)
    at = positions[some].unsqueeze(1) - back
    block = blocks[some].clamp(min=0).unsqueeze(1).expand_as(at)
    raw = cache.view(torch.uint8) if is_fp8(cache.dtype) else cache  # torch gathers no FP8
    found = raw[block, at % cache.shape[1]].view(cache.dtype)
    if rows is not None:
        own = rows[(some.unsqueeze(1) - back).clamp(min=0)].to(wide(rows.dtype))
        found = torch.where(here.unsqueeze(-1), own, found.to(own.dtype))
    return found, at < 0


def compress_windows(
    rows: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    group: int,
    state: Tensor,
    blocks: Tensor,
) -> Tensor:
    """Reference of CompressWindows."""
    compute, (ratio, width), d = wide(rows.dtype), ape.shape, norm_weight.shape[0]
    kept = torch.cat((rows[:, :width].to(compute), rows[:, width:].to(compute)
                      + ape.to(compute)[positions % ratio]), 1)  # fmt: skip
    out = rows.new_zeros(rows.shape[0], d)
    real = blocks >= 0
    closing = (((positions + 1) % ratio == 0) & real).nonzero().flatten()
    overlap = width > d
    if closing.numel():
        span = ratio * (1 + overlap)
        found, none = _seen(kept, state, positions, blocks, closing, span)
        values, scores = found[..., :width], found[..., width:]
        if overlap:  # first columns of the window in front, second ones of its own
            values, scores = (
                torch.cat((x[:, :ratio, :d], x[:, ratio:, d:]), 1) for x in (values, scores)
            )
        none = none.unsqueeze(-1)
        weights = scores.masked_fill(none, float("-inf")).softmax(1)
        entry = (values.masked_fill(none, 0.0) * weights).sum(1, keepdim=True)
        first = positions[closing] - ratio + 1
        made = norm_rope(entry, norm_weight, eps, first, cos_sin, group)
        out[closing] = made.squeeze(1).to(rows.dtype)
    entries = state.shape[1]
    later = torch.arange(rows.shape[0], device=rows.device) + entries  # writes over what a row left
    inside = later < rows.shape[0]
    over = inside & (blocks[later.clamp(max=max(0, rows.shape[0] - 1))] == blocks)
    last = real & ~over
    state[blocks[last], positions[last] % entries] = kept[last].to(state.dtype)
    return out


def window_sparse(
    q: Tensor,
    sink: Tensor,
    kv: Tensor | None,
    recent: Tensor,
    positions: Tensor,
    blocks: Tensor,
    window: int,
    compressed: Tensor,
    slots: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Reference of WindowSparse for latent_pages."""
    compute = wide(q.dtype)
    tokens, heads, width = q.shape
    out, total = torch.empty_like(q), q.new_empty(tokens, heads, dtype=compute)
    rows = compressed.flatten(0, 1)
    raw = rows.view(torch.uint8) if is_fp8(rows.dtype) else rows
    step = max(1, _ELEMENTS // ((window + slots.shape[1]) * width))
    for first in range(0, tokens, step):
        some = torch.arange(first, min(first + step, tokens), device=q.device)
        near, none = _seen(kv, recent, positions, blocks, some, window)
        far = raw[slots[some].clamp(min=0).to(torch.int64)].view(rows.dtype)
        keys = torch.cat((near.to(compute), far.to(compute)), 1)
        none = torch.cat((none, slots[some] < 0), 1) | (blocks[some] < 0).unsqueeze(1)
        keys = keys.masked_fill(none.unsqueeze(-1), 0.0)  # what nobody sees may be NaN
        scores = q[some].to(compute) @ keys.transpose(1, 2) * scale  # [rows, heads, keys]
        scores = scores.masked_fill(none.unsqueeze(1), float("-inf"))
        sinks = sink.to(compute).expand(len(some), -1).unsqueeze(-1)
        every = torch.cat((scores, sinks), -1)
        out[some] = (every.softmax(-1)[..., :-1] @ keys).to(q.dtype)
        denominator = every.logsumexp(-1)
        total[some] = denominator.masked_fill((blocks[some] < 0).unsqueeze(1), float("-inf"))
    return out.contiguous(), total.to(compute)
