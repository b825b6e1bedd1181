"""How much memory one rank's weights take once packed: from sites alone. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ds_runtime.assembly.result import Assembly
from ds_runtime.config import EngineConfig
from ds_runtime.description.adapter import LoraPlan, adaptable_modules
from ds_runtime.description.config import ModelConfig
from ds_runtime.description.hybrid.config import SPARSE
from ds_runtime.description.sites import first_experts
from ds_runtime.description.tree import Ranks
from ds_runtime.errors import blaming
from ds_runtime.ops.binding.bind import Binding
from ds_runtime.ops.binding.facts import site_facts
from ds_runtime.ops.contract import Kernel, Site
from ds_runtime.ops.contracts.attention.absorbing import Absorbing
from ds_runtime.ops.contracts.attention.index import scored_rows
from ds_runtime.ops.formats import FORMATS
from ds_runtime.ops.table import OPS

_GROUP = 128  # columns that share a scale, of which kernels keep at most one per row
_FLOATS = {"router_logits", "hc_pre", "hc_head"}  # whose weights are in float32
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def packed_bytes(config: ModelConfig, binding: Binding, dtype: str, positions: int) -> int:
    """Bytes of one rank's packed weights, embedding, routers and rotation table.

    A kernel holds a weight in the compute dtype unless it keeps the format, as often as it says.
    Kernels that share the weight add the forms that they say. Padding is not counted; scales are,
    one per row and group of columns.
    """
    total: float = rotation_bytes(config, positions)
    for site, kernel, size in _sizes(binding, dtype):
        copies = 1.0
        if kernel is not None:
            copies = kernel.footprint.copies + second_form_of(binding, site, kernel)
        total += copies * size if site.weight_format else size
    return int(total)


def second_form_bytes(binding: Binding, dtype: str) -> dict[str, float]:
    """Bytes of one rank's second forms of weights, by op, of those that have any."""
    found: dict[str, float] = {}
    for site, kernel, size in _sizes(binding, dtype):
        if share := second_form_of(binding, site, kernel):
            found[site.op] = found.get(site.op, 0) + share * size
    return found


def saved_bytes(model: ModelConfig, binding: Binding, dtype: str) -> dict[str, float]:
    """Bytes that a decode step of one request reads less for second forms of weights, by op. Of
    routed experts it reads as many as one token chooses, of which each rank has its share."""
    found: dict[str, float] = {}
    for site, kernel, size in _sizes(binding, dtype):
        if share := second_form_of(binding, site, kernel):
            read = size
            if site.op == "experts":
                parts = binding.base.ranks.get("ep", 1)
                slots = site.shape[0] - model.experts // parts
                chosen = model.routing.top_k / parts if model.routing else 0
                read *= (chosen + slots) / site.shape[0]
            found[site.op] = found.get(site.op, 0) + (1 - share) * read
    return found


def _sizes(binding: Binding, dtype: str) -> Iterator[tuple[Site, Kernel | None, float]]:
    """(site, kernel, bytes of its weights, held once)."""
    for site, kernel in binding.choices:
        if not site.values or (kernel is None and OPS[site.op].optional):
            continue
        size: float = site.values * (4 if site.op in _FLOATS else ITEM_BYTES[dtype])
        if (
            kernel is not None
            and site.weight_format in kernel.keeps
            and site.weight_format in FORMATS
        ):
            cols = site.shape[-1]
            form = FORMATS[site.weight_format]
            group = min(form.block[1] or _GROUP, _GROUP)
            scales = site.values // cols * -(-cols // group) * form.scale_bytes
            size = site.values * form.bits / 8 + scales
        yield site, kernel, size


def second_form_of(binding: Binding, site: Site, kernel: Kernel | None) -> float:
    """What second forms of a site's weight take, as a share of it."""
    shares = binding.shares.get((site.op, site.layer, site.module))
    kernels = (kernel,) if shares is None else shares.kernels
    return sum(each.footprint.second_form for each in kernels if each is not None)


