"""The built-in plugin "reference": one torch kernel per op, the plain cache layout.

It enters through the same hooks as every plugin, at rank 0: what nobody else offers runs here.
Torch-free at import; the kernels are in the sibling files, one per area.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ds_runtime.common.hookimpl import hookimpl
from ds_runtime.ops.contract import FP8_GROUPS, RANK_REFERENCE, Dims, Facts, Kernel, Layout
from ds_runtime.ops.contracts.sparse import SCORES
from ds_runtime.ops.formats import FORMATS
from ds_runtime.ops.table import OPS

PROVIDER = "reference"
_OWNS_WEIGHTS = frozenset({"linear", "experts", "mla_absorb", "mla_inputs"})
_HOST_LOOPS = frozenset(  # references that read the device to decide what to do
    {"mla_decode", "mha_decode", "experts", "mha_prefill", "cache_gather", "sample", "logprobs"}
    | {"cache_write", "cache_move", "mla_prologue", "index_prologue", "index_scores"}
    | {"index_select", "mla_inputs", "mha_prefill_quantize"}
)
# A row's bits are its own. Where rows are summed, torch's order depends on how many there are.
_NO_SUMS = frozenset({"embed", "rope", "quantize_group"})
_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


def _bytes_per_token(facts: Facts) -> int:
    return (facts.dims["kv_lora"] + facts.dims["qk_rope"]) * _ITEM_BYTES[facts.kv_dtype]


LATENT_PAGES = Layout(
    name="latent_pages",
    version=1,
    allocate="ds_runtime.ops.reference.attention.cache:allocate_latent_pages",
    bytes_per_token=_bytes_per_token,
)


def expanded_width(dims: Dims) -> int:
    """Values of a token in `expanded_pages`."""
    return dims["heads"] * (dims["qk_nope"] + dims["v"]) + dims["qk_rope"]


def _expanded_bytes_per_token(facts: Facts) -> int:
    return expanded_width(facts.dims) * _ITEM_BYTES[facts.kv_dtype]


EXPANDED_PAGES = Layout(
    name="expanded_pages",
    version=1,
    allocate="ds_runtime.ops.reference.attention.expanded:allocate_expanded_pages",
    bytes_per_token=_expanded_bytes_per_token,
)


def _index_bytes_per_token(facts: Facts) -> int:
    """An FP8 key has a float32 scale."""
    d = facts.dims["index_dim"]
    fp8 = facts.index_dtype == "float8_e4m3fn"
    return d + 4 if fp8 else d * _ITEM_BYTES[facts.index_dtype]


INDEX_PAGES = Layout(
    name="index_pages",
    version=1,
    allocate="ds_runtime.ops.reference.attention.index:allocate_index_pages",
    bytes_per_token=_index_bytes_per_token,
)


def _scaled_bytes_per_token(facts: Facts) -> int:
    """FP8 latents, a float32 scale per 128 of them, keys in bfloat16."""
    kv_lora = facts.dims["kv_lora"]
    return kv_lora + 4 * -(-kv_lora // 128) + 2 * facts.dims["qk_rope"]


LATENT_FP8_GROUPS = Layout(
    name="latent_fp8_groups",
    version=1,
    allocate="ds_runtime.ops.reference.attention.scaled:allocate_latent_fp8_groups",
    bytes_per_token=_scaled_bytes_per_token,
)
_SCALED = {  # kernels of this layout: op → function
    "cache_write": "scaled_cache_write",
    "cache_gather": "scaled_cache_gather",
    "cache_move": "scaled_cache_move",
    "sparse_prefill": "scaled_sparse_mla",
    "sparse_decode": "scaled_sparse_mla",
}
_LAYOUTS = {"": frozenset[str](), "kv": frozenset({LATENT_PAGES.tag})}
_LAYOUTS["index"] = frozenset({INDEX_PAGES.tag})
_EXPANDED = frozenset({EXPANDED_PAGES.tag})
_ROWS = {  # ops on rows of any width, or of expanded keys and values: op → layouts
    **dict.fromkeys(("cache_write", "cache_gather", "cache_move"), _LAYOUTS["kv"] | _EXPANDED),
    "mha_decode": _EXPANDED,
}


def _refuse_kv_dtype(facts: Facts) -> str | None:
    if facts.kv_dtype in _ITEM_BYTES:
        return None
    return f"the cache holds {', '.join(_ITEM_BYTES)} rows, not {facts.kv_dtype}"


def _refuse_index_dtype(facts: Facts) -> str | None:
    if facts.index_dtype in _ITEM_BYTES:
        return None
    return f"index_pages holds {', '.join(_ITEM_BYTES)} keys, not {facts.index_dtype}"


def _accept(facts: Facts) -> str | None:
    return None


_GATES = {"": _accept, "kv": _refuse_kv_dtype, "index": _refuse_index_dtype}


def _offer(name: str) -> Kernel:
    op = OPS[name]
    return Kernel(
        op=op,
        fn=op.reference,
        provider=PROVIDER,
        rank=RANK_REFERENCE,
        refuse=_GATES[op.layout],
        formats=frozenset(FORMATS) if op.name in _OWNS_WEIGHTS else frozenset(),
        layouts=_ROWS.get(name, _LAYOUTS[op.layout]),
        phases=frozenset({"prefill", "decode", "verify", "tree"}),
        contract=op.version,
        graph_safe=op.name not in _HOST_LOOPS,
        batch_invariant=op.name in _NO_SUMS,
        source="ds_runtime.ops.reference",
    )


def _refuse_unscaled(facts: Facts) -> str | None:
    if facts.kv_dtype == FP8_GROUPS:
        return None
    return f"latent_fp8_groups holds {FP8_GROUPS} rows, not {facts.kv_dtype}"


def _offer_scaled(name: str, function: str) -> Kernel:
    return replace(
        _offer(name),
        fn=f"ds_runtime.ops.reference.attention.scaled:{function}",
        refuse=_refuse_unscaled,
        layouts=frozenset({LATENT_FP8_GROUPS.tag}),
    )


FP8_W8A8 = Kernel(
    op=OPS["linear"],
    fn="ds_runtime.ops.reference.matrices.linear:Fp8W8A8Linear",
    provider=PROVIDER,
    rank=RANK_REFERENCE - 1,  # below the plain reference: only a pin selects it
    formats=frozenset({"fp8_block"}),
    phases=frozenset({"prefill", "decode", "verify", "tree"}),
    note="FP8 arithmetic step by step, for comparing numerics; slow",
    source="ds_runtime.ops.reference",
    numerics="fp8_w8a8",
    keeps=frozenset({"fp8_block"}),
)

_KEYS = 20 * SCORES  # bytes: of each score two whole numbers, and a copy


def _topk_bytes(facts: Facts, rows: int) -> int:
    """At most: as many rows as are scored together have their keys."""
    return _KEYS


TOPK = replace(
    _offer("index_topk"),
    fn="ds_runtime.ops.reference.attention.index:topk",
    provider="torch",
    rank=RANK_REFERENCE - 1,  # only a pin selects it
    workspace=_topk_bytes,
)


@hookimpl
def ds_attention(facts: Facts) -> Sequence[Kernel | Layout]:
    names = (
        "mha_prefill",
        "mha_prefill_quantize",
        "merge_state",
        "mla_decode",
        "mha_decode",
        "mla_absorb",
        "mla_inputs",
        "mla_prologue",
        "cache_write",
        "cache_gather",
        "cache_move",
        "index_prologue",
        "index_select",
        "index_scores",
        "index_topk",
        "sparse_prefill",
        "sparse_decode",
    )
    scaled = [_offer_scaled(name, function) for name, function in _SCALED.items()]
    layouts = [LATENT_PAGES, EXPANDED_PAGES, INDEX_PAGES, LATENT_FP8_GROUPS]
    return [*layouts, *(_offer(name) for name in names), *scaled, TOPK]


@hookimpl
def ds_moe(facts: Facts) -> Sequence[Kernel]:
    return [_offer("experts")]


@hookimpl
def ds_topk(facts: Facts) -> Sequence[Kernel]:
    return [_offer("router_logits"), _offer("route")]


@hookimpl
def ds_ops(facts: Facts) -> Sequence[Kernel]:
    names = (
        "embed",
        "quantize_group",
        "lora_delta",
        "rms_norm",
        "add_rms_norm",
        "rms_norm_quantize",
        "add_rms_norm_quantize",
        "rope",
        "silu_mul",
        "silu_mul_quantize",
        "mask_logits",
        "sample",
        "logprobs",
    )
    return [_offer(name) for name in names]


@hookimpl
def ds_quant_loaders(facts: Facts) -> Sequence[Kernel]:
    return [_offer("linear"), FP8_W8A8]
