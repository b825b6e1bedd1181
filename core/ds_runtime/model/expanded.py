"""Attention whose cache holds the keys and values of all heads (`--disable-mla`): what absorbed
attention over latents is measured against.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.model.attention import LATENT_EPS, Attention, Projected
from ds_runtime.model.indexer import LayerStep
from ds_runtime.ops.batch import PrefixChunk


class ExpandedAttention(Attention):
    """Every row's keys and values are made once, and written; decode reads them."""

    DECODE = "mha_decode"

    def _cached(self, q: Tensor, kv: Tensor, step: LayerStep, ahead: bool) -> Projected:
        ops, batch = self.ops, step.batch
        latent = ops.rms_norm(kv[:, : self.kv_lora], self.kv_norm, LATENT_EPS)
        rotated = q[..., self.nope :], kv[:, self.kv_lora :]
        q_rope, k_rope = ops.rope(*rotated, batch.positions, step.cos_sin)
        k, v = self.kv_b.expand(latent, batch.adapters)
        ops.cache_write(step.cache, torch.cat((k, v), -1).flatten(1), k_rope, batch.slots)
        return Projected(q, q_rope, latent, k_rope, k=k, v=v)

    def _decode_rows(
        self, q: Tensor, q_rope: Tensor, step: LayerStep, adapters: Tensor | None
    ) -> Tensor:
        batch, nope = step.batch, q.narrow(2, 0, self.nope)
        assert batch.decode is not None
        kernel, key = self.kernel_for(batch.decode)
        attended: Tensor = kernel.run(batch.states[key], nope, q_rope, step.cache, self.scale)
        return attended

    def _prefix(
        self, chunk: PrefixChunk, cache: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        each = self.nope + self.v_head
        both, k_rope = self.ops.cache_gather(
            cache, chunk.page_table, chunk.starts, chunk.segs, self.heads * each, dtype
        )
        parts = both.view(-1, self.heads, each).split_with_sizes((self.nope, self.v_head), 2)
        k, v = parts
        return k, k_rope, v
