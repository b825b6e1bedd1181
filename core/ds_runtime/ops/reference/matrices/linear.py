"""Torch references of linear, embedding and activation quantisation.

`ReferenceLinear` multiplies dequantised weights. `Fp8W8A8Linear` keeps FP8 weights and does the
arithmetic of DeepSeek's FP8 training framework: a yardstick for native FP8 kernels, chosen only
by a pin.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.ops.contract import Facts
from ds_runtime.ops.contracts.linear import Groups
from ds_runtime.ops.dtypes import decode_scale, fp8_vectors, torch_dtype, wide
from ds_runtime.ops.reference.matrices import fp8_blocks
from ds_runtime.ops.weight import Packed, Weight, WeightPart


class ReferenceLinear:
    """Reference of Linear: weights dequantised to the compute dtype, then one matmul."""

    tag = "reference.linear"

    def __init__(self, facts: Facts) -> None:
        self.dtype = torch_dtype(facts.dtype)

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        values = _whole_tiles(weight.dequantise(self.dtype))
        return Packed(
            tag=self.tag,
            shape=weight.shape,
            tensors={"weight": values},
            nbytes=values.nbytes,
            restore=_restore_weight,
        )

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        return F.linear(_whole_tiles(x), packed.tensors["weight"])

    def quantizes(self, rows: int, packed: Packed) -> Groups | None:
        """Nothing: x is multiplied as it is."""
        return None

    def apply_quantized(self, q: Tensor, scale: Tensor, packed: Packed) -> Tensor:
        """`apply` of what q and scale stand for."""
        compute = wide(self.dtype)
        width = q.shape[1] // scale.shape[1]
        values = q.to(compute) * scale.to(compute).repeat_interleave(width, 1)
        return self.apply(values.to(self.dtype), packed)

    def gives_float32(self, rows: int, packed: Packed) -> bool:
        """No: a float32 copy of the weight costs more than rounding."""
        return False

    def apply_float32(self, x: Tensor, packed: Packed, out: Tensor | None = None) -> Tensor:
        """`apply` with float32 copies, where that is asked for all the same."""
        packed.expect(self.tag)
        compute = wide(self.dtype)
        y = F.linear(_whole_tiles(x).to(compute), packed.tensors["weight"].to(compute))
        return y if out is None else out.copy_(y)


class ReferenceGroupedLinear:
    """Reference of GroupedLinear: weights dequantised to the compute dtype."""

    tag = "reference.grouped_linear"

    def __init__(self, facts: Facts) -> None:
        self.dtype = torch_dtype(facts.dtype)

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        values = weight.dequantise(self.dtype)
        held = {"weight": values}
        return Packed(self.tag, weight.shape, held, values.nbytes, _restore_weight)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        weight = packed.tensors["weight"].unflatten(0, (x.shape[1], -1))
        return torch.einsum("tgk,grk->tgr", x, weight).flatten(1).contiguous()


@cache
def sums_in_float32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's matmul of this dtype has float32 results on such a device."""
    if dtype == torch.float32:
        return True
    a = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        return bool(torch.mm(a, a, out_dtype=torch.float32)[0, 0] == 16)
    except RuntimeError:  # among them NotImplementedError, of a device without such a matmul
        return False


def float32_product(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns x · weightᵀ in float32, [tokens, out], in `out` or a new tensor. x: [tokens, in].
    weight: [out, in] of x's dtype. The sums were never rounded to that dtype if `sums_in_float32`
    of it.
    """
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    if x.dtype == torch.float32:
        return torch.mm(x, weight.t(), out=out)
    return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)


def _whole_tiles(rows: Tensor) -> Tensor:
    """Rows filled up with zeros to a multiple of 32 columns, where they are 16-bit on a CPU.

    On processors with matrix tiles, torch's matmul reads shorter rows beyond their end: the NaN
    of a neighbour would spoil them.
    """
    if rows.device.type != "cpu" or rows.dtype.itemsize != 2 or rows.shape[1] % 32 == 0:
        return rows
    return F.pad(rows, (0, -rows.shape[1] % 32))


def _restore_weight(packed: Packed) -> Tensor:
    values: Tensor = packed.tensors["weight"][:, : packed.shape[1]]
    return values.to(wide(values.dtype))


class Fp8W8A8Linear:
    """FP8 × FP8 with one scale per token and 128 channels, and per weight block.

    Each block of 128 input channels accumulates in fp32 and is scaled before it is added. Weight
    scales that are all powers of two, in whatever type, ask for such activation scales too.
    """

    tag = "reference.linear_fp8_w8a8"

    def __init__(self, facts: Facts) -> None:
        self.dtype = torch_dtype(facts.dtype)

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        weight.expect(("fp8_block",), self.tag)
        ue8m0 = all(
            fp8_blocks.powers_of_two(decode_scale(p.tensors["scale"], torch.float64))
            for p in weight.parts
        )
        tensors: dict[str, object] = {"weight": weight, "ue8m0": ue8m0}
        nbytes = sum(t.nbytes for p in weight.parts for t in p.tensors.values())
        return Packed(self.tag, weight.shape, tensors, nbytes, restore=_restore_parts)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        weight: Weight = packed.tensors["weight"]
        ue8m0: bool = packed.tensors["ue8m0"]
        return torch.cat([w8a8(x, part, ue8m0) for part in weight.parts], dim=-1).to(x.dtype)


def _restore_parts(packed: Packed) -> Tensor:
    weight: Weight = packed.tensors["weight"]
    return weight.dequantise(torch.float32)


def w8a8(x: Tensor, part: WeightPart, ue8m0: bool) -> Tensor:
    """[tokens, in] × one FP8 part → [tokens, rows], fp32 (float64 if x is)."""
    assert part.block is not None
    compute, (_, cols), (_, width), (_, col0) = wide(x.dtype), part.shape, part.block, part.offset
    # A shard may begin inside a block: padding restores the groups that the scales describe.
    padded = F.pad(x.to(compute), (col0, -(col0 + cols) % width))
    return multiply_codes(*quantize_group(padded, width, ue8m0), part, compute)


def multiply_codes(q: Tensor, x_scale: Tensor, part: WeightPart, compute: torch.dtype) -> Tensor:
    """[tokens, whole blocks] of codes × one FP8 part → [tokens, rows] in `compute`."""
    assert part.block is not None
    (rows, cols), (height, width), (row0, col0) = part.shape, part.block, part.offset
    scale = decode_scale(part.tensors["scale"], compute).repeat_interleave(height, 0)[
        row0 : row0 + rows
    ]
    weight = part.tensors["weight"]
    out = torch.zeros(q.shape[0], rows, dtype=compute, device=q.device)
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
    q, scale = fp8_vectors(x.to(compute).reshape(tokens, n // group, group), ue8m0)
    return q.reshape(tokens, n), scale
