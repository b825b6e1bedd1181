"""The ROCm plugin's whole offer on one page. Torch-free.

AITER and TileLang are adapters and providers of their own, so that pins may name them. What is
installed, and what this AITER exports, are features of the device (software.py). Nothing here ran
on an AMD GPU: ranks are by what SGLang and vLLM choose there.
"""

from __future__ import annotations

from ds_runtime.api import (
    RANK_PLATFORM,
    RANK_SPECIALISED,
    Facts,
    Kernel,
    Provider,
    checks,
    gates,
)
from ds_runtime_rocm.software import AITER, TILELANG

_FP8, _DENSE, _MXFP4 = {"fp8_block"}, {"dense"}, {"mxfp4"}
_INDEX = 128
_BLOCK, _GROUP = 128, 32
rocm, aiter, tilelang = (
    Provider(
        name,
        "ds_runtime_rocm",
        checks.devices("gfx", "AMD Instinct", "gfx942", "gfx950"),
        numerics={"fp8_block": "fp8_w8a8", "mxfp4": "mxfp4_w4a4"},
    )
    for name in ("rocm", "aiter", "tilelang")
)
_wide = checks.wide_latents("gfx942 multiplies e4m3fnuz, and FP8 latents are e4m3fn")


def _index_keys(facts: Facts) -> str | None:
    dim = facts.dims.get("index_dim", 0)
    return None if dim == _INDEX else f"made for index keys of {_INDEX} values, not {dim}"


def _latents(facts: Facts) -> str | None:
    return _wide(facts) if facts.device.arch == "gfx942" else None


def _prefill_heads(facts: Facts) -> str | None:
    heads = facts.dims.get("heads", 0)
    return None if heads <= 16 or heads == 128 else f"takes up to 16 heads, or 128, not {heads}"


_BF16, _HALVES = checks.dtypes("bfloat16"), checks.dtypes("bfloat16", "float16")
_LATENT = checks.latent(512, 64)
_MLA = gates(
    _latents,
    AITER.has("mla.mla_decode_fwd"),
    _BF16,
    _LATENT,
    checks.same_kv,
    checks.heads(128),
)
_SPARSE = gates(_latents, TILELANG.has(), _HALVES, _LATENT, checks.same_kv)
_MOE, _SHUFFLE = "fused_moe.fused_moe", "ops.shuffle.shuffle_weight"
_EXPONENTS = "utility.fp4_utils.e8m0_shuffle"

ATTENTION: tuple[Kernel, ...] = (
    aiter.offer("mla_decode", "aiter_mla:MlaDecode", RANK_SPECIALISED, _MLA),
    aiter.offer(
        "mla_decode",
        "aiter_mla:MlaVerify",
        RANK_SPECIALISED + 1,
        _latents,
        AITER.has("mla.mla_prefill_fwd"),
        _BF16,
        _LATENT,
        checks.same_kv,
        _prefill_heads,
        phases={"verify"},
        note="a sequence's queries read its tokens once",
    ),
    aiter.offer(
        "mha_prefill",
        "aiter_mla:mha_prefill",
        RANK_SPECIALISED,
        AITER.has("flash_attn_varlen_func"),
        _HALVES,
        checks.head_dims(128, 64, 128),
    ),
    aiter.offer("sparse_prefill", "aiter_mla:sparse_mla", RANK_PLATFORM, _MLA),
    aiter.offer("sparse_decode", "aiter_mla:sparse_mla", RANK_PLATFORM, _MLA),
    tilelang.offer("sparse_prefill", "tilelang_dsa:sparse_mla", RANK_SPECIALISED, _SPARSE),
    tilelang.offer("sparse_decode", "tilelang_dsa:sparse_mla", RANK_SPECIALISED, _SPARSE),
    tilelang.offer(
        "index_scores",
        "tilelang_dsa:index_scores",
        RANK_SPECIALISED,
        TILELANG.has(),
        _HALVES,
        checks.same_index,
        _index_keys,
    ),
)
MOE: tuple[Kernel, ...] = (
    aiter.offer(
        "experts",
        "aiter_moe:ExpertsFp8",
        RANK_SPECIALISED,
        AITER.has(_MOE, _SHUFFLE),
        _BF16,
        checks.expert_widths(_BLOCK),
        formats=_FP8,
        note="in e4m3fnuz on gfx942: the same bits, twice the scale",
    ),
    aiter.offer(
        "experts",
        "aiter_moe:ExpertsMxfp4",
        RANK_SPECIALISED,
        checks.archs("gfx950"),
        AITER.has(_MOE, _SHUFFLE, _EXPONENTS),
        _BF16,
        checks.expert_widths(2 * _BLOCK),
        formats=_MXFP4,
        note="rounds activations to FP4, too",
    ),
    aiter.offer(
        "experts",
        "aiter_moe:ExpertsDense",
        RANK_SPECIALISED,
        AITER.has(_MOE, _SHUFFLE),
        _HALVES,
        checks.expert_widths(_GROUP),
        formats=_DENSE,
    ),
)
TOPK: tuple[Kernel, ...] = (
    aiter.offer(
        "route",
        "aiter_moe:route",
        RANK_SPECIALISED,
        AITER.has("biased_grouped_topk", "grouped_topk"),
        note="1, 2, 4 or 8 groups; other routings in torch",
    ),
)
LINEAR: tuple[Kernel, ...] = (
    aiter.offer(
        "linear",
        "aiter_gemm:LinearFp8",
        RANK_SPECIALISED,
        checks.archs("gfx942"),
        AITER.has("gemm_a8w8_blockscale", "per_group_quant_hip"),
        _BF16,
        checks.linear_groups(_BLOCK, 16),
        formats=_FP8,
        note="in e4m3fnuz: the same bits, twice the scale",
    ),
    aiter.offer(
        "linear",
        "aiter_gemm:LinearFp8Shuffled",
        RANK_SPECIALISED,
        checks.archs("gfx950"),
        AITER.has("gemm_a8w8_blockscale_bpreshuffle", "per_group_quant_hip", _SHUFFLE),
        _BF16,
        checks.linear_groups(_BLOCK, 16),
        formats=_FP8,
    ),
    aiter.offer(
        "linear",
        "aiter_gemm:LinearMxfp4",
        RANK_SPECIALISED,
        checks.archs("gfx950"),
        AITER.has("gemm_a4w4", "per_1x32_f4_quant_hip", _SHUFFLE, _EXPONENTS),
        _BF16,
        checks.linear_groups(_BLOCK, _GROUP),
        formats=_MXFP4,
        note="rounds activations to FP4, too",
    ),
    rocm.offer("linear", "torch_ops:LinearHipblas", RANK_PLATFORM, formats=_DENSE),
)
OFFERS = ATTENTION + MOE + TOPK + LINEAR
