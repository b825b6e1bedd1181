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


def sum_wrong(found: Tensor, xs: Sequence[Tensor], exact: bool = False) -> str:
    """What is wrong with a sum of parts `xs`, in whatever order it was added, value by value.

    Each of n - 1 additions may round a partial sum to the dtype, and the result may be rounded once
    more, as where parts are added in float32. A partial sum has at most the size of the sum of all
    |x|, which grows by what earlier additions rounded. exact: nothing is rounded in any order.
    """
    want, bits = sum_of(xs), _BITS[str(xs[0].dtype).removeprefix("torch.")]
    sizes = sum_of([x.abs() for x in xs]) * (1 + 2.0**-bits) ** (len(xs) - 1)
    bound = (len(xs) - 1) * _half_a_unit(sizes, bits) + _half_a_unit(want.abs(), bits)
    if exact:
        bound = bound * 0
    off = (found.double() - want).abs()
    if not (wrong := ~(off <= bound)).any():  # what is no number is wrong, too
        return ""
    first = tuple(int(at) for at in wrong.nonzero()[0])
    return (
        f"{int(wrong.sum())} of {want.numel()} sums are off: at {first} by {float(off[first]):.3g},"
        f" more than {float(bound[first]):.3g}"
    )


def _half_a_unit(x: Tensor, bits: int) -> Tensor:
    """In the last place of values `x` ≥ 0 of a dtype with so many bits: what rounding may change.
    0 has none."""
    import torch

    exponents = torch.frexp(x).exponent - bits - 1
    return torch.ldexp(x.sign(), exponents)


def whole_numbers(dtype: str, shape: Sequence[int], ranks: int) -> list[Tensor]:
    """A part of each of at most 256 ranks, on the host. Partial sums have no more bits than every
    dtype of sums, so they are exact in any order. Columns count in units from 1 down to 2 ** -7:
    small values are as exact as large ones."""
    import torch

    most = max(1, 2 ** _BITS["bfloat16"] // ranks)
    draw = torch.Generator().manual_seed(most)
    small = 2.0 ** -(torch.arange(shape[-1]) % 8)
    parts = [torch.randint(-most, most + 1, tuple(shape), generator=draw) for _ in range(ranks)]
    return [(part * small).to(getattr(torch, dtype)) for part in parts]
