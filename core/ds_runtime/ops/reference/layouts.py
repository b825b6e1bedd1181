"""The cache layouts of the references. Torch-free."""

from __future__ import annotations

from ds_runtime.ops.contract import FP4_KEYS, Dims, Facts
from ds_runtime.ops.kernel import Layout

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


def _bytes_per_token(facts: Facts) -> int:
    return (facts.dims["kv_lora"] + facts.dims["qk_rope"]) * ITEM_BYTES[facts.kv_dtype]


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
    return expanded_width(facts.dims) * ITEM_BYTES[facts.kv_dtype]


EXPANDED_PAGES = Layout(
    name="expanded_pages",
    version=1,
    allocate="ds_runtime.ops.reference.attention.expanded:allocate_expanded_pages",
    bytes_per_token=_expanded_bytes_per_token,
)


def _index_bytes_per_token(facts: Facts) -> int:
    """An FP8 key has a float32 scale, one in FP4 a byte for every 32 numbers."""
    d = facts.dims["index_dim"]
    if facts.index_dtype == FP4_KEYS:
        return d // 2 + d // 32
    fp8 = facts.index_dtype == "float8_e4m3fn"
    return d + 4 if fp8 else d * ITEM_BYTES[facts.index_dtype]


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
