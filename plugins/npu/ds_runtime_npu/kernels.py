"""The npu plugin's whole offer on one page. Torch-free.

All of it is torch-npu's ops, whose schemas have been the same from 2.9 to 2.14. Nothing here ran
on an Ascend NPU.
"""

from __future__ import annotations

from ds_runtime.api import (
    RANK_PLATFORM,
    RANK_SPECIALISED,
    Facts,
    Footprint,
    Gate,
    Kernel,
    Layout,
    Provider,
    checks,
    gates,
)
from ds_runtime_npu.platform import TORCH_NPU

_DENSE, _INT8 = {"dense", "fp8_block"}, {"int8_channel"}
_WIDENED = "FP8 weights are held in the compute dtype: these chips multiply none"
_MOST_COLUMNS = 65535
_PROLOG_HIDDEN, _PROLOG_INNER = (6144, 7168, 7680), 1536
_INDEX_HEADS, _INDEX_DIM = 64, 128


def _bytes_per_token(facts: Facts) -> int:
    return 2 * (facts.dims["kv_lora"] + facts.dims["qk_rope"])


LATENT_SPLIT = Layout(
    name="latent_split",
    version=1,
    allocate="ds_runtime_npu.cache:allocate",
    bytes_per_token=_bytes_per_token,
    copy="ds_runtime_npu.cache:copy_blocks",
    export="ds_runtime_npu.cache:export_blocks",
    restore="ds_runtime_npu.cache:restore_blocks",
)


npu = Provider(
    "npu",
    "ds_runtime_npu",
    gates(checks.devices("ascend", "Ascend NPUs", "ascend910b", "ascend910_93"), TORCH_NPU.has()),
    layouts={"kv": LATENT_SPLIT.tag, "index": "index_pages.v1"},
    numerics={"int8_channel": "int8_w8a8"},
)


def _whole(multiple: int) -> Gate:
    """Both sides of every matrix in multiples, and none beyond what the ops index."""

    def check(facts: Facts) -> str | None:
        sides = facts.shape[-2:]
        odd = [n for n in sides if n % multiple]
        if odd:
            return f"needs sides in multiples of {multiple}, and {odd[0]} is none"
        wide = [n for n in sides if n > _MOST_COLUMNS]
        return f"takes at most {_MOST_COLUMNS} columns, not {wide[0]}" if wide else None

    return check


def _absorbs(facts: Facts) -> str | None:
    dims = facts.dims
    odd = [dims[n] for n in ("qk_nope", "v", "kv_lora") if dims.get(n, 0) % 16]
    return f"multiplies dims in multiples of 16, and {odd[0]} is none" if odd else None


def _prolog(facts: Facts) -> str | None:
    hidden, inner, heads = (facts.dims.get(n, 0) for n in ("hidden", "q_lora", "heads"))
    if hidden not in _PROLOG_HIDDEN or inner != _PROLOG_INNER:
        sizes = " or ".join(map(str, _PROLOG_HIDDEN))
        wanted = f"{sizes} hidden values and {_PROLOG_INNER} of the query latent"
        return f"made for {wanted}, not {hidden} and {inner}"
    if heads & (heads - 1) or heads > 128:
        return f"takes a power of two of heads up to 128, not {heads}"
    return None


def _indexer(facts: Facts) -> str | None:
    dims = facts.dims
    heads, dim, keep = (dims.get(f"index_{n}", 0) for n in ("heads", "dim", "topk"))
    if heads > _INDEX_HEADS or dim != _INDEX_DIM:
        wanted = f"up to {_INDEX_HEADS} index heads of {_INDEX_DIM} values"
        return f"takes {wanted}, not {heads} of {dim}"
    if not (keep <= 2048 or (keep <= 8192 and keep % 1024 == 0)):
        return f"keeps up to 2048 tokens, or multiples of 1024 up to 8192, not {keep}"
    return checks.same_index(facts)


