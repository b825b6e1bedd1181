"""The triton plugin's whole offer on one page: portable kernels, torch-free to decide.

They serve every device whose platform lists the feature "triton" (a Triton compiler makes code for
it). FP8 arithmetic is offered where the device multiplies float8_e4m3fn; elsewhere weights in FP8
blocks are converted to the compute dtype when they are packed. Weights of other formats stay as
they are (docs/formats.md).
"""

from __future__ import annotations

from functools import partial
from typing import Unpack

from ds_runtime.api import (
    DENSE_EXPERTS,
    DENSE_ROWS,
    FP8_EXPERTS,
    FP8_GROUPS,
    FP8_ROWS,
    RANK_PORTABLE,
    Compiles,
    Declared,
    Facts,
    Fixable,
    Footprint,
    Gate,
    Kernel,
    Promises,
    Provider,
    RowRange,
    checks,
    gates,
)
from ds_runtime_triton import workspace as held
from ds_runtime_triton.launch import MATRIX_LEAST, halves, pow2

FEATURE = "triton"
DTYPES = ("float32", "bfloat16", "float16")
FP8 = "float8_e4m3fn"
_SCALED_PAGES, _EXPANDED_PAGES = {"latent_fp8_groups.v1"}, {"expanded_pages.v1"}
_BOTH, _BLOCKS = {"dense", "fp8_block"}, {"fp8_block"}
_INT8, _W4AFP8 = {"int8_channel", "int8_block"}, {"w4afp8"}
_GROUPED = {"int8_group", "int4_group", "mxfp8", "mxfp4", "nvfp4"}
_CODED = _GROUPED | _W4AFP8 | {"fp8_channel", "fp8_tensor"}
_MAX_HEAD = 256  # of a query or value head that prefill keeps on chip
_MAX_LATENT, _MAX_ROPE = 512, 128  # of a cached token that decode keeps on chip


def _compiles(facts: Facts) -> str | None:
    device = facts.device
    if FEATURE not in device.features:
        return f"no Triton that makes code for {device.family}, as {device.name}, is installed"
    return None


def _dtype(facts: Facts) -> str | None:
    if facts.dtype not in DTYPES:
        return f"computes in {', '.join(DTYPES)}, not {facts.dtype}"
    return None


def _kv_dtype(facts: Facts) -> str | None:
    if facts.kv_dtype not in (facts.dtype, FP8):
        return f"the cache holds {facts.dtype} or {FP8} rows, not {facts.kv_dtype}"
    if facts.kv_dtype == FP8 and FP8 not in facts.device.fast_dtypes:
        return Fixable(f"{facts.device.name} does not convert {FP8}", "pass --kv-cache-dtype auto")
    return None


def _scaled_kv(facts: Facts) -> str | None:
    if facts.kv_dtype != FP8_GROUPS:
        return f"the cache holds {FP8_GROUPS} rows, not {facts.kv_dtype}"
    if FP8 not in facts.device.fast_dtypes:
        return Fixable(f"{facts.device.name} does not convert {FP8}", "pass --kv-cache-dtype auto")
    latent, rope = facts.dims.get("kv_lora", 0), facts.dims.get("qk_rope", 0)
    if latent % 4 or rope % 2:
        return f"needs parts of whole 4 bytes per token, and {latent} and {rope} values are none"
    return None


def _index_dtype(facts: Facts) -> str | None:
    if facts.index_dtype not in (facts.dtype, FP8):
        return f"index keys are {facts.dtype} or {FP8}, not {facts.index_dtype}"
    if facts.index_dtype == FP8 and FP8 not in facts.device.fast_dtypes:
        said = f"{facts.device.name} does not multiply {FP8}"
        return Fixable(said, f"pass --index-cache-dtype {facts.dtype}")
    return None


def _index_width(facts: Facts) -> str | None:
    d, least = facts.dims.get("index_dim", 0), 32 if facts.index_dtype == FP8 else 16
    if d < least or d > _MAX_HEAD or d & (d - 1):
        return f"takes index keys of {least} to {_MAX_HEAD} values, a power of two, not {d}"
    return None


def _index_sums(facts: Facts) -> str | None:
    if facts.dtype == "float32" and facts.index_dtype == FP8:
        said = f"matrix units sum products of {FP8} in fewer bits than float32 has"
        return Fixable(said, "pass --index-cache-dtype float32")
    return None


