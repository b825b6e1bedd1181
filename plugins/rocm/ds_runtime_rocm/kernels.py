"""The ROCm plugin's whole offer on one page. Torch-free.

AITER and TileLang are adapters and providers of their own, so that pins may name them. What is
installed, and what this AITER exports, are features of the device (software.py). Nothing here ran
on an AMD GPU: ranks are by what SGLang and vLLM choose there.
"""

from __future__ import annotations

from ds_runtime.api import (
    FP8_GROUPS,
    OPS,
    RANK_PLATFORM,
    RANK_SPECIALISED,
    Facts,
    Fixable,
    Gate,
    Kernel,
    checks,
    gates,
)
from ds_runtime_rocm.software import INSTALL, INSTALL_TILELANG

_FP8, _DENSE, _MXFP4 = frozenset({"fp8_block"}), frozenset({"dense"}), frozenset({"mxfp4"})
_LAYOUTS = {
    "": frozenset[str](),
    "kv": frozenset({"latent_pages.v1"}),
    "index": frozenset({"index_pages.v1"}),
}
# The version of the contract that each op's kernels are written for; else 1.
_CONTRACTS = {"mha_prefill": 2, "mla_decode": 2, "route": 2}
_NUMERICS = {_FP8: "fp8_w8a8", _MXFP4: "mxfp4_w4a4"}
_INDEX = 128
_BLOCK, _GROUP = 128, 32
_FP8_LATENTS = frozenset({"float8_e4m3fn", FP8_GROUPS})
_ARCHS = ("gfx942", "gfx950")


def _gpu(facts: Facts) -> str | None:
    arch = facts.device.arch
    if not arch.startswith("gfx"):
        return f"runs on AMD Instinct, not on {facts.device.family}"
    return None if arch in _ARCHS else f"made for {' and '.join(_ARCHS)}, not for {arch}"


def _aiter(*functions: str) -> Gate:
    def check(facts: Facts) -> str | None:
        features = facts.device.features
        if "aiter:other" in features:
            said = "the installed aiter is PyPI's, an async iterator"
            return Fixable(said, f"pip uninstall aiter, and {INSTALL}")
        if "aiter" not in features:
            return Fixable("amd-aiter is not installed", INSTALL)
        missing = [f for f in functions if f"aiter.{f}" not in features]
        if missing:
            return Fixable(f"the installed aiter has no {', '.join(missing)}", INSTALL)
        return None

    return check


def _tilelang(facts: Facts) -> str | None:
    if "tilelang" in facts.device.features:
        return None
    return Fixable("tilelang is not installed", INSTALL_TILELANG)


def _same_index(facts: Facts) -> str | None:
    if facts.index_dtype == facts.dtype:
        return None
    said = f"reads index keys of the compute dtype {facts.dtype}, not {facts.index_dtype}"
    return Fixable(said, f"pass --index-cache-dtype {facts.dtype}")


def _index_keys(facts: Facts) -> str | None:
    dim = facts.dims.get("index_dim", 0)
    return None if dim == _INDEX else f"made for index keys of {_INDEX} values, not {dim}"


def _latents(facts: Facts) -> str | None:
    if facts.device.arch == "gfx942" and facts.kv_dtype in _FP8_LATENTS:
        said = "gfx942 multiplies e4m3fnuz, and FP8 latents are e4m3fn"
        return Fixable(said, "pass --kv-cache-dtype auto")
    return None


def _prefill_heads(facts: Facts) -> str | None:
    heads = facts.dims.get("heads", 0)
    return None if heads <= 16 or heads == 128 else f"takes up to 16 heads, or 128, not {heads}"


def _offer(
    op: str,
    fn: str,
    rank: int,
    *each: Gate,
    formats: frozenset[str] = frozenset(),
    phases: frozenset[str] = frozenset({"prefill", "decode", "verify"}),
    note: str = "",
) -> Kernel:
    provider = fn.partition(":")[0].partition("_")[0]
    return Kernel(
        op=OPS[op],
        fn=f"ds_runtime_rocm.{fn}",
        provider="rocm" if provider == "torch" else provider,
        rank=rank,
        refuse=gates(_gpu, *each),
        formats=formats,
        layouts=_LAYOUTS[OPS[op].layout],
        phases=phases,
        contract=_CONTRACTS.get(op, 1),
        note=note,
        numerics=_NUMERICS.get(formats, ""),
        keeps=formats - _DENSE,
    )


