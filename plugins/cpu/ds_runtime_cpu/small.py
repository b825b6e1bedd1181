"""Native norms, activation, embedding and activation quantisation: one C call each.

An op of one token works for a microsecond or two, so what Python spends around it counts.
`empty_like` and `new_empty` are a third cheaper than `empty` with a dtype, `stride()[0]` than
`stride(0)`.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor

from ds_runtime_cpu.native import active


class _Codes(dict[torch.dtype, int]):
    """Dtypes as the native kernels number them."""

    def __missing__(self, dtype: torch.dtype) -> Any:
        names = " or ".join(str(known).removeprefix("torch.") for known in self)
        raise TypeError(f"native CPU kernels take {names} here, not {dtype}")


CODE = _Codes({torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2})
CACHE = _Codes(CODE | {torch.uint8: 3})  # bytes are a cache of latent_fp8_groups
KEYS = _Codes(CODE | {torch.uint8: 2, torch.int8: 4})  # of an index cache: in FP8, in FP4


def in_rows(x: Tensor) -> Tensor:
    """x whose last dim is contiguous: itself, or a copy."""
    return x if x.stride()[-1] == 1 else x.clone(memory_format=torch.contiguous_format)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RmsNorm for float32 and bfloat16."""
    rows, n = x.shape
    assert weight.shape == (n,), (weight.shape, n)
    x, weight = in_rows(x), weight.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    active.rms_norm(
        CODE[x.dtype],
        CODE[weight.dtype],
        x.data_ptr(),
        x.stride()[0],
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        rows,
        n,
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """AddRmsNorm for float32 and bfloat16; the sum is written over a contiguous residual."""
    rows, n = x.shape
    assert x.dtype == residual.dtype and x.shape == residual.shape, (x, residual)
    assert weight.shape == (n,), (weight.shape, n)
    x, residual, weight = in_rows(x), in_rows(residual), weight.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    summed = residual if residual.is_contiguous() else torch.empty_like(out)
    active.add_rms_norm(
        CODE[x.dtype],
        CODE[weight.dtype],
        x.data_ptr(),
        x.stride()[0],
        residual.data_ptr(),
        residual.stride()[0],
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        summed.data_ptr(),
        rows,
        n,
    )
    return out, summed


def silu_mul(gate_up: Tensor) -> Tensor:
    """SiluMul for float32 and bfloat16."""
    return silu_mul_limited(gate_up, inf)


def silu_mul_limited(gate_up: Tensor, limit: float) -> Tensor:
    """SiluMulLimited for float32 and bfloat16; an infinite limit is none."""
    rows, both = gate_up.shape
    gate_up = in_rows(gate_up)
    n = both // 2
    out = gate_up.new_empty(rows, n)
    active.silu_mul(
        CODE[gate_up.dtype],
        gate_up.data_ptr(),
        gate_up.stride()[0],
        limit,
        out.data_ptr(),
        rows,
        n,
    )
    return out


def embed(ids: Tensor, table: Tensor, start: int) -> Tensor:
    """Embed for every dtype."""
    held, hidden = table.shape
    rows, item = ids.shape[0], table.dtype.itemsize
    out = table.new_empty(rows, hidden)
    assert ids.dtype == torch.int64, ids.dtype
    ids, table = ids.contiguous(), in_rows(table)
    active.embed(
        ids.data_ptr(),
        table.data_ptr(),
        table.stride()[0] * item,
        start,
        held,
        out.data_ptr(),
        hidden * item,
        rows,
    )
    return out


def quantize_group(x: Tensor, group: int, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """QuantizeGroup for float32 and bfloat16."""
    rows, n = x.shape
    assert n % group == 0, (n, group)
    x = in_rows(x)
    q = torch.empty(rows, n, dtype=torch.float8_e4m3fn)
    scale = torch.empty(rows, n // group)
    active.quantize_group(
        CODE[x.dtype],
        x.data_ptr(),
        x.stride()[0],
        group,
        ue8m0,
        q.data_ptr(),
        scale.data_ptr(),
        rows,
        n,
    )
    return q, scale