def _tokens_on_chip(facts: Facts) -> str | None:
    latent, rope = facts.dims.get("kv_lora", 0), facts.dims.get("qk_rope", 0)
    if latent > _MAX_LATENT or rope > _MAX_ROPE:
        most = f"at most {_MAX_LATENT} latent and {_MAX_ROPE} rotated values per token"
        return f"keeps {most} on chip, not {latent} and {rope}"
    return None


def _heads_on_chip(facts: Facts) -> str | None:
    nope, rope = facts.dims.get("qk_nope", 0), facts.dims.get("qk_rope", 0)
    d_v = facts.dims.get("v", 0)
    both = sum(halves(nope)) + pow2(rope, MATRIX_LEAST)
    if max(both, d_v) > _MAX_HEAD:
        padded = f"{nope} + {rope} (as {both})"
        return f"keeps head dims up to {_MAX_HEAD} on chip, not {padded} and {d_v}"
    return None


def _converts_fp8(facts: Facts) -> str | None:
    if FP8 not in facts.device.fast_dtypes:
        return f"{facts.device.name} does not convert to {FP8}"
    return None


def _rounds(facts: Facts) -> str | None:
    if facts.dtype == "float32":
        return "float32 asks for products without rounding; this kernel rounds activations"
    return None


_latent = gates(_tokens_on_chip, _kv_dtype)
_scaled = gates(_tokens_on_chip, _scaled_kv)
_quantises = gates(_rounds, _converts_fp8)
_fp8 = gates(checks.multiplies(FP8), _rounds)
_index = gates(_index_dtype, _index_width)
triton = Provider(
    "triton",
    "ds_runtime_triton",
    phases={"prefill", "decode", "verify", "tree"},
    numerics={"fp8_block": "fp8_w8a8", "w4afp8": "fp8_w8a8"},
)


def _offer(
    op: str,
    fn: str,
    *each: Gate,
    rank: int = RANK_PORTABLE,
    variant: str = "",
    **declared: Unpack[Declared],
) -> Kernel:
    says: Declared = {"compiles": Compiles("", "rehearsal:rehearsal", variant), **declared}
    return triton.offer(op, fn, rank, *each, _compiles, _dtype, **says)


_OWN = Promises(batch_invariant=True)  # no program sees two rows, or all sum in one order
_ANY_PART = Promises(skips_absent=True)  # experts of other ranks are left out
_OWN_ANY_PART = Promises(batch_invariant=True, skips_absent=True)
_OWN_CODED = Promises(batch_invariant=True, skips_absent=True, takes_codes=True)
_own = partial(_offer, promises=_OWN)
_keeping = partial(_offer, rank=RANK_PORTABLE + 1)  # of weights that stay as they are


