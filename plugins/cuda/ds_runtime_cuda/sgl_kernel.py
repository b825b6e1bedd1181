"""sgl-kernel: FlashAttention 3, of prompts, over the latent cache and over chosen tokens of it.

Published today as sglang-kernel, imported as sgl_kernel; releases differ in what they hold, so
that every function is looked for by itself (software.py).
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ds_runtime.api import Batch, Facts, Limits, Segments, mha_joined
from ds_runtime_cuda.decode import LATENT, ROPE, Queries


@cache
def _library() -> Any:
    return import_module("sgl_kernel.flash_attn")


def mha_prefill(
    q: Tensor,
    q_rope: Tensor,
    k: Tensor,
    k_rope: Tensor,
    v: Tensor,
    q_segs: Segments,
    k_segs: Segments,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """MhaPrefill with FlashAttention 3, whose causal masks align at the ends, too."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = _library().flash_attn_varlen_func(
            q,
            k,
            v,
            q_segs.cu,
            k_segs.cu,
            q_segs.longest,
            k_segs.longest,
            softmax_scale=scale,
            causal=causal,
            return_softmax_lse=True,
        )[:2]
        return out, lse.transpose(0, 1)  # [heads, tokens] → [tokens, heads]

    return mha_joined(attend, q, q_rope, k, k_rope, v)


class MlaDecode:
    """Absorbed MLA decode with FlashAttention 3: the latent part of q goes along as `qv`."""

    def __init__(self, facts: Facts) -> None:
        self._attend = _library().flash_attn_with_kvcache
        self._one_split = facts.deterministic

    def state(self, limits: Limits) -> Queries:
        return Queries.make(limits)

    def prepare(self, state: Queries, batch: Batch) -> None:
        state.fill(batch)

    def run(self, state: Queries, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        count, heads, _ = q.shape
        if not count:
            return q.new_empty(0, heads, LATENT)
        out = self._attend(
            q=q[..., LATENT:].unsqueeze(1),  # [rows, 1, heads, rope]
            k_cache=cache[..., LATENT : LATENT + ROPE].unsqueeze(2),  # [pages, page, 1, rope]
            v_cache=cache[..., :LATENT].unsqueeze(2),
            qv=q[..., :LATENT].unsqueeze(1),
            cache_seqlens=state.lens[:count],
            page_table=state.table[:count],
            softmax_scale=scale,
            causal=True,
            num_splits=1 if self._one_split else 0,
        )
        return out.view(count, heads, LATENT)  # type: ignore[no-any-return]


def sparse_mla(q: Tensor, cache: Tensor, slots: Tensor, kv_lora: int, scale: float) -> Tensor:
    """SparseMla with FlashAttention 3: a sequence per row, whose pages are its slots."""
    rows, heads, _ = q.shape
    if not rows:
        return q.new_empty(0, heads, kv_lora)
    chosen = slots.sort(dim=-1, descending=True).values  # those that are none come last
    counts = (chosen >= 0).sum(-1, dtype=torch.int32)
    tokens = cache.view(-1, 1, 1, cache.shape[2])  # [slots, 1, 1, latent + rope]: pages of one
    out: Tensor = _library().flash_attn_with_kvcache(
        q=q[..., kv_lora:].unsqueeze(1),
        k_cache=tokens[..., kv_lora:],
        v_cache=tokens[..., :kv_lora],
        qv=q[..., :kv_lora].unsqueeze(1),
        cache_seqlens=counts.clamp(min=1),
        page_table=chosen.clamp(min=0),
        softmax_scale=scale,
        causal=True,
    )
    return out.view(rows, heads, kv_lora).masked_fill((counts == 0)[:, None, None], 0.0)