def rotation_bytes(config: ModelConfig, positions: int) -> int:
    """The rotation tables: float32 [positions, qk_rope]. Compressed entries have one of theirs."""
    return positions * config.qk_rope * 4 * (1 if config.hybrid is None else 2)


def page_table_bytes(assembly: Assembly) -> int:
    """What a decode kernel keeps for one step: an int32 per page of every running request, or of
    every token where each is a sequence of its own."""
    config = assembly.config
    pages = -(-positions_of(assembly) // config.page_size)
    return most_sequences(config) * pages * 4


def most_sequences(config: EngineConfig) -> int:
    """That decode kernels see in one step: with --batch-invariant a token of a prompt is one."""
    return config.max_step_tokens if config.batch_invariant else config.max_running_requests


def absorbing_of(assembly: Assembly) -> Absorbing | None:
    """Which chunks of prompts attend as decode does. None where attention has another form anyway,
    where drafts branch, and where a kernel does not promise `many_rows`."""
    config, model, binding = assembly.config, assembly.model, assembly.binding
    kernels = list[Kernel]()
    for site, kernel in binding.choices:
        if site.op == "mla_decode" and kernel is not None:
            shares = binding.shares.get((site.op, site.layer, site.module))
            kernels += (kernel,) if shares is None else shares.kernels
    if not kernels or model.indexing is not None or model.hybrid is not None or model.expanded:
        return None
    branch = config.speculative_algorithm is not None and (config.speculative_eagle_topk or 1) > 1
    if branch or config.batch_invariant:
        return None
    return Absorbing.of(assembly.facts.dims, kernels)


def most_absorbed(assembly: Assembly) -> int:
    """Tokens of prompts, at most, that one step attends as decode does."""
    rule, config = absorbing_of(assembly), assembly.config
    each = 0 if rule is None else rule.most(positions_of(assembly))
    return min(config.max_running_requests * each, config.max_step_tokens)


def decode_bytes(assembly: Assembly) -> int:
    """The most that a kernel of dense attention says it holds in a step besides what it returns.
    Each absorbed token is a row. A request has one that decodes, or these."""
    rows = max(most_sequences(assembly.config), most_absorbed(assembly))
    return _workspace(assembly, {"mla_decode": rows})


def _workspace(assembly: Assembly, rows: Mapping[str, int]) -> int:
    """The most that a kernel of these ops says it holds in a call of so many rows."""
    held = 0.0
    for site, kernel in assembly.binding.choices:
        if site.op in rows and kernel is not None and kernel.footprint.workspace is not None:
            further = "ds-runtime plugins --verbose says whose it is"
            with blaming(f"{kernel.name}: Footprint.workspace", further):
                said: Any = kernel.footprint.workspace(
                    site_facts(assembly.facts, site), rows[site.op]
                )
                if not isinstance(said, int | float) or not 0 <= said < math.inf:
                    raise TypeError(f"returned {said!r}: give bytes, at least 0")
            held = max(held, said)
    return int(held)


def sparse_bytes(assembly: Assembly) -> int:
    """What choosing tokens holds in one step. It is scores and choices of the rows that are scored
    together, and the most that a kernel of sparse attention says it holds besides them."""
    config, indexing = assembly.config, assembly.model.indexing
    if indexing is None:
        return 0
    width = -(-positions_of(assembly) // config.page_size) * config.page_size
    if assembly.model.hybrid is not None:  # it chooses among entries, not tokens
        width //= SPARSE
    rows = min(scored_rows(width), config.max_step_tokens)
    chosen = 2 * config.max_step_tokens * indexing.top_k * 4  # of groups, and joined
    groups = {"index_scores": rows, "index_topk": rows, "index_select": config.max_step_tokens}
    groups |= dict.fromkeys(("sparse_prefill", "sparse_decode"), config.max_step_tokens)
    return rows * width * 4 + chosen + _workspace(assembly, groups)


def activation_bytes(assembly: Assembly) -> int:
    """About what the widest moment of a step of `max_step_tokens` holds besides weights and caches.
    It is four hidden states, twice all residual streams if there are several, and what attention, a
    dense layer or the experts have at once, in the compute dtype. Experts: of every pair of a token
    and an expert a row in, a row out, gate | up and their product. Attention: queries, keys and
    values of all heads, and those of a chunk of cached tokens. Of tokens that are absorbed it is
    queries as they come, rotated and absorbed, and attended latents. That is all tokens with
    --batch-invariant, else `most_absorbed`. What sparse attention holds is `sparse_bytes`.
    """
    most = assembly.config.max_step_tokens
    if assembly.config.batch_invariant:  # nothing is expanded
        return step_bytes(assembly, most, most)
    found = step_bytes(assembly, most, most) + prefix_bytes(assembly)
    absorbed = most_absorbed(assembly)
    return max(found, step_bytes(assembly, most, most, absorbed)) if absorbed else found


def prefix_bytes(assembly: Assembly) -> int:
    """Of that, the bytes of cached tokens that are expanded at once, of --prefix-chunk."""
    config, dims = assembly.config, assembly.facts.dims
    if config.batch_invariant:  # nothing is expanded
        return 0
    expanded = dims["heads"] * (dims["qk_nope"] + dims["v"])
    return config.prefix_chunk * expanded * ITEM_BYTES[config.dtype]


def step_bytes(assembly: Assembly, tokens: int, every: int, absorbed: int = 0) -> int:
    """The same of a step that expands no cached tokens. tokens: of this rank's sequences;
    absorbed: those of them that are, all with --batch-invariant; every: those that go through what
    the ranks divide by width."""
    dims = assembly.facts.dims
    head, heads, hidden = dims["qk_nope"] + dims["qk_rope"], dims["heads"], dims["hidden"]
    queries = heads * (head + dims["v"])  # and what they have attended
    attention = tokens * (queries + heads * (dims["qk_nope"] + dims["v"]))
    absorbed = tokens if assembly.config.batch_invariant else absorbed
    if absorbed:  # queries, their rotated part, the same absorbed, and latents
        attention = absorbed * heads * (head + 2 * (dims["kv_lora"] + dims["qk_rope"]))
        attention += (tokens - absorbed) * queries
    experts = dims["top_k"] * (2 * hidden + 3 * dims["moe_intermediate"])
    widest = max(attention, every * 3 * dims["intermediate"], every * experts)
    streams = 2 * dims.get("streams", 0)  # in front of a sublayer, and behind it
    return (tokens * (4 + streams) * hidden + widest) * ITEM_BYTES[assembly.config.dtype]


def positions_of(assembly: Assembly) -> int:
    """Positions that the rotation table covers: the context."""
    return assembly.config.context_length or assembly.model.max_positions


def needed_bytes(assembly: Assembly) -> int:
    """What one rank's packed weights will take."""
    config = assembly.config
    weights = packed_bytes(assembly.model, assembly.binding, config.dtype, positions_of(assembly))
    ranks = Ranks(assembly.mesh.tp, assembly.mesh.attn_tp, assembly.mesh.ep)
    return weights + lora_bytes(assembly.model, assembly.lora, config.dtype, ranks)


def lora_bytes(config: ModelConfig, lora: LoraPlan | None, dtype: str, ranks: Ranks) -> int:
    """Bytes of one rank's slots of low-rank adapters."""
    if lora is None:
        return 0
    adaptable = adaptable_modules(config, first_experts(config, ranks.experts)).items()
    total = sum(sum(s.local(ranks)) for module, s in adaptable if module in lora.modules)
    return total * lora.slots * lora.rank * ITEM_BYTES[dtype]