_SPARSE = (
    ("sparse_mla", _latent, {"latent_pages.v1"}),
    ("scaled_sparse_mla", _scaled, _SCALED_PAGES),
)
ATTENTION: tuple[Kernel, ...] = (
    _offer("mha_prefill", "mha:mha_prefill", _heads_on_chip, variant="mha:variant"),
    _offer("merge_state", "small:merge_state"),
    _own(
        "mla_decode",
        "mla:mla_decode",
        _latent,
        footprint=Footprint(workspace=held.mla_decode),
        variant="mla:variant",
    ),
    _offer(
        "mha_decode",
        "expanded:mha_decode",
        _heads_on_chip,
        _kv_dtype,
        layouts=_EXPANDED_PAGES,
        variant="expanded:variant",
    ),
    _own(
        "mla_absorb",
        "absorb:mla_absorb",
        formats=_BOTH,
        footprint=Footprint(keeps=frozenset(_BLOCKS)),
        rows=RowRange(FP8_ROWS),
        variant="absorb:variant",
    ),
    _own("mla_prologue", "cache:mla_prologue", _kv_dtype),
    _offer("cache_write", "cache:cache_write", _kv_dtype),
    _offer("cache_write", "expanded:expanded_write", _kv_dtype, layouts=_EXPANDED_PAGES),
    _offer("cache_gather", "cache:cache_gather", _kv_dtype),
    _offer("cache_move", "cache:cache_move", _kv_dtype),
    _offer("cache_write", "scaled:scaled_cache_write", _scaled_kv, layouts=_SCALED_PAGES),
    _offer("cache_gather", "scaled:scaled_cache_gather", _scaled_kv, layouts=_SCALED_PAGES),
    _offer("cache_move", "scaled:scaled_cache_move", _scaled_kv, layouts=_SCALED_PAGES),
    _own("index_prologue", "index:index_prologue", _index),
    _offer(
        "index_scores", "index:index_scores", _index_sums, _index, variant="index:scores_variant"
    ),
    _own(
        "index_topk",
        "index:index_topk",
        footprint=Footprint(workspace=held.index_topk),
        variant="index:topk_variant",
    ),
    *(
        _offer(
            op,
            f"sparse:{fn}",
            fits,
            layouts=layouts,
            footprint=Footprint(workspace=held.sparse_mla),
            variant="sparse:variant",
        )
        for op in ("sparse_prefill", "sparse_decode")
        for fn, fits, layouts in _SPARSE
    ),
)
MOE: tuple[Kernel, ...] = (
    _keeping(
        "experts",
        "experts:experts_fp8",
        _fp8,
        formats=_BLOCKS,
        rows=RowRange(FP8_EXPERTS),
        promises=_OWN_CODED,
        variant="experts:fp8_variant",
    ),
    _keeping(
        "experts",
        "experts:experts_int8",
        _rounds,
        formats=_INT8,
        numerics="int8_w8a8",
        promises=_ANY_PART,
        variant="experts:int8_variant",
    ),
    _keeping(
        "experts",
        "coded_experts:experts_w4afp8",
        _fp8,
        formats=_W4AFP8,
        promises=_ANY_PART,
        variant="coded_experts:w4afp8_variant",
    ),
    _keeping(
        "experts",
        "coded_experts:experts_weight_only",
        formats=_CODED,
        promises=_ANY_PART,
        variant="coded_experts:weight_only_variant",
    ),
    _offer(
        "experts",
        "experts:experts_dense",
        formats=_BOTH,
        rows=RowRange(DENSE_EXPERTS),
        promises=_OWN_ANY_PART,
        variant="experts:dense_variant",
    ),
)
LINEAR: tuple[Kernel, ...] = (
    _keeping(
        "linear",
        "linear:linear_fp8",
        _fp8,
        formats=_BLOCKS,
        rows=RowRange(FP8_ROWS),
        promises=_OWN,
        variant="linear:fp8_variant",
    ),
    _keeping(
        "linear",
        "linear:linear_int8",
        _rounds,
        formats=_INT8,
        numerics="int8_w8a8",
        variant="linear:int8_variant",
    ),
    _keeping(
        "linear", "weight_only:linear_weight_only", formats=_CODED, variant="weight_only:variant"
    ),
    _offer(
        "linear",
        "linear:linear_dense",
        formats=_BOTH,
        rows=RowRange(DENSE_ROWS),
        promises=_OWN,
        variant="linear:dense_variant",
    ),
)
TOPK: tuple[Kernel, ...] = (
    _offer("router_logits", "router:router_logits", variant="router:variant"),
    _own("route", "router:route"),
)
SMALL: tuple[Kernel, ...] = (
    _own("embed", "small:embed"),
    _own("rms_norm", "norm:rms_norm"),
    _own("add_rms_norm", "norm:add_rms_norm"),
    _own("rms_norm_quantize", "norm:rms_norm_quantize", _quantises),
    _own("add_rms_norm_quantize", "norm:add_rms_norm_quantize", _quantises),
    _own("rope", "cache:rope"),
    _own("silu_mul", "small:silu_mul"),
    _own("silu_mul_quantize", "small:silu_mul_quantize", _quantises),
    _own("quantize_group", "quant:quantize_group", _converts_fp8, variant="quant:variant"),
    _own("lora_delta", "lora:lora_delta"),
    _own("mask_logits", "sampling:mask_logits"),
    _own("sample", "sampling:sample"),
    _own("logprobs", "sampling:logprobs"),
)
ALL = ATTENTION + MOE + LINEAR + TOPK + SMALL
# Beside these where rows must have bits of their own: functions that see no facts.
ORDERED: tuple[Kernel, ...] = (
    _own("router_logits", "router:router_logits_ordered"),
    _own("index_scores", "index:index_scores_ordered", _index_sums, _index),
    *(
        _own(
            "sparse_decode",
            f"sparse:{fn}_ordered",
            fits,
            layouts=layouts,
            footprint=Footprint(workspace=held.sparse_mla_ordered),
        )
        for fn, fits, layouts in _SPARSE
    ),
)


def offers(facts: Facts) -> tuple[Kernel, ...]:
    """What is offered there."""
    return ALL + ORDERED if facts.batch_invariant else ALL