_BF16, _HALVES = checks.dtypes("bfloat16"), checks.dtypes("bfloat16", "float16")
_LATENT = checks.latent(512, 64)
_MLA = gates(
    _latents,
    _aiter("mla.mla_decode_fwd"),
    _BF16,
    _LATENT,
    checks.same_kv,
    checks.heads(128),
)
_SPARSE = gates(_latents, _tilelang, _HALVES, _LATENT, checks.same_kv)
_MOE, _SHUFFLE = "fused_moe.fused_moe", "ops.shuffle.shuffle_weight"
_EXPONENTS = "utility.fp4_utils.e8m0_shuffle"

ATTENTION: tuple[Kernel, ...] = (
    _offer("mla_decode", "aiter_mla:MlaDecode", RANK_SPECIALISED, _MLA),
    _offer(
        "mla_decode",
        "aiter_mla:MlaVerify",
        RANK_SPECIALISED + 1,
        _latents,
        _aiter("mla.mla_prefill_fwd"),
        _BF16,
        _LATENT,
        checks.same_kv,
        _prefill_heads,
        phases=frozenset({"verify"}),
        note="a sequence's queries read its tokens once",
    ),
    _offer(
        "mha_prefill",
        "aiter_mla:mha_prefill",
        RANK_SPECIALISED,
        _aiter("flash_attn_varlen_func"),
        _HALVES,
        checks.head_dims(128, 64, 128),
    ),
    _offer("sparse_prefill", "aiter_mla:sparse_mla", RANK_PLATFORM, _MLA),
    _offer("sparse_decode", "aiter_mla:sparse_mla", RANK_PLATFORM, _MLA),
    _offer("sparse_prefill", "tilelang_dsa:sparse_mla", RANK_SPECIALISED, _SPARSE),
    _offer("sparse_decode", "tilelang_dsa:sparse_mla", RANK_SPECIALISED, _SPARSE),
    _offer(
        "index_scores",
        "tilelang_dsa:index_scores",
        RANK_SPECIALISED,
        _tilelang,
        _HALVES,
        _same_index,
        _index_keys,
    ),
)
MOE: tuple[Kernel, ...] = (
    _offer(
        "experts",
        "aiter_moe:ExpertsFp8",
        RANK_SPECIALISED,
        _aiter(_MOE, _SHUFFLE),
        _BF16,
        checks.expert_widths(_BLOCK),
        formats=_FP8,
        note="in e4m3fnuz on gfx942: the same bits, twice the scale",
    ),
    _offer(
        "experts",
        "aiter_moe:ExpertsMxfp4",
        RANK_SPECIALISED,
        checks.archs("gfx950"),
        _aiter(_MOE, _SHUFFLE, _EXPONENTS),
        _BF16,
        checks.expert_widths(2 * _BLOCK),
        formats=_MXFP4,
        note="rounds activations to FP4, too",
    ),
    _offer(
        "experts",
        "aiter_moe:ExpertsDense",
        RANK_SPECIALISED,
        _aiter(_MOE, _SHUFFLE),
        _HALVES,
        checks.expert_widths(_GROUP),
        formats=_DENSE,
    ),
)
TOPK: tuple[Kernel, ...] = (
    _offer(
        "route",
        "aiter_moe:route",
        RANK_SPECIALISED,
        _aiter("biased_grouped_topk", "grouped_topk"),
        note="1, 2, 4 or 8 groups; other routings in torch",
    ),
)
LINEAR: tuple[Kernel, ...] = (
    _offer(
        "linear",
        "aiter_gemm:LinearFp8",
        RANK_SPECIALISED,
        checks.archs("gfx942"),
        _aiter("gemm_a8w8_blockscale", "per_group_quant_hip"),
        _BF16,
        checks.linear_groups(_BLOCK, 16),
        formats=_FP8,
        note="in e4m3fnuz: the same bits, twice the scale",
    ),
    _offer(
        "linear",
        "aiter_gemm:LinearFp8Shuffled",
        RANK_SPECIALISED,
        checks.archs("gfx950"),
        _aiter("gemm_a8w8_blockscale_bpreshuffle", "per_group_quant_hip", _SHUFFLE),
        _BF16,
        checks.linear_groups(_BLOCK, 16),
        formats=_FP8,
    ),
    _offer(
        "linear",
        "aiter_gemm:LinearMxfp4",
        RANK_SPECIALISED,
        checks.archs("gfx950"),
        _aiter("gemm_a4w4", "per_1x32_f4_quant_hip", _SHUFFLE, _EXPONENTS),
        _BF16,
        checks.linear_groups(_BLOCK, _GROUP),
        formats=_MXFP4,
        note="rounds activations to FP4, too",
    ),
    _offer("linear", "torch_ops:LinearHipblas", RANK_PLATFORM, formats=_DENSE),
)