_latents = checks.wide_latents("Ascend 910 multiplies no FP8, and its cache holds no FP8 latents")
_HALVES = checks.dtypes("bfloat16", "float16")
_PAGES = checks.page_multiples(16, most=1024, best=128)
_LATENT, _HEADS_192 = checks.latent(512, 64), checks.head_dims(128, 64, 128)
_CACHE = gates(_latents, _HALVES, checks.same_kv, _PAGES)
_MLA = gates(_latents, _HALVES, _LATENT, checks.heads(128), checks.same_kv, _PAGES)
ATTENTION: tuple[Kernel, ...] = (
    npu.offer(
        "mla_inputs",
        "inputs:MlaProlog",
        RANK_SPECIALISED,
        _latents,
        checks.dtypes("bfloat16"),
        _LATENT,
        _HEADS_192,
        _prolog,
        checks.same_kv,
        checks.page_sizes(16, 128),
        formats=_DENSE,
        note="keeps its own weights and those of prefill; --fusion mla_inputs=off frees them",
    ),
    npu.offer(
        "mla_decode",
        "attention:MlaDecode",
        RANK_SPECIALISED,
        _MLA,
        note="takes lengths from the host: captured, it is told them at each replay",
    ),
    npu.offer("index_select", "indexer:index_select", RANK_SPECIALISED, _HALVES, _indexer, _PAGES),
    npu.offer("sparse_prefill", "attention:sparse_mla", RANK_SPECIALISED, _MLA),
    npu.offer("sparse_decode", "attention:sparse_mla", RANK_SPECIALISED, _MLA),
    npu.offer("mha_prefill", "attention:mha_prefill", RANK_SPECIALISED, _HALVES, _HEADS_192),
    npu.offer("merge_state", "attention:merge_state", RANK_SPECIALISED, _HALVES),
    npu.offer(
        "mla_absorb",
        "attention:MlaAbsorb",
        RANK_SPECIALISED,
        _HALVES,
        _absorbs,
        formats=_DENSE,
        footprint=Footprint(copies=2),
        note=_WIDENED,
    ),
    npu.offer("cache_write", "cache:cache_write", RANK_SPECIALISED, _CACHE),
    npu.offer("cache_gather", "cache:cache_gather", RANK_SPECIALISED, _CACHE),
    npu.offer("cache_move", "cache:cache_move", RANK_PLATFORM, _CACHE),
)
MOE: tuple[Kernel, ...] = (
    npu.offer(
        "experts", "experts:ExpertsInt8", RANK_SPECIALISED, _HALVES, _whole(32), formats=_INT8
    ),
    npu.offer(
        "experts",
        "experts:Experts",
        RANK_SPECIALISED,
        _HALVES,
        _whole(16),
        formats=_DENSE,
        note=_WIDENED,
    ),
)
TOPK: tuple[Kernel, ...] = (
    npu.offer(
        "route",
        "experts:choose",
        RANK_SPECIALISED,
        note="routings that the op does not know in torch",
    ),
)
LINEAR: tuple[Kernel, ...] = (
    npu.offer("linear", "linear:LinearInt8", RANK_SPECIALISED, _HALVES, _whole(32), formats=_INT8),
    npu.offer("linear", "linear:LinearDense", RANK_PLATFORM, formats=_DENSE, note=_WIDENED),
)
SMALL: tuple[Kernel, ...] = (
    npu.offer("rms_norm", "small:rms_norm", RANK_SPECIALISED, _HALVES),
    npu.offer("add_rms_norm", "small:add_rms_norm", RANK_SPECIALISED, _HALVES),
    npu.offer("rope", "small:rope", RANK_SPECIALISED),
    npu.offer("silu_mul", "small:silu_mul", RANK_SPECIALISED, _HALVES),
)
OFFERS = (LATENT_SPLIT, *ATTENTION, *MOE, *TOPK, *LINEAR, *SMALL)
