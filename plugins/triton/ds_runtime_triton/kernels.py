"""The triton plugin's whole offer on one page: portable kernels, torch-free to decide.

They serve every device whose platform lists the feature "triton" (a Triton compiler makes code for
it). FP8 arithmetic is offered where the device multiplies float8_e4m3fn; elsewhere weights in FP8
blocks are converted to the compute dtype when they are packed. Weights of other formats stay as
they are (docs/formats.md).
"""

from __future__ import annotations

from collections.abc import Callable

from ds_runtime.api import (
    DENSE_EXPERTS,
    DENSE_ROWS,
    FP8_EXPERTS,
    FP8_GROUPS,
    FP8_ROWS,
    OPS,
    RANK_PORTABLE,
    Facts,
    Fixable,
    Gates,
    Kernel,
    gates,
)
from ds_runtime_triton import workspace as held
from ds_runtime_triton.launch import MATRIX_LEAST, halves, pow2

PROVIDER = "triton"
FEATURE = "triton"
DTYPES = ("float32", "bfloat16", "float16")
FP8 = "float8_e4m3fn"
_LATENT_PAGES = frozenset({"latent_pages.v1"})
_SCALED_PAGES = frozenset({"latent_fp8_groups.v1"})
_EXPANDED_PAGES = frozenset({"expanded_pages.v1"})
_LAYOUTS = {"": frozenset[str](), "kv": _LATENT_PAGES, "index": frozenset({"index_pages.v1"})}
# The version of the contract that each op's kernels are written for; else 1.
_CONTRACTS = {"mha_prefill": 2, "mla_absorb": 2, "mla_decode": 2, "route": 2}
_BOTH = frozenset({"dense", "fp8_block"})
_BLOCKS = frozenset({"fp8_block"})
_INT8 = frozenset({"int8_channel", "int8_block"})
_W4AFP8 = frozenset({"w4afp8"})
_BY_ROW = frozenset({"fp8_channel", "fp8_tensor"})
_GROUPED = frozenset({"int8_group", "int4_group", "mxfp8", "mxfp4", "nvfp4"})
_CODED = _GROUPED | _W4AFP8 | _BY_ROW
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


def _multiplies_fp8(facts: Facts) -> str | None:
    if FP8 not in facts.device.fast_dtypes:
        return f"{facts.device.name} does not multiply {FP8}"
    return None


def _converts_fp8(facts: Facts) -> str | None:
    if FP8 not in facts.device.fast_dtypes:
        return f"{facts.device.name} does not convert to {FP8}"
    return None


def _rounds(facts: Facts) -> str | None:
    if facts.dtype == "float32":
        return "float32 asks for products without rounding; this kernel rounds activations"
    return None


_anywhere = gates(_compiles, _dtype)
_latent_pages = gates(_kv_dtype, _anywhere)
_mla_decode = gates(_tokens_on_chip, _latent_pages)
_mha_decode = gates(_heads_on_chip, _latent_pages)
_mha_prefill = gates(_heads_on_chip, _anywhere)
_converts = gates(_converts_fp8, _anywhere)
_quantises = gates(_rounds, _converts)
_int8 = gates(_rounds, _anywhere)
_fp8 = gates(_multiplies_fp8, _rounds, _anywhere)
_scaled_pages = gates(_scaled_kv, _anywhere)
_index_pages = gates(_index_dtype, _index_width, _anywhere)


def _offer(
    op: str,
    fn: str,
    refuse: Gates = _anywhere,
    note: str = "",
    layouts: frozenset[str] | None = None,
    workspace: Callable[[Facts, int], int] | None = None,
    packing: str = "",
) -> Kernel:
    return Kernel(
        op=OPS[op],
        fn=f"ds_runtime_triton.{fn}",
        provider=PROVIDER,
        rank=RANK_PORTABLE,
        refuse=refuse,
        formats=_BOTH if op in ("linear", "experts", "mla_absorb") else frozenset(),
        layouts=_LAYOUTS[OPS[op].layout] if layouts is None else layouts,
        contract=_CONTRACTS.get(op, 1),
        keeps=_BLOCKS if op == "mla_absorb" else frozenset(),
        phases=frozenset({"prefill", "decode", "verify", "tree"}),
        rehearsal="ds_runtime_triton.rehearsal:rehearsal",
        note=note,
        workspace=workspace,
        packing=packing,
    )


def _offer_sparse(op: str) -> tuple[Kernel, Kernel]:
    """Over latent_pages, and over latent_fp8_groups."""
    chosen, split = gates(_tokens_on_chip, _latent_pages), held.sparse_mla
    scaled = gates(_tokens_on_chip, _scaled_pages)
    return (
        _offer(op, "sparse:sparse_mla", chosen, workspace=split),
        _offer(op, "sparse:scaled_sparse_mla", scaled, layouts=_SCALED_PAGES, workspace=split),
    )


