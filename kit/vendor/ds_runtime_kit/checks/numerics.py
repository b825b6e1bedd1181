"""Numbers in tests: relative error against an oracle, and copies that keep their strides."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.ops.reference.judging import disagreement as disagreement
from ds_runtime.ops.reference.judging import relative_error as relative_error
from ds_runtime.ops.reference.judging import worst_row as worst_row


def copy_strided(tensor: Tensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """A copy with the same strides, storage offset and gaps (a slice stays a slice)."""
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=dtype, device=device)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((n - 1) * stride for n, stride in steps)
    start = tensor.storage_offset()
    total = max(start + extent, tensor.untyped_storage().nbytes() // tensor.element_size())
    flat = tensor.as_strided((total,), (1,), 0).to(device=device, dtype=dtype, copy=True)
    return flat.as_strided(tensor.shape, tensor.stride(), start)


def storage_bytes(tensor: Tensor) -> Tensor:
    """All bytes of the storage behind a tensor, gaps between rows included: a uint8 copy."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage()).clone()
