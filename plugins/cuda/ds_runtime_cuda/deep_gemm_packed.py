"""DeepGEMM on compute capability 10, whose matrix units scale by powers of two.

Scales are exponent bytes, four groups to an int32, transposed, columns of whole 16 bytes. Those of
weights are packed here, one per row and 128 inputs; those of activations are powers of two in
float32, which the library packs. A checkpoint with other scales has its codes rounded to the powers
above them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.api import ExpertSource, Facts, Groups, Packed, Weight, fp8_blocks
from ds_runtime_cuda import deep_gemm, grouped
from ds_runtime_cuda.quant import GROUP, in_columns, power_above, quantise

_PARTS = ("gate_up", "down")


def rounded(values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The same weight under powers of two; nothing changes where scales are such already."""
    power = power_above(scale)
    if bool((power == scale).all()):
        return values, scale
    return (fp8_blocks.spread(values, scale) / _wide(power, values)).to(values.dtype), power


def _wide(scale: Tensor, values: Tensor) -> Tensor:
    rows, cols = values.shape[-2:]
    tall = scale.repeat_interleave(fp8_blocks.BLOCK, -2)[..., :rows, :]
    return tall.repeat_interleave(fp8_blocks.BLOCK, -1)[..., :cols]


def pack_exponents(scale: Tensor, rows: int) -> Tensor:
    """Block scales [row blocks, groups] → int32 [rows, ⌈groups / 4⌉], rows adjacent."""
    exponents = (scale.view(torch.int32) >> 23).to(torch.uint8)  # the sign is 0
    exponents = F.pad(exponents, (0, -scale.shape[1] % 4))
    words = exponents.contiguous().view(torch.int32).repeat_interleave(fp8_blocks.BLOCK, 0)[:rows]
    held = words.new_zeros(words.shape[1], -(-rows // 4) * 4)
    held[:, :rows] = words.T
    return held.as_strided((rows, words.shape[1]), (1, held.shape[1]))


def unpack_exponents(words: Tensor, groups: int) -> Tensor:
    """One scale per 128 rows and group again: [..., row blocks, groups] float32."""
    every = words[..., :: fp8_blocks.BLOCK, :].clone(memory_format=torch.contiguous_format)
    return (every.view(torch.uint8)[..., :groups].to(torch.int32) << 23).view(torch.float32)


def _restore(packed: Packed) -> Tensor:
    held = packed.tensors
    if "dense" in held:
        return fp8_blocks.restore(packed)
    groups = -(-held["weight"].shape[-1] // fp8_blocks.BLOCK)
    return fp8_blocks.spread(held["weight"], unpack_exponents(held["scale"], groups))


class LinearFp8Packed:
    """y = x · Wᵀ in FP8 with packed power-of-two scales."""

    tag = "cuda.deep_gemm_packed_linear"

    def __init__(self, facts: Facts) -> None:
        self._gemm = deep_gemm._library().fp8_gemm_nt

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        joined = fp8_blocks.join(weight)
        if joined is None:
            dense = weight.dequantise(torch.bfloat16)
            return Packed(self.tag, weight.shape, {"dense": dense}, dense.nbytes, _restore)
        values, scale = rounded(*joined)
        tensors: dict[str, Any] = {"weight": values, "scale": pack_exponents(scale, len(values))}
        nbytes = sum(t.nbytes for t in tensors.values())
        return Packed(self.tag, weight.shape, tensors, nbytes, _restore)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        held = packed.tensors
        if "dense" in held:
            return F.linear(x, held["dense"])
        return self.apply_quantized(*quantise(x, powers=True), packed)

    def quantizes(self, rows: int, packed: Packed) -> Groups | None:
        """See QuantizedLinear."""
        return None if "dense" in packed.tensors else Groups(GROUP, True)

    def apply_quantized(self, q: Tensor, scale: Tensor, packed: Packed) -> Tensor:
        """See QuantizedLinear."""
        packed.expect(self.tag)
        held = packed.tensors
        out = torch.empty(q.shape[0], packed.shape[0], dtype=torch.bfloat16, device=q.device)
        if q.shape[0]:
            self._gemm((q, in_columns(scale)), (held["weight"], held["scale"]), out)
        return out


class ExpertsFp8Packed:
    """Routed experts as two grouped matmuls over rows sorted by expert."""

    tag = "cuda.deep_gemm_packed_experts"

    def __init__(self, facts: Facts) -> None:
        self._gemm = deep_gemm._library().m_grouped_fp8_gemm_nt_contiguous

    def pack(self, source: ExpertSource, facts: Facts) -> Packed:
        tensors: dict[str, Any] = {}
        for e in range(source.num_experts):
            gate, up, down = source.expert(e)
            for name, weight in zip(_PARTS, (Weight((*gate.parts, *up.parts)), down), strict=True):
                joined = fp8_blocks.join(weight)
                assert joined is not None, "refuse() lets whole blocks pass alone"
                values, scale = rounded(*joined)
                words = pack_exponents(scale, len(values))
                if e == 0:
                    count = source.num_experts
                    tensors[name] = values.new_empty(count, *values.shape)
                    held = words.new_empty(count, words.shape[1], len(values))
                    tensors[f"{name}_scale"] = held.transpose(1, 2)
                tensors[name][e].copy_(values)
                tensors[f"{name}_scale"][e].copy_(words)
        shape = (source.num_experts, source.hidden, source.intermediate)
        nbytes = sum(t.nbytes for t in tensors.values())
        return Packed(self.tag, shape, tensors, nbytes, restore=_restore_gate_up)

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        if not x.shape[0]:
            return torch.empty_like(x)
        held, (experts, hidden, inter) = packed.tensors, packed.shape
        rows = grouped.sort_rows(ids, experts, deep_gemm.ALIGN)
        count = rows.owner.shape[0]
        gate_up = torch.empty(count, 2 * inter, dtype=torch.bfloat16, device=x.device)
        upper = held["gate_up"], held["gate_up_scale"]
        self._gemm(grouped.scatter(x, rows, powers=True), upper, gate_up, rows.owner)
        out = torch.empty(count, hidden, dtype=torch.bfloat16, device=x.device)
        lower = held["down"], held["down_scale"]
        self._gemm(grouped.silu(gate_up, rows, powers=True), lower, out, rows.owner)
        return grouped.combine(out, weights, rows)


def _restore_gate_up(packed: Packed) -> Tensor:
    held = packed.tensors
    groups = held["gate_up"].shape[-1] // fp8_blocks.BLOCK
    return fp8_blocks.spread(held["gate_up"], unpack_exponents(held["gate_up_scale"], groups))
