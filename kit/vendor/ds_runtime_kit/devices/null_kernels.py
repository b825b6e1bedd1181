"""Kernels of the null platform: the shapes and dtypes of every op's contract, filled with zeros.

Logits are the same junk in every row; sampled tokens depend on the random number alone, so that
they repeat with seed, choice and position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_runtime.ops.batch import Batch, Limits, Segments
from ds_runtime.ops.contract import Facts, Routing
from ds_runtime.ops.weight import ExpertSource, Packed, Weight


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32)


def allocate_null_pages(num_pages: int, facts: Facts, device: Any) -> Tensor:
    """[num_pages, 0, kv_lora + rope]: holds nothing, and knows its width."""
    return torch.zeros(num_pages, 0, facts.dims["kv_lora"] + facts.dims["qk_rope"], device=device)


def allocate_null_index(num_pages: int, facts: Facts, device: Any) -> Tensor:
    """[num_pages, page_size, 0]: holds nothing, and knows how many tokens it would."""
    return torch.zeros(num_pages, facts.page_size, 0, device=device)


def embed(ids: Tensor, table: Tensor, start: int) -> Tensor:
    """Null of Embed."""
    return table.new_zeros(ids.shape[0], table.shape[1])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Null of RmsNorm."""
    return x.new_zeros(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Null of AddRmsNorm."""
    return x.new_zeros(x.shape), x.new_zeros(x.shape)


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Null of Rope."""
    return q.new_zeros(q.shape), k.new_zeros(k.shape)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Null of SiluMul."""
    return gate_up.new_zeros(gate_up.shape[0], gate_up.shape[1] // 2)


def quantize_group(x: Tensor, group: int, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Null of QuantizeGroup."""
    q = torch.zeros(x.shape, dtype=torch.float8_e4m3fn)
    return q, torch.ones(x.shape[0], x.shape[1] // group, dtype=torch.float32)


def cache_write(cache: Tensor, latent: Tensor, k_rope: Tensor, slots: Tensor) -> None:
    """Null of CacheWrite."""


def cache_gather(
    cache: Tensor,
    page_table: Tensor,
    starts: Tensor,
    segs: Segments,
    kv_lora: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Null of CacheGather."""
    dense = torch.zeros(segs.total, cache.shape[-1], dtype=dtype)
    return dense[:, :kv_lora], dense[:, kv_lora:]


def cache_move(cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Null of CacheMove."""


def mla_prologue(
    q: Tensor,
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    cache: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Null of MlaPrologue."""
    tokens, kv_lora = kv.shape[0], norm_weight.shape[0]
    rope_dim = kv.shape[1] - kv_lora
    return (
        q.new_zeros(tokens, q.shape[1], rope_dim),
        kv.new_zeros(tokens, kv_lora),
        kv.new_zeros(tokens, rope_dim),
    )


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
    """Null of MhaPrefill."""
    return q.new_zeros(q.shape[0], q.shape[1], v.shape[2]), _zeros(q.shape[0], q.shape[1])


def merge_state(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Null of MergeState."""
    return out_a.new_zeros(out_a.shape), lse_a.new_zeros(lse_a.shape)


def index_prologue(
    q: Tensor,
    k: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    cache: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    """Null of IndexPrologue."""
    return q.new_zeros(q.shape, dtype=cache.dtype), _zeros(q.shape[0], q.shape[1])


def index_scores(
    q: Tensor, weights: Tensor, cache: Tensor, page_table: Tensor, owners: Tensor, lens: Tensor
) -> Tensor:
    """Null of IndexScores."""
    return _zeros(q.shape[0], page_table.shape[1] * cache.shape[1])


def index_select(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    page_table: Tensor,
    owners: Tensor,
    lens: Tensor,
    k: int,
) -> Tensor:
    """Null of IndexSelect: nothing is chosen."""
    return torch.full((q.shape[0], k), -1, dtype=torch.int32)


def index_topk(
    scores: Tensor, lens: Tensor, owners: Tensor, page_table: Tensor, page_size: int, k: int
) -> Tensor:
    """Null of IndexTopk: nothing is chosen."""
    return torch.full((scores.shape[0], k), -1, dtype=torch.int32)


def sparse_prefill(q: Tensor, cache: Tensor, slots: Tensor, kv_lora: int, scale: float) -> Tensor:
    """Null of SparseMla."""
    return q.new_zeros(q.shape[0], q.shape[1], kv_lora)


sparse_decode = sparse_prefill


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Null of RouterLogits."""
    return _zeros(x.shape[0], weight.shape[0])


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Null of Route: always the first experts."""
    tokens, k = logits.shape[0], routing.top_k + routing.shared
    ids = torch.arange(k, dtype=torch.int32).repeat(tokens, 1)
    return torch.full((tokens, k), 1.0 / k), ids


def lora_delta(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor) -> None:
    """Null of LoraDelta."""


def mask_logits(logits: Tensor, masks: Tensor, which: Tensor) -> Tensor:
    """Null of MaskLogits: nothing is forbidden."""
    return logits.clone()


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    """Null of Sample: the token at `uniform` of the way through the vocabulary."""
    return (uniform * logits.shape[1]).to(torch.int64)


def logprobs(logits: Tensor, ids: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Null of Logprobs."""
    rows = logits.shape[0]
    return _zeros(rows), _zeros(rows, top_n), torch.arange(top_n).repeat(rows, 1)


class NullLinear:
    """Null of Linear. The head gives junk that repeats, every other module zeros."""

    tag = "null.linear"

    def __init__(self, facts: Facts) -> None:
        self.out = facts.shape[0]
        self.junk: Tensor | None = None
        if facts.module == "lm_head":
            columns = torch.arange(self.out, dtype=torch.int64)
            self.junk = (columns * 2654435761 % 1009).to(torch.float32) / 1009

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        return Packed(self.tag, weight.shape, {}, 0)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        if self.junk is not None:
            return self.junk.to(x.dtype).repeat(x.shape[0], 1)
        return x.new_zeros(x.shape[0], self.out)


class NullExperts:
    """Null of Experts."""

    tag = "null.experts"

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def pack(self, source: ExpertSource, facts: Facts) -> Packed:
        return Packed(self.tag, (source.num_experts, source.hidden, source.intermediate), {}, 0)

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        return x.new_zeros(x.shape)


class NullMlaAbsorb:
    """Null of MlaAbsorb."""

    tag = "null.mla_absorb"

    def __init__(self, facts: Facts) -> None:
        self.dims = facts.dims

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        return Packed(self.tag, weight.shape, {}, 0)

    def expand(self, latent: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
        packed.expect(self.tag)
        tokens, heads = latent.shape[0], self.dims["heads"]
        k_nope = latent.new_zeros(tokens, heads, self.dims["qk_nope"])
        return k_nope, latent.new_zeros(tokens, heads, self.dims["v"])

    def apply_q(self, q_nope: Tensor, q_rope: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        width = self.dims["kv_lora"] + q_rope.shape[2]
        return q_nope.new_zeros(q_nope.shape[0], q_nope.shape[1], width)

    def apply_v(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        return x.new_zeros(x.shape[0], x.shape[1], self.dims["v"])


class NullMlaDecode:
    """Null of MlaDecode."""

    def __init__(self, facts: Facts) -> None:
        self.kv_lora = facts.dims["kv_lora"]

    def state(self, limits: Limits) -> None:
        return None

    def prepare(self, state: None, batch: Batch) -> None:
        return None

    def run(self, state: None, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        return q.new_zeros(q.shape[0], q.shape[1], self.kv_lora)


class NullMhaDecode(NullMlaDecode):
    """Null of MhaDecode."""

    def __init__(self, facts: Facts) -> None:
        self.v = facts.dims["v"]

    def run(  # type: ignore[override]
        self, state: None, q: Tensor, q_rope: Tensor, cache: Tensor, scale: float
    ) -> Tensor:
        return q.new_zeros(q.shape[0], q.shape[1], self.v)
