"""Torch references of linear, embedding and activation quantisation.

`ReferenceLinear` multiplies dequantised weights. `Fp8W8A8Linear` keeps FP8 weights and does the
arithmetic of DeepSeek's FP8 training framework: a yardstick for native FP8 kernels, chosen only
by a pin.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.ops.reference.formats import decode_scale, torch_dtype, wide
from ds_runtime.ops.spec import Facts
from ds_runtime.ops.weight import Packed, Weight, WeightPart

FP8_MAX = 448.0


class ReferenceLinear:
    """Reference of Linear: weights dequantised to the compute dtype, then one matmul."""

    tag = "reference.linear"

    def __init__(self, facts: Facts) -> None:
        self.dtype = torch_dtype(facts.dtype)

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        values = weight.dequantise(self.dtype)
        return Packed(
            tag=self.tag,
            shape=weight.shape,
            tensors={"weight": values},
            nbytes=values.nbytes,
            restore=_restore_weight,
        )

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        return F.linear(x, packed.tensors["weight"])


def _restore_weight(packed: Packed) -> Tensor:
    values: Tensor = packed.tensors["weight"]
    return values.to(wide(values.dtype))


class Fp8W8A8Linear:
    """FP8 × FP8 with one scale per token and 128 channels, and per weight block.

    Each block of 128 input channels accumulates in fp32 and is scaled before it is added. Power
    of two weight scales (one byte each) ask for power of two activation scales.
    """

    tag = "reference.linear_fp8_w8a8"

    def __init__(self, facts: Facts) -> None:
        self.dtype = torch_dtype(facts.dtype)

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        tensors: dict[str, object] = {"weight": weight}
        nbytes = sum(t.nbytes for p in weight.parts for t in p.tensors.values())
        return Packed(self.tag, weight.shape, tensors, nbytes, restore=_restore_parts)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        weight: Weight = packed.tensors["weight"]
        return torch.cat([_w8a8(x, part) for part in weight.parts], dim=-1).to(x.dtype)


def _restore_parts(packed: Packed) -> Tensor:
    weight: Weight = packed.tensors["weight"]
    return weight.dequantise(torch.float32)


def _w8a8(x: Tensor, part: WeightPart) -> Tensor:
    """[tokens, in] × one FP8 part → [tokens, rows], fp32 (float64 if x is)."""
    assert part.block is not None
    compute, raw = wide(x.dtype), part.tensors["scale"]
    (rows, cols), (height, width), (row0, col0) = part.shape, part.block, part.offset
    scale = decode_scale(raw, compute).repeat_interleave(height, 0)[row0 : row0 + rows]
    weight = part.tensors["weight"]
    # A shard may begin inside a block: padding restores the groups that the scales describe.
    padded = F.pad(x.to(compute), (col0, -(col0 + cols) % width))
    q, x_scale = quantize_group(padded, width, raw.element_size() == 1)
    out = torch.zeros(x.shape[0], rows, dtype=compute, device=x.device)
    for block in range(x_scale.shape[1]):
        lo, hi = max(block * width, col0), min((block + 1) * width, col0 + cols)
        product = q[:, lo:hi].to(compute) @ weight[:, lo - col0 : hi - col0].to(compute).T
        out += product * x_scale[:, block, None].to(compute) * scale[:, block]
    return out


def embed(ids: Tensor, table: Tensor, start: int) -> Tensor:
    """Reference of Embed."""
    local = ids - start
    held = (local >= 0) & (local < table.shape[0])
    if table.shape[0] == 0:
        return table.new_zeros(ids.shape[0], table.shape[1])
    rows = table[local.clamp(0, table.shape[0] - 1)]  # [tokens, hidden]
    return torch.where(held.unsqueeze(-1), rows, rows.new_zeros(()))


def quantize_group(x: Tensor, group: int, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Reference of QuantizeGroup; scales are float64 for a float64 input."""
    compute = wide(x.dtype)
    tokens, n = x.shape
    values = x.to(compute).reshape(tokens, n // group, group)
    scale = values.abs().amax(-1).clamp(min=1e-4) / FP8_MAX  # [tokens, n / group]
    if ue8m0:
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa · 2^exponent, mantissa in [½, 1)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scale = torch.ldexp(torch.ones_like(scale), exponent)
    q = (values / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return q.to(torch.float8_e4m3fn).reshape(tokens, n), scale
