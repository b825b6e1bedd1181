"""What questions to groups of ranks share: inputs that every rank knows, and what is wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from ds_runtime.platform.contract import Communicator, Platform

LATE = 0.05  # seconds
SHAPES = ((1, 8), (7, 33), (32, 7168))
FLOATS = ("float32", "bfloat16", "float16")
_BITS = {"float32": 24, "bfloat16": 8, "float16": 11}


def drawn(
    platform: Platform, dtype: str, shape: Sequence[int], seed: int, rank: int, here: bool = True
) -> Tensor:
    """The same on every rank that makes it; here: on the device."""
    import torch

    draw = torch.Generator().manual_seed(1000 * seed + rank)
    kind = getattr(torch, dtype)
    if kind.is_floating_point:
        x = torch.randn(tuple(shape), generator=draw).to(kind)
    else:
        x = torch.randint(0, 200, tuple(shape), generator=draw).to(kind)
    return x.to(platform.device(platform.local_rank or 0)) if here else x


def other_form(found: Tensor, want: Tensor) -> str:
    if (found.dtype, found.shape) == (want.dtype, want.shape):
        return ""
    return f"{found.dtype} {tuple(found.shape)} instead of {want.dtype} {tuple(want.shape)}"


def same_bits(comm: Communicator, found: Tensor) -> str:
    """What is wrong unless every rank has the same bits."""
    import torch

    digest = hashlib.sha256(found.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    return "ranks have got different bits" if len(set(comm.gather_objects(digest))) > 1 else ""


def sum_of(xs: Sequence[Tensor]) -> Tensor:
    import torch

    return torch.stack([x.double() for x in xs]).sum(0)


def sum_wrong(found: Tensor, want: Tensor, xs: Sequence[Tensor], dtype: str) -> str:
    """Every addition may round once: half a unit in the last place of a partial sum."""
    if not want.numel():
        return ""
    most = max(float(sum(x.double().abs().max() for x in xs)), 1e-30)
    bound = len(xs) * most * 2.0 ** -_BITS[dtype]
    error = float((found.double() - want).abs().max())
    return "" if error <= bound else f"off by {error:.3g}, more than {bound:.3g}"
