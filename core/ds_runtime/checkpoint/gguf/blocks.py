"""Blocks of quantised elements: codes and scales, or values.

Each takes bytes [blocks, bytes of a block]. Formats of integers alone give int8 codes
[blocks, elements] and float32 scales [blocks, groups]; value = code · scale, computed in float32.
Q4_K and Q5_K subtract a minimum besides, which no canonical format has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ds_runtime.checkpoint.gguf.header import TYPES

BLOCKS = {t.name: t for t in TYPES.values() if t.elements > 1}


def _half(raw: Tensor, at: int) -> Tensor:
    """The float16 at a byte of each block, as float32 [blocks, 1]."""
    return raw[:, at : at + 2].contiguous().view(torch.float16).to(torch.float32)


def _halves(raw: Tensor) -> Tensor:
    """Low nibbles, then high ones: [blocks, 2n]."""
    return torch.cat((raw & 15, raw >> 4), dim=1)


def _q8_0(raw: Tensor) -> tuple[Tensor, Tensor]:
    return raw[:, 2:].contiguous().view(torch.int8), _half(raw, 0)


def _q4_0(raw: Tensor) -> tuple[Tensor, Tensor]:
    return _halves(raw[:, 2:]).to(torch.int8) - 8, _half(raw, 0)


def _q5_0(raw: Tensor) -> tuple[Tensor, Tensor]:
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)
    high = (raw[:, 2:6].unsqueeze(-1) >> shifts & 1).flatten(1)
    return (_halves(raw[:, 6:]) | high << 4).to(torch.int8) - 16, _half(raw, 0)


def _q6_k(raw: Tensor) -> tuple[Tensor, Tensor]:
    low = raw[:, :128].view(-1, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), dim=2).reshape(-1, 8, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device).view(1, 1, 4, 1)
    high = (raw[:, 128:192].view(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 8, 32)
    codes = (low | high << 4).to(torch.int8) - 32
    scales = raw[:, 192:208].contiguous().view(torch.int8).to(torch.float32)
    return codes.flatten(1), _half(raw, 208) * scales


def _six_bits(raw: Tensor) -> tuple[Tensor, Tensor]:
    """(scales, minima) of a K block's eight groups, [blocks, 8], from twelve bytes."""
    low, least, both = raw.view(-1, 3, 4).unbind(1)
    scales = torch.cat((low & 63, (both & 15) | (low >> 2 & 48)), dim=1)
    minima = torch.cat((least & 63, (both >> 4) | (least >> 2 & 48)), dim=1)
    return scales.to(torch.float32), minima.to(torch.float32)


def _k_values(raw: Tensor, codes: Tensor) -> Tensor:
    """code · scale − minimum over groups of 32, [blocks, 256], from codes [blocks, 8, 32]."""
    scales, minima = _six_bits(raw[:, 4:16].contiguous())
    scale, least = _half(raw, 0) * scales, _half(raw, 2) * minima
    return (codes.to(torch.float32) * scale.unsqueeze(-1) - least.unsqueeze(-1)).flatten(1)


def _k_nibbles(raw: Tensor) -> Tensor:
    """[blocks, 128] → [blocks, 8, 32], 32 low nibbles before the 32 high ones of the same bytes."""
    four = raw.reshape(-1, 4, 1, 32)
    return torch.cat((four & 15, four >> 4), dim=2).reshape(-1, 8, 32)


def _q4_k(raw: Tensor) -> Tensor:
    return _k_values(raw, _k_nibbles(raw[:, 16:]))


def _q5_k(raw: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device).view(1, 8, 1)
    high = raw[:, 16:48].unsqueeze(1) >> shifts & 1
    return _k_values(raw, _k_nibbles(raw[:, 48:]) | high << 4)


INTEGERS: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "Q4_0": _q4_0,
    "Q5_0": _q5_0,
    "Q8_0": _q8_0,
    "Q6_K": _q6_k,
}
_VALUES: Mapping[str, Callable[[Tensor], Tensor]] = {"Q4_K": _q4_k, "Q5_K": _q5_k}


def values(type: str, raw: Tensor) -> Tensor:
    """float32 [rows, cols] of bytes [rows, bytes of a row]."""
    blocks = raw.reshape(-1, BLOCKS[type].nbytes)
    if type in _VALUES:
        found = _VALUES[type](blocks)
    else:
        codes, scales = INTEGERS[type](blocks)
        groups = codes.view(codes.shape[0], scales.shape[1], -1).to(torch.float32)
        found = groups * scales.unsqueeze(-1)
    return found.reshape(raw.shape[0], -1)
