"""Multi-head latent attention: plain MHA for prefill rows, absorbed over the cache for decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ds_runtime.model.config import ModelConfig
from ds_runtime.model.layers import Linear, RmsNorm
from ds_runtime.ops.batch import Batch, PrefillPart

if TYPE_CHECKING:
    from ds_runtime.model.loader import Loader

AT = "self_attn"
LATENT_EPS = 1e-6  # of the two inner norms; published modelling code ignores rms_norm_eps there


class Query:
    """q = q_b(norm(q_a x)), or q_proj x for models without a query latent."""

    def __init__(self, config: ModelConfig, load: Loader, layer: int) -> None:
        self.down: Linear | None = None
        if config.q_lora:
            self.down = load.linear(layer, f"{AT}.q_a_proj")
            self.norm = RmsNorm(
                load.ops(layer, AT), load.vector(layer, f"{AT}.q_a_layernorm"), LATENT_EPS
            )
            self.up = load.linear(layer, f"{AT}.q_b_proj")
        else:
            self.up = load.linear(layer, f"{AT}.q_proj")

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] → [T, heads · (nope + rope)]."""
        if self.down is not None:
            x = self.norm(self.down(x))
        return self.up(x)


class Attention:
    """One layer's attention on one rank's heads; returns the sum over ranks."""

    def __init__(self, config: ModelConfig, load: Loader, layer: int) -> None:
        self.ops = load.ops(layer, AT)
        self.comm = load.comm
        self.query = Query(config, load, layer)
        self.kv_a = load.linear(layer, f"{AT}.kv_a_proj_with_mqa")
        self.kv_norm = load.vector(layer, f"{AT}.kv_a_layernorm")
        self.kv_b = load.absorb(layer, f"{AT}.kv_b_proj")
        self.o_proj = load.linear(layer, f"{AT}.o_proj")
        self.state_key = load.bound.state_key("mla_decode", layer, AT)
        self.heads = config.heads // load.shard.size
        self.nope, self.qk_head, self.kv_lora = config.qk_nope, config.qk_head, config.kv_lora
        self.scale = config.softmax_scale

    def __call__(self, x: Tensor, batch: Batch, cache: Tensor, cos_sin: Tensor) -> Tensor:
        """[T, hidden] → [T, hidden]. Writes every row's latent and key to the cache first."""
        q = self.query(x).view(-1, self.heads, self.qk_head)
        q_rope, latent, k_rope = self.ops.mla_prologue(
            q,
            self.kv_a(x),
            self.kv_norm,
            LATENT_EPS,
            batch.positions,
            cos_sin,
            cache,
            batch.slots,
        )
        n = batch.num_decode
        parts = []
        if n:
            parts.append(self._decode(q[:n], q_rope[:n], batch, cache))
        if batch.prefill is not None:
            rotated = torch.cat((q[n:, :, : self.nope], q_rope[n:]), dim=-1)
            parts.append(self._prefill(rotated, latent[n:], k_rope[n:], batch.prefill, cache))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)  # [T, heads, v]
        return self.comm.all_reduce(self.o_proj(out.reshape(out.shape[0], -1)))

    def _decode(self, q: Tensor, q_rope: Tensor, batch: Batch, cache: Tensor) -> Tensor:
        """[n, heads, nope + rope] → [n, heads, v], in the latent space."""
        q_latent = self.kv_b.apply_q(q[..., : self.nope])  # [n, heads, kv_lora]
        absorbed = torch.cat((q_latent, q_rope), dim=-1)
        state = batch.states[self.state_key]
        return self.kv_b.apply_v(self.ops.mla_decode.run(state, absorbed, cache, self.scale))

    def _prefill(
        self, q: Tensor, latent: Tensor, k_rope: Tensor, part: PrefillPart, cache: Tensor
    ) -> Tensor:
        """New tokens among themselves, then merged with each chunk of their cached prefixes."""
        segs = part.q_segs
        k, v = self._expand(latent, k_rope)
        out, lse = self.ops.mha_prefill(q, k, v, segs, segs, True, self.scale)
        for chunk in part.prefix:
            cached, cached_rope = self.ops.cache_gather(
                cache, part.page_table, chunk.starts, chunk.segs, self.kv_lora, q.dtype
            )
            k, v = self._expand(cached, cached_rope)
            old, old_lse = self.ops.mha_prefill(q, k, v, segs, chunk.segs, False, self.scale)
            out, lse = self.ops.merge_state(out, lse, old, old_lse)
        return out

    def _expand(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [T, heads, nope + rope] and values [T, heads, v]; all heads share the rope part."""
        k_nope, v = self.kv_b.expand(latent)
        shared = k_rope.unsqueeze(1).expand(-1, self.heads, -1)
        return torch.cat((k_nope, shared), dim=-1), v
