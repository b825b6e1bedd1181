"""Random inputs of true sizes for every op that is called with tensors alone, and their work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_runtime_bench.ops import sparse_inputs, work
from ds_runtime_bench.ops.place import Place
from ds_runtime_bench.ops.work import Work

Inputs = tuple[tuple[Any, ...], Work]


def _rms_norm(p: Place, tokens: int) -> Inputs:
    args = (p.normal(tokens, p.width), p.normal(p.width), 1e-6)
    return args, work.rms_norm(p.width, p.facts.dtype, tokens)


def _add_rms_norm(p: Place, tokens: int) -> Inputs:
    x, residual = p.normal(tokens, p.width), p.normal(tokens, p.width)
    return (x, residual, p.normal(p.width), 1e-6), work.add_rms_norm(p.width, p.facts.dtype, tokens)


def _rms_norm_quantize(p: Place, tokens: int) -> Inputs:
    args = (p.normal(tokens, p.width), p.normal(p.width), 1e-6, _GROUP, False)
    return args, work.rms_norm_quantize(p.width, _GROUP, p.facts.dtype, tokens)


def _add_rms_norm_quantize(p: Place, tokens: int) -> Inputs:
    x, residual = p.normal(tokens, p.width), p.normal(tokens, p.width)
    args = (x, residual, p.normal(p.width), 1e-6, _GROUP, False)
    return args, work.add_rms_norm_quantize(p.width, _GROUP, p.facts.dtype, tokens)


def _silu_mul_quantize(p: Place, tokens: int) -> Inputs:
    args = (p.normal(tokens, 2 * p.width), _GROUP, False)
    return args, work.silu_mul_quantize(p.width, _GROUP, p.facts.dtype, tokens)


def _silu_mul(p: Place, tokens: int) -> Inputs:
    args = (p.normal(tokens, 2 * p.width),)
    return args, work.silu_mul(p.width, p.facts.dtype, tokens)


def _rope(p: Place, tokens: int) -> Inputs:
    heads, nope, d = (p.facts.dims[k] for k in ("heads", "qk_nope", "qk_rope"))
    q = p.normal(tokens, heads, nope + d)[..., nope:]
    args = (q, p.normal(tokens, d), p.positions(tokens), p.cos_sin(tokens))
    return args, work.rope(heads, d, p.facts.dtype, tokens)


def _slots(p: Place, tokens: int) -> tuple[Tensor, Tensor]:
    """A cache, and a free slot in it for each token."""
    return p.cache(-(-tokens // p.facts.page_size)), p.positions(tokens)


def _cache_write(p: Place, tokens: int) -> Inputs:
    cache, slots = _slots(p, tokens)
    lora, d = p.cached, p.facts.dims["qk_rope"]
    args = (cache, p.normal(tokens, lora), p.normal(tokens, d), slots)
    return args, work.cache_write(lora + d, p.facts.dtype, p.facts.kv_dtype, tokens)


def _cache_gather(p: Place, tokens: int) -> Inputs:
    lora, d = p.cached, p.facts.dims["qk_rope"]
    pages = -(-tokens // p.facts.page_size)
    table = torch.randperm(pages).to(torch.int32).unsqueeze(0).to(p.device)
    starts = torch.zeros(1, dtype=torch.int64, device=p.device)
    args = (p.cache(pages), table, starts, p.segments(tokens), lora, p.dtype)
    return args, work.cache_gather(lora + d, p.facts.dtype, p.facts.kv_dtype, tokens)


def _cache_move(p: Place, tokens: int) -> Inputs:
    """Each of `tokens` sequences keeps one entry."""
    cache, width = p.cache(-(-2 * tokens // p.facts.page_size)), p.cached + p.facts.dims["qk_rope"]
    slots = p.positions(2 * tokens).view(2, tokens, 1)
    made = work.cache_move(width, p.facts.kv_dtype, tokens)
    return (cache, slots[0], slots[1]), made


def _mla_prologue(p: Place, tokens: int) -> Inputs:
    dims = p.facts.dims
    heads, nope, d, lora = (dims[k] for k in ("heads", "qk_nope", "qk_rope", "kv_lora"))
    cache, slots = _slots(p, tokens)
    args = (
        p.normal(tokens, heads, nope + d),
        p.normal(tokens, lora + d),
        p.normal(lora),
        1e-6,
        p.positions(tokens),
        p.cos_sin(tokens),
        cache,
        slots,
    )
    return args, work.mla_prologue(heads, lora, d, p.facts.dtype, p.facts.kv_dtype, tokens)


def _mha_prefill(p: Place, tokens: int) -> Inputs:
    dims, segs = p.facts.dims, p.segments(tokens)
    heads, nope, rope, v = (dims[n] for n in ("heads", "qk_nope", "qk_rope", "v"))
    queries = p.normal(tokens, heads, nope), p.normal(tokens, heads, rope)
    keys = p.normal(tokens, heads, nope), p.normal(tokens, rope)
    args = (*queries, *keys, p.normal(tokens, heads, v), segs, segs, True, (nope + rope) ** -0.5)
    return args, work.mha_prefill(heads, nope, rope, v, p.facts.dtype, tokens)


def _mha_prefill_quantize(p: Place, tokens: int) -> Inputs:
    (*parts, segs, _, _, scale), _ = _mha_prefill(p, tokens)
    heads, nope, rope, v = (p.facts.dims[n] for n in ("heads", "qk_nope", "qk_rope", "v"))
    todo = work.mha_prefill_quantize(heads, nope, rope, v, p.facts.dtype, tokens)
    return (*parts, segs, scale, v, False), todo


def _merge_state(p: Place, tokens: int) -> Inputs:
    heads, v = p.facts.dims["heads"], p.facts.dims["v"]
    parts = [
        (p.normal(tokens, heads, v), p.normal(tokens, heads, dtype=torch.float32)) for _ in range(2)
    ]
    return (*parts[0], *parts[1]), work.merge_state(heads, v, p.facts.dtype, tokens)


def _route(p: Place, tokens: int) -> Inputs:
    assert p.routing is not None
    count = p.routing.num_experts
    bias = None
    if p.routing.method == "noaux_tc":
        bias = p.normal(count, dtype=torch.float32) * 0.05
    args = (p.normal(tokens, count, dtype=torch.float32), bias, p.routing)
    return args, work.route(count, p.routing.top_k, tokens)


def _embed(p: Place, tokens: int) -> Inputs:
    table = torch.zeros(p.vocab, p.facts.dims["hidden"], dtype=p.dtype, device=p.device)
    ids = torch.randint(p.vocab, (tokens,), device=p.device)
    return (ids, table, 0), work.embed(p.facts.dims["hidden"], p.facts.dtype, tokens)


def _quantize_group(p: Place, tokens: int) -> Inputs:
    width = p.facts.dims["hidden"]
    args = (p.normal(tokens, width), _GROUP, False)
    return args, work.quantize_group(width, _GROUP, p.facts.dtype, tokens)


def _sample(p: Place, tokens: int) -> Inputs:
    """Temperature alone, as most requests have it."""
    ones = torch.ones(tokens, device=p.device)
    none = torch.zeros(tokens, device=p.device)
    uniform = torch.rand(tokens, dtype=torch.float64, device=p.device)
    logits = p.normal(tokens, p.vocab, dtype=torch.float32)
    args = (logits, ones, none.to(torch.int32), ones, none, uniform)
    return args, work.sample(p.vocab, tokens)


def _mask_logits(p: Place, tokens: int) -> Inputs:
    logits = p.normal(tokens, p.vocab, dtype=torch.float32)
    masks = torch.full((tokens, -(-p.vocab // 32)), 0x5555, dtype=torch.int32, device=p.device)
    which = torch.arange(tokens, dtype=torch.int32, device=p.device)
    return (logits, masks, which), work.mask_logits(p.vocab, tokens)


def _lora_delta(p: Place, tokens: int) -> Inputs:
    out, cols = p.facts.shape
    rank, slots = _LORA
    adapters = torch.arange(tokens, device=p.device, dtype=torch.int32) % slots
    args = (
        p.normal(tokens, 1, out),
        p.normal(tokens, 1, cols),
        p.normal(1, slots, rank, cols),
        p.normal(1, slots, rank, out),
        adapters,
    )
    reached = min(slots, tokens)
    return args, work.lora_delta(out, cols, rank, reached, p.facts.dtype, tokens)


def _logprobs(p: Place, tokens: int) -> Inputs:
    logits = p.normal(tokens, p.vocab, dtype=torch.float32)
    args = (logits, torch.randint(p.vocab, (tokens,), device=p.device), 5)
    return args, work.logprobs(p.vocab, 5, tokens)


_GROUP = 128  # of activations that are quantised


_LORA = (16, 4)  # rank and slots of a measured adapter op


INPUTS: Mapping[str, Callable[[Place, int], Inputs]] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "rms_norm_quantize": _rms_norm_quantize,
    "add_rms_norm_quantize": _add_rms_norm_quantize,
    "silu_mul": _silu_mul,
    "silu_mul_quantize": _silu_mul_quantize,
    "rope": _rope,
    "cache_write": _cache_write,
    "cache_gather": _cache_gather,
    "cache_move": _cache_move,
    "mla_prologue": _mla_prologue,
    "mha_prefill": _mha_prefill,
    "mha_prefill_quantize": _mha_prefill_quantize,
    "merge_state": _merge_state,
    "route": _route,
    "embed": _embed,
    "quantize_group": _quantize_group,
    "sample": _sample,
    "mask_logits": _mask_logits,
    "lora_delta": _lora_delta,
    "logprobs": _logprobs,
    **sparse_inputs.INPUTS,
}