def _offer_kept(
    op: str,
    fn: str,
    formats: frozenset[str],
    refuse: Gates = _anywhere,
    numerics: str = "",
    packing: str = "",
) -> Kernel:
    """Of weights that stay as they are: one rank above the kernel that converts."""
    return Kernel(
        op=OPS[op],
        fn=f"ds_runtime_triton.{fn}",
        provider=PROVIDER,
        rank=RANK_PORTABLE + 1,
        refuse=refuse,
        formats=formats,
        keeps=formats,
        phases=frozenset({"prefill", "decode", "verify", "tree"}),
        rehearsal="ds_runtime_triton.rehearsal:rehearsal",
        numerics=numerics,
        packing=packing,
    )


ATTENTION: tuple[Kernel, ...] = (
    _offer("mha_prefill", "mha:mha_prefill", _mha_prefill),
    _offer("merge_state", "small:merge_state"),
    _offer("mla_decode", "mla:mla_decode", _mla_decode),
    _offer("mha_decode", "expanded:mha_decode", _mha_decode, layouts=_EXPANDED_PAGES),
    _offer("mla_absorb", "absorb:mla_absorb", packing=FP8_ROWS),
    _offer("mla_prologue", "cache:mla_prologue", _latent_pages),
    _offer("cache_write", "cache:cache_write", _latent_pages),
    _offer("cache_write", "expanded:expanded_write", _latent_pages, layouts=_EXPANDED_PAGES),
    _offer("cache_gather", "cache:cache_gather", _latent_pages),
    _offer("cache_move", "cache:cache_move", _latent_pages),
    _offer("cache_write", "scaled:scaled_cache_write", _scaled_pages, layouts=_SCALED_PAGES),
    _offer("cache_gather", "scaled:scaled_cache_gather", _scaled_pages, layouts=_SCALED_PAGES),
    _offer("cache_move", "scaled:scaled_cache_move", _scaled_pages, layouts=_SCALED_PAGES),
    _offer("index_prologue", "index:index_prologue", _index_pages),
    _offer("index_scores", "index:index_scores", gates(_index_sums, _index_pages)),
    _offer("index_topk", "index:index_topk", workspace=held.index_topk),
    *_offer_sparse("sparse_prefill"),
    *_offer_sparse("sparse_decode"),
)
MOE: tuple[Kernel, ...] = (
    _offer_kept("experts", "experts:experts_fp8", _BLOCKS, _fp8, "fp8_w8a8", FP8_EXPERTS),
    _offer_kept("experts", "experts:experts_int8", _INT8, _int8, "int8_w8a8"),
    _offer_kept("experts", "coded_experts:experts_w4afp8", _W4AFP8, _fp8, "fp8_w8a8"),
    _offer_kept("experts", "coded_experts:experts_weight_only", _CODED),
    _offer("experts", "experts:experts_dense", packing=DENSE_EXPERTS),
)
LINEAR: tuple[Kernel, ...] = (
    _offer_kept("linear", "linear:linear_fp8", _BLOCKS, _fp8, "fp8_w8a8", FP8_ROWS),
    _offer_kept("linear", "linear:linear_int8", _INT8, _int8, "int8_w8a8"),
    _offer_kept("linear", "weight_only:linear_weight_only", _CODED),
    _offer("linear", "linear:linear_dense", packing=DENSE_ROWS),
)
TOPK: tuple[Kernel, ...] = (
    _offer("router_logits", "router:router_logits"),
    _offer("route", "router:route"),
)
SMALL: tuple[Kernel, ...] = (
    _offer("embed", "small:embed"),
    _offer("rms_norm", "norm:rms_norm"),
    _offer("add_rms_norm", "norm:add_rms_norm"),
    _offer("rms_norm_quantize", "norm:rms_norm_quantize", _quantises),
    _offer("add_rms_norm_quantize", "norm:add_rms_norm_quantize", _quantises),
    _offer("rope", "cache:rope"),
    _offer("silu_mul", "small:silu_mul"),
    _offer("silu_mul_quantize", "small:silu_mul_quantize", _quantises),
    _offer("quantize_group", "quant:quantize_group", _converts),
    _offer("lora_delta", "lora:lora_delta"),
    _offer("mask_logits", "sampling:mask_logits"),
    _offer("sample", "sampling:sample"),
    _offer("logprobs", "sampling:logprobs"),
)
ALL = ATTENTION + MOE + LINEAR + TOPK + SMALL
