"""DeepGEMM: dense and grouped FP8 matmuls with 128×128 weight blocks and 1×128 activation groups.

Source of the calls: github.com/sgl-project/DeepGEMM, the fork on PyPI as sgl-deep-gemm; they are
compiled for each weight shape when they first run.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.api import FP8_EXPERTS, FP8_ROWS, ExpertSource, Facts, Packed, Weight
from ds_runtime_cuda import blocks, grouped
from ds_runtime_cuda.quant import quantise

_PARTS = ("gate_up", "gate_up_scale", "down", "down_scale")
ALIGN = 128  # rows of one expert begin at multiples of this


@cache
def _library() -> Any:
    return import_module("deep_gemm")


class LinearFp8:
    """y = x · Wᵀ in FP8. Shards that cut a block cannot keep it: they are held in bfloat16."""

    tag = "cuda.deep_gemm_linear"

    def __init__(self, facts: Facts) -> None:
        self._gemm = _library().fp8_gemm_nt

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        joined = blocks.join(weight)
        if joined is None:
            dense = weight.dequantise(torch.bfloat16)
            return Packed(self.tag, weight.shape, {"dense": dense}, dense.nbytes, blocks.restore)
        values, scale = joined
        tensors = {"weight": values, "scale": scale}
        nbytes = values.nbytes + scale.nbytes
        return Packed(FP8_ROWS, weight.shape, tensors, nbytes, blocks.restore)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag, FP8_ROWS)
        if packed.tag != FP8_ROWS:
            return F.linear(x, packed.tensors["dense"])
        out = torch.empty(x.shape[0], packed.shape[0], dtype=torch.bfloat16, device=x.device)
        if x.shape[0]:
            self._gemm(quantise(x), (packed.tensors["weight"], packed.tensors["scale"]), out)
        return out


class ExpertsFp8:
    """Routed experts as two grouped matmuls over rows sorted by expert."""

    def __init__(self, facts: Facts) -> None:
        self._gemm = _library().m_grouped_fp8_gemm_nt_contiguous

    def pack(self, source: ExpertSource, facts: Facts) -> Packed:
        tensors: dict[str, Tensor] = {}
        for e in range(source.num_experts):
            gate, up, down = source.expert(e)
            upper, lower = blocks.join(Weight((*gate.parts, *up.parts))), blocks.join(down)
            assert upper is not None and lower is not None, "refuse() lets whole blocks pass alone"
            parts = (*upper, *lower)
            for name, part in zip(_PARTS, parts, strict=True):
                if e == 0:
                    tensors[name] = part.new_empty(source.num_experts, *part.shape)
                tensors[name][e].copy_(part)
        shape = (source.num_experts, source.hidden, source.intermediate)
        nbytes = sum(t.nbytes for t in tensors.values())
        return Packed(FP8_EXPERTS, shape, tensors, nbytes, restore=_restore_gate_up)

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        packed.expect(FP8_EXPERTS)
        if not x.shape[0]:
            return torch.empty_like(x)
        held, (experts, hidden, inter) = packed.tensors, packed.shape
        rows = grouped.sort_rows(ids, experts, ALIGN)
        count = rows.owner.shape[0]
        gate_up = torch.empty(count, 2 * inter, dtype=torch.bfloat16, device=x.device)
        upper = held["gate_up"], held["gate_up_scale"]
        self._gemm(grouped.scatter(x, rows), upper, gate_up, rows.owner)
        out = torch.empty(count, hidden, dtype=torch.bfloat16, device=x.device)
        lower = held["down"], held["down_scale"]
        self._gemm(grouped.silu(gate_up, rows), lower, out, rows.owner)
        return grouped.combine(out, weights, rows)


def _restore_gate_up(packed: Packed) -> Tensor:
    return blocks.spread(packed.tensors["gate_up"], packed.tensors["gate_up_scale"])
