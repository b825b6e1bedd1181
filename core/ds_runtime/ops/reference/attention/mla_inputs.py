"""Torch reference of what is before attention in steps that only decode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_runtime.ops.contract import Facts
from ds_runtime.ops.dtypes import torch_dtype
from ds_runtime.ops.reference.attention.dense import ReferenceMlaAbsorb, mla_prologue
from ds_runtime.ops.reference.norm import rms_norm
from ds_runtime.ops.weight import MlaWeights, Packed


class ReferenceMlaInputs:
    """Reference of MlaInputs: its parts, one after the other."""

    tag = "reference.mla_inputs"

    def __init__(self, facts: Facts) -> None:
        self.dtype, self.absorb = torch_dtype(facts.dtype), ReferenceMlaAbsorb(facts)

    def pack(self, weights: MlaWeights, facts: Facts) -> Packed:
        names = ("q_a", "q_b", "kv_a")
        tensors: dict[str, Any] = {n: getattr(weights, n).dequantise(self.dtype) for n in names}
        tensors |= {"q_norm": weights.q_norm, "kv_norm": weights.kv_norm}
        nbytes = sum(t.nbytes for t in tensors.values())
        tensors["kv_b"] = self.absorb.pack(weights.kv_b, facts)
        return Packed(self.tag, facts.shape, tensors, nbytes + tensors["kv_b"].nbytes)

    def apply(
        self,
        x: Tensor,
        eps: float,
        positions: Tensor,
        cos_sin: Tensor,
        cache: Tensor,
        slots: Tensor,
        packed: Packed,
    ) -> tuple[Tensor, Tensor]:
        packed.expect(self.tag)
        held, linear = packed.tensors, torch.nn.functional.linear
        latent = rms_norm(linear(x, held["q_a"]), held["q_norm"], eps)
        heads, nope, _ = held["kv_b"].tensors["uk"].shape
        q = linear(latent, held["q_b"])
        q = q.view(x.shape[0], heads, q.shape[1] // heads)
        kv = linear(x, held["kv_a"])
        rest = held["kv_norm"], eps, positions, cos_sin, cache, slots
        q_rope, _, _ = mla_prologue(q, kv, *rest)
        return self.absorb.apply_q(q[..., :nope], q_rope, held["kv_b"]), latent
