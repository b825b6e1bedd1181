"""What a decode step and a prompt must at least move and compute, site by site. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ds_runtime.assembly.result import Assembly
from ds_runtime.description.config import ModelConfig
from ds_runtime.ops.binding.bind import site_facts
from ds_runtime.ops.contract import Facts, Kernel, Site
from ds_runtime.ops.contracts.work import Sizes
from ds_runtime.ops.declare import OpWork
from ds_runtime.ops.table import OPS


def as_read(work: OpWork, kernel: Kernel, facts: Facts) -> OpWork:
    """The work with the weights' bytes as `kernel` reads them, where it packs them tighter."""
    reads = kernel.footprint.reads
    share = 1.0 if reads is None else reads(facts)
    return replace(work, weights=share * work.weights)


def decode_step(
    sites: Iterable[Site], facts: Facts, tokens: int, context: int = 0
) -> dict[str, OpWork]:
    """A decode step of `tokens` sequences with `context` cached tokens each, by op."""
    found: dict[str, OpWork] = {}
    for site in sites:
        sizes = Sizes(facts=site_facts(facts, site), context=context, held=site.weight_format)
        cost = OPS[site.op].cost
        if cost is not None and (work := cost.of_step(sizes, tokens)).nbytes:
            name = "lm_head" if site.module == "lm_head" else site.op
            found[name] = found.get(name, OpWork()) + work
    return found


def step_bytes(
    assembly: Assembly, tokens: Sequence[int], context: int, only: Sequence[str] = ()
) -> dict[int, dict[str, OpWork]]:
    """What decode steps of so many sequences must read, by op; `only` these."""
    base = assembly.binding.base
    found: dict[int, dict[str, OpWork]] = {n: {} for n in tokens}
    for site, kernel in assembly.binding.choices:
        if kernel is None or (only and site.op not in only):
            continue
        for n, step in found.items():
            for name, whole in decode_step((site,), base, n, context).items():
                work = as_read(whole, kernel, site_facts(base, site))
                step[name] = step.get(name, OpWork()) + work
    return found


def prefill_flops(config: ModelConfig, tokens: int, tp: int = 1) -> float:
    """FLOPs of a prompt of `tokens` tokens on one of `tp` ranks, the head for its last only."""
    c, heads = config, config.heads // tp
    query = c.q_lora or 0
    per_token = heads * c.qk_head * (query or c.hidden) + query * c.hidden
    per_token += c.latent * c.hidden + heads * (c.qk_nope + c.v_head) * c.kv_lora
    per_token += c.hidden * heads * c.v_head
    total = 0.0
    for layer in range(c.layers):
        width: float = c.intermediate
        if c.is_moe(layer):
            top_k = c.routing.top_k if c.routing else 0
            width = (top_k + c.shared_experts) * c.moe_intermediate
            total += 2.0 * tokens * c.experts * c.hidden
        total += 2.0 * tokens * (per_token + 3 * width / tp * c.hidden)
        seen = tokens * (tokens + 1) / 2
        total += 2.0 * seen * heads * (c.qk_head + c.v_head)
    return total + 2.0 * math.ceil(c.vocab_size / tp) * c.hidden
