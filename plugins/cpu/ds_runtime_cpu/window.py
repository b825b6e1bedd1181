"""Native attention over a window and compressed entries, and what is around it.

What a token sees is gathered, a few tokens at a time, and read as a cache with one page a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime_cpu.native import active
from ds_runtime_cpu.small import CODE, in_rows

_ROWS = 64  # whose keys are in memory at a time
_EACH = torch.arange(_ROWS + 1, dtype=torch.int32)  # every row a sequence, which has one page


def norm_rope(
    x: Tensor, weight: Tensor | None, eps: float, positions: Tensor, cos_sin: Tensor, group: int
) -> Tensor:
    """NormRope for float32 and bfloat16."""
    rows, heads, d = x.shape
    x, positions = in_rows(x), positions.contiguous()
    weight = None if weight is None else weight.contiguous()
    assert cos_sin.is_contiguous() and cos_sin.dtype == torch.float32
    out = x.new_empty(rows, heads, d)
    active.norm_rope(
        CODE[x.dtype],
        x.data_ptr(),
        x.stride()[0],
        x.stride()[1],
        0 if weight is None else weight.data_ptr(),
        eps,
        positions.data_ptr(),
        cos_sin.data_ptr(),
        group,
        out.data_ptr(),
        rows,
        heads,
        d,
        cos_sin.shape[1],
    )
    return out


def rope_back(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """RopeBack for float32 and bfloat16."""
    rows, heads, d = x.shape
    x, positions = in_rows(x), positions.contiguous()
    assert cos_sin.is_contiguous() and cos_sin.dtype == torch.float32
    out = x.new_empty(rows, heads, d)
    active.rope_back(
        CODE[x.dtype],
        x.data_ptr(),
        x.stride()[0],
        x.stride()[1],
        positions.data_ptr(),
        cos_sin.data_ptr(),
        out.data_ptr(),
        rows,
        heads,
        d,
        cos_sin.shape[1],
    )
    return out


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
    """CompressWindows for float32 and bfloat16."""
    (tokens, _), (ratio, width), (d,) = rows.shape, ape.shape, norm_weight.shape
    rows, ape, norm_weight = in_rows(rows), ape.contiguous(), norm_weight.contiguous()
    positions, blocks = positions.contiguous(), blocks.contiguous()
    assert rows.shape[1] == 2 * width and width in (d, 2 * d), (rows.shape, width, d)
    assert state.is_contiguous() and state.dtype == torch.float32, state.dtype
    assert state.shape[2] == 2 * width and ape.dtype == norm_weight.dtype == torch.float32
    assert cos_sin.is_contiguous() and cos_sin.dtype == torch.float32
    out = rows.new_empty(tokens, d)
    active.compress_windows(
        CODE[rows.dtype],
        rows.data_ptr(),
        rows.stride()[0],
        ape.data_ptr(),
        ratio,
        width,
        norm_weight.data_ptr(),
        eps,
        positions.data_ptr(),
        cos_sin.data_ptr(),
        cos_sin.shape[1],
        group,
        state.data_ptr(),
        state.shape[1],
        blocks.data_ptr(),
        out.data_ptr(),
        tokens,
        d,
    )
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
    """WindowSparse for latent_pages in the compute dtype or in float8_e4m3fn."""
    tokens, heads, d = q.shape
    q, slots = in_rows(q), in_rows(slots)
    kv = None if kv is None else in_rows(kv)
    sink, positions, blocks = sink.contiguous(), positions.contiguous(), blocks.contiguous()
    assert recent.is_contiguous() and compressed.is_contiguous()
    assert recent.dtype == compressed.dtype and recent.shape[-1] == d
    n = slots.shape[1]
    out, lse = q.new_empty(tokens, heads, d), torch.empty(tokens, heads)
    step = min(tokens, _ROWS)
    keys = q.new_empty(step, window + n, d)
    lens = torch.empty(step, dtype=torch.int32)
    code = CODE[q.dtype]
    for first in range(0, tokens, _ROWS):
        count = min(_ROWS, tokens - first)
        active.window_rows(
            code,
            CODE[recent.dtype],
            0 if kv is None else kv.data_ptr(),
            0 if kv is None else kv.stride()[0],
            recent.data_ptr(),
            recent.shape[1],
            positions.data_ptr(),
            blocks.data_ptr(),
            window,
            compressed.data_ptr(),
            slots.data_ptr(),
            slots.stride()[0],
            n,
            d,
            first,
            keys.data_ptr(),
            lens.data_ptr(),
            count,
        )
        active.mla_decode(
            code,
            code,
            q.data_ptr() + first * q.stride()[0] * q.element_size(),
            q.stride()[0],
            q.stride()[1],
            keys.data_ptr(),
            window + n,
            d,
            d,
            _EACH.data_ptr(),
            1,
            lens.data_ptr(),
            _EACH.data_ptr(),
            scale,
            out.data_ptr() + first * heads * d * out.element_size(),
            count,
            heads,
            0,
            sink.data_ptr(),
            lse.data_ptr() + 4 * first * heads,
        )
    return out, lse
