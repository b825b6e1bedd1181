"""Activations to FP8: e4m3 with one scale per token and 128 channels.

Scales come transposed: [tokens, groups] with tokens contiguous, each group's column starting at a
multiple of 16 bytes, which is what DeepGEMM and cuBLAS read. One Triton kernel where the tensors
are on a GPU; in torch elsewhere, which is what it must agree with.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 128
MAX = 448.0
_LEAST = 1e-4  # of a group's largest magnitude


def scale_columns(tokens: int, groups: int, device: torch.device) -> Tensor:
    """Empty scales [tokens, groups], transposed and aligned."""
    aligned = -(-tokens // 4) * 4
    held = torch.empty(groups, aligned, dtype=torch.float32, device=device)
    return held.as_strided((tokens, groups), (1, aligned))


def in_columns(scale: Tensor) -> Tensor:
    """Scales [tokens, groups] as `scale_columns` lays them: a copy where they lie otherwise."""
    tokens, groups = scale.shape
    aligned = -(-tokens // 4) * 4
    if scale.stride() == (1, aligned):
        return scale
    return scale_columns(tokens, groups, scale.device).copy_(scale)


def quantise(x: Tensor, rows: int | None = None, powers: bool = False) -> tuple[Tensor, Tensor]:
    """x [tokens, n], n a multiple of 128, rows may be strided → (e4m3 [rows, n], scales).

    rows: at least the tokens; the rest holds whatever was there. powers: scales are powers of two.
    """
    tokens, n = x.shape
    count = tokens if rows is None else rows
    q = torch.empty(count, n, dtype=torch.float8_e4m3fn, device=x.device)
    scale = scale_columns(count, n // GROUP, x.device)
    if x.is_cuda:
        from ds_runtime_cuda.jit import quantise_rows

        quantise_rows(x, q, scale, powers)
    elif tokens:
        values, sizes = groups_of(x, powers)
        q[:tokens].copy_(values.reshape(tokens, n))
        scale[:tokens].copy_(sizes)
    return q, scale


def groups_of(x: Tensor, powers: bool = False) -> tuple[Tensor, Tensor]:
    """(e4m3 [tokens, groups, 128], float32 scales [tokens, groups]) in torch."""
    values = x.to(torch.float32).reshape(x.shape[0], -1, GROUP)
    scale = values.abs().amax(-1).clamp(min=_LEAST) / MAX
    if powers:
        scale = power_above(scale)
    q = (values / scale.unsqueeze(-1)).clamp(-MAX, MAX)
    return q.to(torch.float8_e4m3fn), scale


def power_above(scale: Tensor) -> Tensor:
    """The power of two that is not below, of positive normal float32: their bits, rounded up."""
    bits = scale.view(torch.int32) + 0x7FFFFF & ~0x7FFFFF
    return bits.view(torch.float32)
