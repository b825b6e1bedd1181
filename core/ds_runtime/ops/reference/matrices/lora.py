"""Torch reference of low-rank adapters: two products over all slots at once, one mask between."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.ops.dtypes import wide


def lora_delta(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor) -> None:
    """Reference of LoraDelta. Reads nothing on the host, so it may be captured."""
    compute = wide(x.dtype)
    slots, rank = a.shape[1:3]
    down = a.to(compute).flatten(1, 2).transpose(1, 2)  # [groups or 1, in, slots · rank]
    up = b.to(compute).flatten(1, 2)  # [groups or 1, slots · rank, out]
    inner = torch.matmul(x.to(compute).transpose(0, 1), down)  # [groups or 1, rows, slots · rank]
    own = adapters[:, None] == torch.arange(slots, device=x.device)
    inner = torch.where(own.repeat_interleave(rank, 1), inner, inner.new_zeros(()))
    delta = torch.matmul(inner, up).transpose(0, 1)  # [rows, groups or 1, out]
    y.copy_(torch.where((adapters >= 0)[:, None, None], y.to(compute) + delta, y))
