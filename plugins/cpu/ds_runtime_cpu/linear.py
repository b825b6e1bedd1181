"""Three ways to multiply by a weight: oneDNN's packing, the native packing, and plain torch.

FP8 blocks are converted to the compute dtype when they are packed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.ops.spec import Facts
from ds_runtime.ops.weight import Packed, Weight
from ds_runtime_cpu.native import calls
from ds_runtime_cpu.packing import empty_packed, pack_into, unpack
from ds_runtime_cpu.small import CODE

# oneDNN packs for an expected number of rows; measured, 16 is as good as the best for any.
_EXPECTED_ROWS = 16


def compute_dtype(facts: Facts) -> torch.dtype:
    dtype = getattr(torch, facts.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def prepack(values: Tensor) -> Tensor:
    """[out, in] in oneDNN's own order (an opaque tensor of the same shape)."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(values.contiguous(), _EXPECTED_ROWS)
    return packed


def prepacked_linear(x: Tensor, packed: Tensor) -> Tensor:
    """x [tokens, in] times a prepacked [out, in], transposed."""
    if x.shape[0] == 0:
        return x.new_empty(0, packed.shape[0])
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return out


class LinearPrepacked:
    """oneDNN with weights in its own order: fast for every number of tokens."""

    tag = "cpu.linear_prepacked"

    def __init__(self, facts: Facts) -> None:
        self.dtype = compute_dtype(facts)

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        packed = prepack(weight.dequantise(self.dtype))
        nbytes = weight.shape[0] * weight.shape[1] * self.dtype.itemsize
        return Packed(self.tag, weight.shape, {"weight": packed}, nbytes, restore=_from_onednn)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        return prepacked_linear(x, packed.tensors["weight"])


def _from_onednn(packed: Packed) -> Tensor:
    values: Tensor = packed.tensors["weight"].to_dense()
    return values.to(torch.float32)


class LinearNative:
    """Streams weights at the speed of memory; the fastest up to about a dozen tokens."""

    tag = "cpu.linear_native"

    def __init__(self, facts: Facts) -> None:
        self.dtype = compute_dtype(facts)

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        rows, k = weight.shape
        packed = empty_packed(1, rows, k, self.dtype)
        pack_into(packed[0], weight.dequantise(self.dtype))
        return Packed(
            self.tag, weight.shape, {"weight": packed}, packed.nbytes, restore=_from_native
        )

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        tokens, (rows, k) = x.shape[0], packed.shape
        out = torch.empty(tokens, rows, dtype=x.dtype)
        calls().linear_heads(
            CODE[x.dtype],
            x.data_ptr(),
            x.stride(0),
            0,
            packed.tensors["weight"].data_ptr(),
            out.data_ptr(),
            rows,
            0,
            1,
            tokens,
            rows,
            k,
        )
        return out


def _from_native(packed: Packed) -> Tensor:
    rows, k = packed.shape
    return unpack(packed.tensors["weight"][0], rows, k).to(torch.float32)


class LinearPlain:
    """torch's linear on a contiguous weight."""

    tag = "cpu.linear_plain"

    def __init__(self, facts: Facts) -> None:
        self.dtype = compute_dtype(facts)

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        values = torch.empty(weight.shape, dtype=self.dtype)
        values.copy_(weight.dequantise(self.dtype))  # the checkpoint's pages may then be released
        return Packed(self.tag, weight.shape, {"weight": values}, values.nbytes, restore=_wide)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        return F.linear(x, packed.tensors["weight"])


def _wide(packed: Packed) -> Tensor:
    values: Tensor = packed.tensors["weight"]
    return values.to(torch.float32)


# The names that the plan shows.
linear_prepacked = LinearPrepacked
linear_native = LinearNative
linear_plain = LinearPlain
