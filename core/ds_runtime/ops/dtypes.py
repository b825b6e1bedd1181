"""Dtypes by name, and numbers of eight bits or fewer: codes and their scales."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.errors import UnsupportedError

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # then the same, negative


def torch_dtype(name: str) -> torch.dtype:
    """Returns the torch dtype that a `name` in Facts means ("bfloat16", "float64", …)."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(f"dtype {name!r} is none of torch's")
    return dtype


FP8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether the dtype has eight bits, for which torch has few operations."""
    return dtype in FP8


def wide(dtype: torch.dtype) -> torch.dtype:
    """What statistics and accumulations are computed in: float32 at least, float64 stays."""
    return torch.float64 if dtype == torch.float64 else torch.float32


FP8_MAX = 448.0  # of e4m3


def fp8_vectors(x: Tensor, ue8m0: bool = True) -> tuple[Tensor, Tensor]:
    """(e4m3 [..., n], scale [...] in x's dtype): x ≈ their product.

    scale = max(amax, 1e-4) / 448, rounded up to a power of two if `ue8m0`.
    """
    scale = x.abs().amax(-1).clamp(min=1e-4) / FP8_MAX
    if ue8m0:
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa · 2^exponent, mantissa in [½, 1)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scale = torch.ldexp(torch.ones_like(scale), exponent)
    q = (x / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return q.to(torch.float8_e4m3fn), scale


def decode_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns scales as `dtype` numbers, of the shape of `scale`. A byte means 2^(byte − 127), 255
    being NaN.
    """
    if scale.dtype == torch.uint8 or scale.dtype == torch.float8_e8m0fnu:
        byte = scale.view(torch.uint8)
        value = torch.exp2(byte.to(torch.float64) - 127)
        return value.masked_fill(byte == 255, float("nan")).to(dtype)
    return scale.to(dtype)
