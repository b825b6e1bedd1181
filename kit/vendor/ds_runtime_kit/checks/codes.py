"""Rows as the codes that a kernel makes of them itself, as ranks send them to each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_runtime.ops.weight import Packed
from ds_runtime_kit.checks.effects import same_bits

_BEFORE, _BEHIND = 64, 64  # columns of what crosses with the rows, whole lines of memory each


class Coded:
    """Around experts: a call also gets codes in place of its rows, as QuantizedExperts has it, and
    `said` is what of that is not so. made: whether any call had codes."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.said, self.made = "", False

    def pack(self, *args: Any) -> Packed:
        packed: Packed = self._target.pack(*args)
        return packed

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        out: Tensor = self._target.apply(x, weights, ids, packed)
        self.said = self.said or self._differs(x, weights, ids, packed, out)
        return out

    def _differs(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed, out: Tensor) -> str:
        rows = x.shape[0]
        codes = self._target.quantize(rows, x, packed)
        if codes is None:
            return ""
        self.made = True
        q, scale = codes
        if q.shape != x.shape or q.dtype != torch.float8_e4m3fn:
            return f"quantize: q is {q.dtype} {list(q.shape)}, not float8_e4m3fn {list(x.shape)}"
        if scale.dtype != torch.float32 or scale.ndim != 2 or scale.shape[0] != rows:
            said = f"{scale.dtype} {list(scale.shape)}, not float32 [{rows}, groups]"
            return f"quantize: scale is {said}"
        for row in range(rows):
            alone = self._target.quantize(rows, x[row : row + 1], packed)
            own = q[row : row + 1], scale[row : row + 1]
            if alone is None or not all(map(same_bits, alone, own)):
                return f"quantize: codes of row {row} alone differ from the same row's among others"
        crossed = _among_others(q.view(torch.uint8)).view(q.dtype), _among_others(scale)
        made = self._target.apply_quantized(*crossed, weights, ids, packed)
        return "" if same_bits(made, out) else "apply_quantized: other bits than those of apply"


def _among_others(values: Tensor) -> Tensor:
    """The same as columns of a wider tensor, whose others are bytes 0xFF: NaN in both dtypes."""
    width = _BEFORE + values.shape[1] + _BEHIND
    outer = torch.empty(values.shape[0], width, dtype=values.dtype, device=values.device)
    outer.view(torch.uint8).fill_(255)
    view = outer[:, _BEFORE : width - _BEHIND]
    view.copy_(values)
    return view
