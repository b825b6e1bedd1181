"""The inverse of `layouts.py` for what is written: a WeightPart as the tensors of a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.checkpoint.tensors import DTYPES
from ds_runtime.ops.contract import Encoding
from ds_runtime.ops.dtypes import decode_scale
from ds_runtime.ops.weight import WeightPart
from ds_runtime.weights.layouts import Expected, expected

_PACK = 8  # codes in an int32


def planned(
    encoding: Encoding, shape: tuple[int, int], scale: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Component → (safetensors dtype, shape) of a whole Linear as `packed` gives it.

    scale: the dtype of scales where the layout leaves it open. Components that only a calibration
    could fill are left out.
    """
    wanted = expected(encoding, shape)
    assert wanted is not None, encoding.layout
    kept = {c: want for c, want in wanted.items() if c not in encoding.optional}
    return {c: (_dtype(c, encoding, want, scale), _shape(c, want)) for c, want in kept.items()}


def _dtype(component: str, encoding: Encoding, want: Expected, scale: str) -> str:
    if component == "scale" and scale in want.dtypes:
        return scale
    if component == "weight" and encoding.format == "w4afp8" and "I8" in want.dtypes:
        return "I8"  # as published: two's complement
    return "I64" if component == "shape" else want.dtypes[0]


def _shape(component: str, want: Expected) -> tuple[int, ...]:
    return (1,) if component == "global" else want.shapes[0]


def packed(part: WeightPart, encoding: Encoding, scale: str) -> dict[str, Tensor]:
    """Component → tensor of a whole Linear, in the dtypes and shapes that `planned` says."""
    wanted = planned(encoding, part.shape, scale)
    made = {"weight": _PACKERS[encoding.layout](part), "shape": torch.tensor(part.shape)}
    if "scale" in wanted:
        made["scale"] = stored_scale(part.tensors["scale"], DTYPES[wanted["scale"][0]])
    if "global" in wanted:
        whole = part.tensors["global"]
        made["global"] = 1 / whole if encoding.divides else whole
    return {
        c: made[c].contiguous().view(DTYPES[dtype]).reshape(shape)
        for c, (dtype, shape) in wanted.items()
    }


def stored_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in the dtype of the file, rounded where it holds fewer bits."""
    return scale if scale.dtype == dtype else decode_scale(scale, torch.float32).to(dtype)


def _nibbles(codes: Tensor) -> Tensor:
    """[rows, cols] codes → [rows, cols / 2] bytes, the even column low."""
    padded = F.pad(codes.view(torch.uint8) & 15, (0, codes.shape[1] % 2))
    return padded[:, ::2] | padded[:, 1::2] << 4


def _words(part: WeightPart) -> Tensor:
    """Codes + 8, eight to an int32, the lowest bits first."""
    codes = F.pad(part.tensors["weight"] + 8, (0, -part.shape[1] % _PACK))
    return _nibbles(codes).contiguous().view(torch.int32)


_PACKERS: Mapping[str, Callable[[WeightPart], Tensor]] = {
    "rows": lambda part: part.tensors["weight"],
    "nibbles": lambda part: _nibbles(part.tensors["weight"]),
    "words": _words,
}
