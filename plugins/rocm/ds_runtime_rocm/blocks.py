"""FP8 block weights in the flavour that a GPU multiplies, and microscaled FP4 as files pack it."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.api import Weight, fp8_blocks

GROUP = 32
E4M3, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def join(weight: Weight, fp8: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """`fp8_blocks.join` in the flavour `fp8`."""
    joined = fp8_blocks.join(weight)
    return None if joined is None else flavour(joined[0].view(torch.uint8), joined[1], fp8)


def flavour(codes: Tensor, scales: Tensor, fp8: torch.dtype) -> tuple[Tensor, Tensor]:
    """Bytes of e4m3fn and their scales in `fp8`. The same bits mean half as much in e4m3fnuz, whose
    NaN is e4m3fn's −0.
    """
    if fp8 == E4M3:
        return codes.view(E4M3), scales
    codes = torch.where(codes == 0x80, torch.zeros_like(codes), codes)
    return codes.view(FNUZ), scales * 2


def join_mxfp4(weight: Weight) -> tuple[Tensor, Tensor] | None:
    """(two codes per byte [rows, cols / 2], exponents [rows, cols / 32] uint8) of all parts; None
    where a part begins or ends inside a group. The first code of a byte is its low half.
    """
    for part in weight.parts:
        if part.block != (1, GROUP) or part.offset != (0, 0) or part.shape[1] % GROUP:
            return None
    codes = torch.cat([p.tensors["weight"] for p in weight.parts])
    scales = torch.cat([_exponents(p.tensors["scale"]) for p in weight.parts])
    return codes[:, ::2] | codes[:, 1::2] << 4, scales


def _exponents(scale: Tensor) -> Tensor:
    """Powers of two as e8m0 bytes."""
    if scale.dtype.itemsize == 1:
        return scale.view(torch.uint8)
    exponent = torch.frexp(scale.to(torch.float32))[1] - 1
    return (exponent + 127).to(torch.uint8)


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def spread_mxfp4(packed: Tensor, exponents: Tensor) -> Tensor:
    """Back to float32: [..., rows, cols]."""
    table = torch.tensor([*_E2M1, *(-v for v in _E2M1)], device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    scale = torch.exp2(exponents.to(torch.float32) - 127).repeat_interleave(GROUP, -1)
    return table[codes.long()] * scale


def unshuffle(values: Tensor) -> Tensor:
    """The inverse of AITER's shuffle_weight with its layout (16, 16)."""
    *outer, rows, cols = values.shape
    codes = values.view(torch.uint8) if values.element_size() == 1 else values
    most = 16 // values.element_size()  # values that a lane loads at once
    tiles = codes.view(-1, rows // 16, cols // 32, 32 // most, 16, most)
    plain = tiles.permute(0, 1, 4, 2, 3, 5).reshape(*outer, rows, cols)
    return plain.view(values.dtype)
