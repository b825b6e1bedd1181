"""mla_absorb by its first contract: absorbed queries alone."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.api import Facts, Packed, Weight, torch_dtype


class Absorb:
    tag = "golden_2.absorb"

    def __init__(self, facts: Facts) -> None:
        self.dtype = torch_dtype(facts.dtype)
        self.heads, self.nope = facts.dims["heads"], facts.dims["qk_nope"]

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        values = weight.dequantise(self.dtype)
        per_head = values.view(self.heads, -1, values.shape[1]).contiguous()
        return Packed(self.tag, weight.shape, {"per_head": per_head}, values.nbytes)

    def expand(self, latent: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
        packed.expect(self.tag)
        both = torch.einsum("tc,hnc->thn", latent.float(), packed.tensors["per_head"].float())
        return both.to(latent.dtype).split((self.nope, both.shape[2] - self.nope), 2)

    def apply_q(self, q_nope: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        uk = packed.tensors["per_head"][:, : self.nope].float()
        return torch.einsum("thn,hnc->thc", q_nope.float(), uk).to(q_nope.dtype)

    def apply_v(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        uv = packed.tensors["per_head"][:, self.nope :].float()
        return torch.einsum("thc,hvc->thv", x.float(), uv).to(x.dtype)
