"""Routed experts in the arithmetic of DeepSeek's FP8 training framework, chosen only by a pin."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.ops.contract import Facts
from ds_runtime.ops.dtypes import decode_scale, torch_dtype, wide
from ds_runtime.ops.reference.activation import silu_mul
from ds_runtime.ops.reference.matrices import fp8_blocks
from ds_runtime.ops.reference.matrices.linear import multiply_codes, quantize_group, w8a8
from ds_runtime.ops.weight import ExpertSource, Packed, Weight

_GROUP = 128


class Fp8W8A8Experts:
    """Experts over FP8 codes: rows are quantised once, as is what lies between the products. Takes
    codes where the groups of rows are those of the weights: whole blocks of 128.
    """

    tag = "reference.experts_fp8_w8a8"

    def __init__(self, facts: Facts) -> None:
        self.dtype = torch_dtype(facts.dtype)

    def pack(self, source: ExpertSource, facts: Facts) -> Packed:
        experts = [source.expert(e) for e in range(source.num_experts)]
        parts = [part for triple in experts for weight in triple for part in weight.parts]
        for weight in (weight for triple in experts for weight in triple):
            weight.expect(("fp8_block",), self.tag)
        ue8m0 = all(
            fp8_blocks.powers_of_two(decode_scale(p.tensors["scale"], torch.float64)) for p in parts
        )
        rows = [part for gate, up, _ in experts for weight in (gate, up) for part in weight.parts]
        coded = all(p.block and p.block[1] == _GROUP and p.offset[1] == 0 for p in rows)
        coded = coded and source.hidden % _GROUP == 0
        tensors: dict[str, object] = {"experts": experts, "ue8m0": ue8m0, "coded": coded}
        nbytes = sum(t.nbytes for p in parts for t in p.tensors.values())
        shape = (source.num_experts, source.hidden, source.intermediate)
        return Packed(self.tag, shape, tensors, nbytes, restore=_restore_gate_up)

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        codes = self.quantize(x.shape[0], x, packed)
        if codes is not None:
            return self._summed(x, codes, weights, ids, packed)
        return self._summed(x, None, weights, ids, packed)

    def quantize(self, rows: int, x: Tensor, packed: Packed) -> tuple[Tensor, Tensor] | None:
        """See QuantizedExperts."""
        packed.expect(self.tag)
        if not packed.tensors["coded"]:
            return None
        return quantize_group(x, _GROUP, packed.tensors["ue8m0"])

    def apply_quantized(
        self, q: Tensor, scale: Tensor, weights: Tensor, ids: Tensor, packed: Packed
    ) -> Tensor:
        """See QuantizedExperts."""
        packed.expect(self.tag)
        like = torch.empty(q.shape, dtype=self.dtype, device=q.device)
        return self._summed(like, (q, scale), weights, ids, packed)

    def _summed(
        self,
        x: Tensor,
        codes: tuple[Tensor, Tensor] | None,
        weights: Tensor,
        ids: Tensor,
        packed: Packed,
    ) -> Tensor:
        """x: read where there are no codes, and else only of its kind."""
        ue8m0: bool = packed.tensors["ue8m0"]
        out = torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device)

        def product(weight: Weight, tokens: Tensor) -> Tensor:
            if codes is None:
                return torch.cat([w8a8(x[tokens], part, ue8m0) for part in weight.parts], -1)
            own = codes[0][tokens], codes[1][tokens]
            return torch.cat([multiply_codes(*own, part, out.dtype) for part in weight.parts], -1)

        for e in torch.unique(ids[ids >= 0]).tolist():
            gate, up, down = packed.tensors["experts"][e]
            tokens, place = (ids == e).nonzero(as_tuple=True)
            h = silu_mul(torch.cat((product(gate, tokens), product(up, tokens)), -1)).to(x.dtype)
            y = torch.cat([w8a8(h, part, ue8m0) for part in down.parts], -1)
            out[tokens] += y.to(out.dtype) * weights[tokens, place, None].to(out.dtype)
        return out.to(x.dtype)


def _restore_gate_up(packed: Packed) -> Tensor:
    """[experts, 2 · intermediate, hidden]: gate rows, then up rows."""
    triples = packed.tensors["experts"]
    pairs = [torch.cat([w.dequantise(torch.float32) for w in (g, u)]) for g, u, _ in triples]
    return torch.stack(pairs)
