"""Routed experts: one native call per layer, or oneDNN matmuls expert by expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.ops.spec import Facts
from ds_runtime.ops.weight import ExpertSource, Packed
from ds_runtime_cpu.linear import compute_dtype, prepack, prepacked_linear
from ds_runtime_cpu.native import calls
from ds_runtime_cpu.packing import empty_packed, pack_into, packed_elements, unpack
from ds_runtime_cpu.small import CODE


class ExpertsNative:
    """Sorts tokens by expert and streams every chosen expert's weights once."""

    tag = "cpu.experts_native"

    def __init__(self, facts: Facts) -> None:
        self.dtype = compute_dtype(facts)

    def pack(self, source: ExpertSource, facts: Facts) -> Packed:
        count, hidden, inter = source.num_experts, source.hidden, source.intermediate
        w13 = empty_packed(count * 2, inter, hidden, self.dtype)
        w2 = empty_packed(count, hidden, inter, self.dtype)
        for e in range(count):
            gate, up, down = source.expert(e)
            pack_into(w13[2 * e], gate.dequantise(self.dtype))
            pack_into(w13[2 * e + 1], up.dequantise(self.dtype))
            pack_into(w2[e], down.dequantise(self.dtype))
        return Packed(
            self.tag,
            (count, hidden, inter),
            {"w13": w13, "w2": w2},
            w13.nbytes + w2.nbytes,
            restore=_gate_up_native,
        )

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        count, hidden, inter = packed.shape
        tokens, top_k = ids.shape
        weights, ids = weights.contiguous(), ids.contiguous()
        out = torch.empty(tokens, hidden, dtype=x.dtype)
        scratch = torch.empty(tokens * top_k, inter, dtype=x.dtype)
        sums = torch.empty(tokens, hidden)
        order = torch.empty(tokens * top_k + count + 1, dtype=torch.int32)
        calls().experts(
            CODE[x.dtype],
            x.data_ptr(),
            x.stride(0),
            weights.data_ptr(),
            ids.data_ptr(),
            packed.tensors["w13"].data_ptr(),
            packed.tensors["w2"].data_ptr(),
            out.data_ptr(),
            scratch.data_ptr(),
            sums.data_ptr(),
            order.data_ptr(),
            tokens,
            top_k,
            count,
            hidden,
            inter,
        )
        return out


def _gate_up_native(packed: Packed) -> Tensor:
    count, hidden, inter = packed.shape
    w13: Tensor = packed.tensors["w13"]
    assert w13.shape[1] == packed_elements(inter, hidden, w13.dtype)
    stacks = [unpack(w, inter, hidden) for w in w13]
    return torch.stack(stacks).view(count, 2 * inter, hidden).to(torch.float32)


class ExpertsPrepacked:
    """Per expert with tokens: gather, two oneDNN matmuls, weighted scatter in float32."""

    tag = "cpu.experts_prepacked"

    def __init__(self, facts: Facts) -> None:
        self.dtype = compute_dtype(facts)

    def pack(self, source: ExpertSource, facts: Facts) -> Packed:
        count, hidden, inter = source.num_experts, source.hidden, source.intermediate
        w13: list[Tensor] = []
        w2: list[Tensor] = []
        for e in range(count):
            gate, up, down = source.expert(e)
            both = torch.cat((gate.dequantise(self.dtype), up.dequantise(self.dtype)))
            w13.append(prepack(both))  # [2 · inter, hidden]
            w2.append(prepack(down.dequantise(self.dtype)))
        nbytes = count * 3 * hidden * inter * self.dtype.itemsize
        shape = (count, hidden, inter)
        return Packed(self.tag, shape, {"w13": w13, "w2": w2}, nbytes, restore=_gate_up_onednn)

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        tokens, top_k = ids.shape
        flat = ids.reshape(-1).to(torch.int64)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=packed.shape[0]).tolist()
        rows = order // max(top_k, 1)
        scale = weights.reshape(-1)[order].unsqueeze(-1)  # [pairs, 1]
        sums = torch.zeros(tokens, packed.shape[1])
        start = 0
        for e, count in enumerate(counts):
            if count == 0:
                continue
            take = rows[start : start + count]
            gate, up = prepacked_linear(x[take], packed.tensors["w13"][e]).chunk(2, dim=-1)
            y = prepacked_linear(F.silu(gate) * up, packed.tensors["w2"][e])
            sums.index_add_(0, take, y.to(torch.float32) * scale[start : start + count])
            start += count
        return sums.to(x.dtype)


def _gate_up_onednn(packed: Packed) -> Tensor:
    return torch.stack([w.to_dense().to(torch.float32) for w in packed.tensors["w13"]])


# The names that the plan shows.
experts_native = ExpertsNative
experts_prepacked = ExpertsPrepacked
