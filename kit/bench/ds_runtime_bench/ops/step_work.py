"""What a decode step and a prompt must at least move and compute, site by site. Torch-free.

`WORK` has a function for every op of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ds_runtime.description.config import ModelConfig
from ds_runtime.description.sites import model_sites
from ds_runtime.description.structure import HEAD
from ds_runtime.ops.contract import Facts, Site
from ds_runtime_bench.ops.sparse_work import (
    index_bytes,
    index_prologue,
    index_scores,
    index_select,
    index_topk,
    sparse_decode,
    sparse_prefill,
)
from ds_runtime_bench.ops.work import (
    ITEM_BYTES,
    Work,
    add_rms_norm,
    add_rms_norm_quantize,
    cache_gather,
    cache_move,
    cache_write,
    distinct_experts,
    embed,
    experts,
    linear,
    logprobs,
    lora_delta,
    mask_logits,
    merge_state,
    mha_decode,
    mha_prefill,
    mha_prefill_quantize,
    mla_absorb,
    mla_decode,
    mla_inputs,
    mla_prologue,
    quantize_group,
    rms_norm,
    rms_norm_quantize,
    rope,
    route,
    router_logits,
    sample,
    silu_mul,
    silu_mul_quantize,
)

WORK: Mapping[str, Callable[..., Work]] = {
    f.__name__: f
    for f in (
        embed,
        rms_norm,
        add_rms_norm,
        rope,
        linear,
        quantize_group,
        rms_norm_quantize,
        add_rms_norm_quantize,
        silu_mul_quantize,
        lora_delta,
        cache_write,
        cache_gather,
        cache_move,
        mla_prologue,
        mla_absorb,
        mla_inputs,
        mha_prefill,
        mha_prefill_quantize,
        merge_state,
        mla_decode,
        mha_decode,
        index_prologue,
        index_scores,
        index_topk,
        index_select,
        silu_mul,
        router_logits,
        route,
        experts,
        mask_logits,
        sample,
        logprobs,
    )
} | {"sparse_prefill": sparse_prefill, "sparse_decode": sparse_decode}


def site_work(site: Site, facts: Facts, tokens: int, context: int) -> Work:
    """Weights and cache that a decode step of `tokens` sequences must read at one site.

    Activations are left out: they stay in caches between the ops of a step.
    """
    dims, dtype = facts.dims, facts.dtype
    if site.op == "linear":
        whole = linear(*_matrix(site), site.weight_format, dtype, tokens)
        return Work(whole.weights, flops=whole.flops)
    if site.op == "experts":
        count, inter, hidden = site.shape
        routed = dims["experts"]
        slots = count - routed  # of shared experts: every token takes them
        top_k = dims["top_k"] + slots
        reached = distinct_experts(routed, dims["top_k"], tokens) + (slots if tokens else 0)
        whole = experts(inter, hidden, site.weight_format, dtype, tokens, top_k, reached)
        return Work(whole.weights, flops=whole.flops)
    if site.op in ("mla_absorb", "router_logits"):
        item = ITEM_BYTES[dtype] if site.op == "mla_absorb" else ITEM_BYTES["float32"]
        return Work(site.values * item if tokens else 0, flops=2.0 * tokens * site.values)
    if site.op == "mla_inputs":  # the sites of its parts say it
        return Work()
    if site.op == "mla_decode":
        lens = (context,) * tokens
        whole = mla_decode(
            dims["heads"], dims["kv_lora"], dims["qk_rope"], dtype, facts.kv_dtype, lens
        )
        cached = sum(lens) * (dims["kv_lora"] + dims["qk_rope"]) * ITEM_BYTES[facts.kv_dtype]
        return Work(reads=cached, flops=whole.flops)
    if site.op == "mha_decode":
        heads, nope, rope_dim = dims["heads"], dims["qk_nope"], dims["qk_rope"]
        lens = (context,) * tokens
        whole = mha_decode(heads, nope, rope_dim, dims["v"], dtype, facts.kv_dtype, lens)
        width = heads * (nope + dims["v"]) + rope_dim
        cached = tokens * context * width * ITEM_BYTES[facts.kv_dtype]
        return Work(reads=cached, flops=whole.flops)
    if site.op in ("index_scores", "index_select"):
        lens = (context,) * tokens
        whole = index_scores(dims["index_heads"], dims["index_dim"], facts.index_dtype, lens)
        cached = sum(lens) * index_bytes(dims["index_dim"], facts.index_dtype)
        return Work(reads=cached, flops=whole.flops)
    if site.op == "sparse_decode":
        lens = (min(context, dims["index_topk"]),) * tokens
        whole = sparse_decode(
            dims["heads"], dims["kv_lora"], dims["qk_rope"], dtype, facts.kv_dtype, lens
        )
        cached = sum(lens) * (dims["kv_lora"] + dims["qk_rope"]) * ITEM_BYTES[facts.kv_dtype]
        return Work(reads=cached, flops=whole.flops)
    return Work()


def decode_step(
    sites: Iterable[Site], facts: Facts, tokens: int, context: int = 0
) -> dict[str, Work]:
    """A decode step of `tokens` sequences with `context` cached tokens each, by op."""
    found: dict[str, Work] = {}
    for site in sites:
        work = site_work(site, facts, tokens, context)
        if work.nbytes:
            name = HEAD if site.module == HEAD else site.op
            found[name] = found.get(name, Work()) + work
    return found


def prefill_flops(config: ModelConfig, tokens: int, tp: int = 1) -> float:
    """FLOPs of a prompt of `tokens` tokens on one of `tp` ranks, the head for its last only."""
    c, heads, total = config, config.heads // tp, 0.0
    for site in model_sites(config, lambda module: "dense", tp):
        if site.op == "mha_prefill":
            total += mha_prefill(heads, c.qk_nope, c.qk_rope, c.v_head, c.dtype, tokens).flops
        elif site.op in ("linear", "mla_absorb", "router_logits", "experts"):
            rows: float = 1 if site.module == HEAD else tokens
            if site.op == "experts" and c.routing is not None:
                rows *= (c.routing.top_k + site.shape[0] - c.experts) / site.shape[0]
            total += 2.0 * rows * site.values
    return total


def _matrix(site: Site) -> tuple[int, int]:
    out, cols = site.shape
    return out, cols
