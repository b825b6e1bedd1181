"""What torch itself brings for the GPU: cuBLAS, block-scaled FP8, grouped matmuls."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.api import (
    FP8_ROWS,
    Facts,
    Packed,
    ReferenceExperts,
    ReferenceLinear,
    Weight,
    float32_product,
    fp8_blocks,
    silu_mul,
    sums_in_float32,
)
from ds_runtime_cuda import grouped
from ds_runtime_cuda.gates import SCALED_COLUMNS
from ds_runtime_cuda.quant import quantise

_ROWS = 16  # that cuBLAS multiplies together


class LinearCublas(ReferenceLinear):
    """y = x · Wᵀ in the compute dtype."""

    tag = "cuda.cublas_linear"

    def gives_float32(self, rows: int, packed: Packed) -> bool:
        """See Float32Linear."""
        weight: Tensor = packed.tensors["weight"]
        return packed.tag == self.tag and sums_in_float32(weight.dtype, weight.device)

    def apply_float32(self, x: Tensor, packed: Packed, out: Tensor | None = None) -> Tensor:
        """See Float32Linear."""
        packed.expect(self.tag)
        return float32_product(x, packed.tensors["weight"], out)


class LinearScaledMm:
    """y = x · Wᵀ in FP8 through torch._scaled_mm, with 1×128 by 128×128 scales."""

    tag = "cuda.scaled_mm_linear"

    def __init__(self, facts: Facts) -> None:
        pass

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        joined = fp8_blocks.join(weight)
        if joined is None:
            return fp8_blocks.dense(weight, self.tag)
        values, scale = joined
        tag, restore = FP8_ROWS, fp8_blocks.restore
        if missing := -values.shape[1] % SCALED_COLUMNS:
            values = F.pad(values.view(torch.uint8), (0, missing)).view(torch.float8_e4m3fn)
            scale = F.pad(scale, (0, missing // fp8_blocks.BLOCK))
            tag, restore = self.tag, _restore_unpadded
        tensors = {"weight": values, "scale": scale}
        nbytes = values.nbytes + scale.nbytes
        return Packed(tag, weight.shape, tensors, nbytes, restore)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag, FP8_ROWS)
        tokens = x.shape[0]
        if "dense" in packed.tensors:
            return F.linear(x, packed.tensors["dense"])
        if not tokens:
            return x.new_empty(0, packed.shape[0])
        if missing := packed.tensors["weight"].shape[1] - x.shape[1]:
            x = F.pad(x, (0, missing))
        q, scale = quantise(x, rows=-(-tokens // _ROWS) * _ROWS)
        out: Tensor = torch._scaled_mm(
            q,
            packed.tensors["weight"].t(),
            scale,
            packed.tensors["scale"].t(),
            out_dtype=torch.bfloat16,
        )
        return out[:tokens]


class LinearScaledMmPadded(LinearScaledMm):
    """LinearScaledMm for other widths: it pads weights with zeros. No other kernel reads those."""


def _restore_unpadded(packed: Packed) -> Tensor:
    return fp8_blocks.restore(packed)[:, : packed.shape[1]]


class ExpertsGroupedMm(ReferenceExperts):
    """Routed experts as two grouped matmuls of torch, over rows sorted by expert."""

    tag = "cuda.grouped_mm_experts"

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        if not x.shape[0]:
            return torch.empty_like(x)
        gate_up, down = packed.tensors["gate_up"], packed.tensors["down"]
        rows = grouped.sort_rows(ids, packed.shape[0], align=1)
        pairs, top_k = ids.numel(), ids.shape[1]
        tokens = torch.arange(pairs, device=x.device) // top_k
        of = rows.of.view(-1)
        to = torch.where(of >= 0, of, pairs)  # behind all rows, where another rank has the expert
        source = tokens.new_zeros(pairs + 1).scatter_(0, to, tokens)
        hidden = torch._grouped_mm(x[source[:-1]], gate_up.transpose(1, 2), offs=rows.ends)
        out = torch._grouped_mm(silu_mul(hidden), down.transpose(1, 2), offs=rows.ends)
        return grouped.combine(out, weights, rows)
