"""Everything before attention in steps that only decode, in one op: npu_mla_prolog_v3.

Source of the call: torch-npu's schema and _op_plugin_docs.py. Weights are in fractal format and the
compute dtype; prefill keeps its own, so that these are held twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.api import Facts, MlaWeights, Packed
from ds_runtime_npu.cache import paged, pairs, places
from ds_runtime_npu.library import NZ, npu


class MlaProlog:
    """MlaInputs over latent_split."""

    tag = "npu.mla_prolog"

    def __init__(self, facts: Facts) -> None:
        dims = facts.dims
        self._heads, self._nope, self._rope = dims["heads"], dims["qk_nope"], dims["qk_rope"]

    def pack(self, weights: MlaWeights, facts: Facts) -> Packed:
        tensors: dict[str, Tensor] = {}
        for name in ("q_a", "q_b", "kv_a"):
            values = getattr(weights, name).dequantise(torch.bfloat16)
            tensors[name] = npu().npu_format_cast(values.t().contiguous(), NZ)  # [in, out]
        both = weights.kv_b.dequantise(torch.bfloat16)
        keys = both.view(self._heads, -1, both.shape[1])  # of each head nope rows, then v rows
        tensors["uk"] = keys[:, : self._nope].contiguous()  # [heads, nope, latent]
        tensors |= {"q_norm": weights.q_norm, "kv_norm": weights.kv_norm}
        nbytes = sum(t.nbytes for t in tensors.values())
        return Packed(self.tag, facts.shape, dict(tensors), nbytes)

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
        held, tokens = packed.tensors, x.shape[0]
        latent = held["uk"].shape[2]
        query = x.new_empty(tokens, self._heads, latent + self._rope)
        if not tokens:
            return query, x.new_empty(0, held["q_norm"].shape[0])
        cos, sin = (
            part.to(x.dtype).repeat(1, 2) for part in cos_sin[positions].chunk(2, -1)
        )  # [T, rope]: of each half
        keys, rope = paged(cache, self._rope)
        q, q_rope, _, normed, _ = npu().npu_mla_prolog_v3(
            x.contiguous(),
            held["q_a"],
            held["q_b"],
            held["uk"],
            held["kv_a"],
            held["q_norm"],
            held["kv_norm"],
            sin,
            cos,
            keys.unsqueeze(2),  # [pages, page, 1, latent]
            rope.unsqueeze(2),
            cache_index=places(cache, slots),
            rmsnorm_epsilon_cq=eps,
            rmsnorm_epsilon_ckv=eps,
            cache_mode="PA_BSND",
            query_norm_flag=True,
        )
        query[..., :latent], query[..., latent:] = q, pairs(q_rope)
        return query, normed
