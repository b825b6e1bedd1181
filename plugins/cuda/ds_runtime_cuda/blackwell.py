"""What the CUDA plugin offers on compute capability 10 in addition to kernels.py. Torch-free.

Nobody could run it: ranks are by what the libraries say. Of two kernels for one format the one that
keeps the checkpoint's values comes first, the others are there for pins.
"""

from __future__ import annotations

from ds_runtime.api import (
    RANK_PLATFORM,
    RANK_SPECIALISED,
    Change,
    Facts,
    Fixable,
    Gate,
    Kernel,
    checks,
)
from ds_runtime_cuda.gates import (
    BF16,
    BLOCK,
    EXPERT_BLOCKS,
    FP8,
    HALVES,
    LATENT,
    arch,
    deep_gemm,
    flashinfer,
    flashinfer_cutlass,
    has,
    quantises,
)
from ds_runtime_cuda.software import DEEP_GEMM, FLASHINFER

ARCHITECTURES = ("sm100", "sm103")
_HERE = arch(*ARCHITECTURES)
_NVFP4 = {"nvfp4"}
_MXFP8, _MXFP4 = {"mxfp8"}, {"mxfp4"}
_SHUFFLE = ("reorder_rows_for_gated_act_gemm", "shuffle_matrix_a", "shuffle_matrix_sf_a")
_TRTLLM_MLA = has(FLASHINFER, "mla.trtllm_batch_decode_with_kv_cache_mla")
_CUTE_MOE, _CUTE_SCALES = "fused_moe.CuteDslMoEWrapper", "cute_dsl.convert_sf_to_mma_layout"
_FP4_MOE = "fused_moe.trtllm_fp4_block_scale_routed_moe"


def _tiles(cols: int, rows: int = 1) -> Gate:
    """Multiples that both dims of a weight, or of an expert's, must be of."""

    def check(facts: Facts) -> str | None:
        if not facts.shape:
            return None
        *_, out, wide = facts.shape
        if len(facts.shape) == 3:  # experts: both are inputs of one of the matmuls
            odd = [n for n in (out, wide) if n % cols]
            return f"needs multiples of {cols}, and {odd[0]} is none" if odd else None
        if wide % cols:
            return f"takes inputs in multiples of {cols}, not {wide}"
        return f"takes outputs in multiples of {rows}, not {out}" if out % rows else None

    return check


def _few_bits(
    op: str, fn: str, rank: int, formats: set[str], *each: Gate, numerics: str = ""
) -> Kernel:
    """A kernel of fp4's formats, whose adapter lies in flashinfer_fp4.py if `fn` says no other."""
    where = fn if ":" in fn else f"flashinfer_fp4:{fn}"
    each = (_HERE, *each, BF16)
    return flashinfer.offer(op, where, rank, *each, formats=formats, numerics=numerics)


def _packed(op: str, fn: str, *each: Gate) -> Kernel:
    note = "scales are powers of two: others are rounded up, and codes with them"
    return deep_gemm.offer(
        op,
        f"deep_gemm_packed:{fn}",
        RANK_PLATFORM,
        _HERE,
        *each,
        quantises,
        BF16,
        formats=FP8,
        note=note,
    )


def _fp8_kv(facts: Facts) -> str | None:
    if facts.kv_dtype == "float8_e4m3fn":
        return None
    said = f"reads a cache of float8_e4m3fn, not of {facts.kv_dtype}"
    return Fixable(said, "pass --kv-cache-dtype fp8")


def trtllm_heads(facts: Facts) -> str | None:
    """Of a rank: TensorRT-LLM's generated kernels know no number between the two."""
    heads = facts.dims.get("heads", 0)
    if heads <= 64 or heads == 128:
        return None
    return Fixable(f"takes up to 64 heads, or 128, not {heads}", "choose another --tp")


def _decode(fn: str, kv: Gate, note: str = "", numerics: str = "") -> Kernel:
    return flashinfer.offer(
        "mla_decode",
        f"flashinfer:{fn}",
        RANK_SPECIALISED,
        _HERE,
        _TRTLLM_MLA,
        BF16,
        LATENT,
        trtllm_heads,
        kv,
        checks.page_sizes(32, 64),
        note=note,
        numerics=numerics,
    )


def all_heads(facts: Facts) -> str | None:
    heads = facts.dims.get("heads", 0)
    if heads == 128:
        return None
    said = f"computes 128 heads of a rank, not {heads}"
    return Fixable(said, "pass --enable-dp-attention") if 0 < heads < 128 else said


_CUTLASS = flashinfer_cutlass.offer(
    "mla_decode",
    "flashinfer_cutlass:MlaDecode",
    RANK_PLATFORM,
    _HERE,
    has(FLASHINFER, "mla.BatchMLAPagedAttentionWrapper", "mla.MLAPlanMetadata"),
    HALVES,
    LATENT,
    all_heads,
    checks.same_kv,
    checks.page_sizes(32, 64),
    note="CUTLASS",
)


def _sparse(op: str) -> Kernel:
    return flashinfer.offer(
        op,
        "flashinfer:sparse_mla",
        RANK_SPECIALISED,
        _HERE,
        _TRTLLM_MLA,
        BF16,
        LATENT,
        trtllm_heads,
        checks.same_kv,
        checks.page_sizes(32, 64),
    )


_QUANTISE = has(FLASHINFER, "nvfp4_quantize", "block_scale_interleave", "gemm.mm_fp4")
_QUANTISE_MX = has(FLASHINFER, "mxfp8_quantize", "block_scale_interleave", "gemm.mm_mxfp8")

ATTENTION: tuple[Kernel, ...] = (
    _decode("MlaDecodeTrtllm", checks.same_kv),
    _decode(
        "MlaDecodeTrtllmFp8",
        _fp8_kv,
        note="queries are rounded to FP8, too",
        numerics="fp8_queries",
    ),
    _CUTLASS,
    _sparse("sparse_prefill"),
    _sparse("sparse_decode"),
)
MOE: tuple[Kernel, ...] = (
    _few_bits(
        "experts",
        "ExpertsNvfp4",
        RANK_SPECIALISED,
        _NVFP4,
        has(FLASHINFER, "nvfp4_quantize", _FP4_MOE, *_SHUFFLE),
        _tiles(128),
        numerics="mxfp4_w4a4",
    ),
    _few_bits(
        "experts",
        "ExpertsNvfp4Cutlass",
        RANK_PLATFORM,
        _NVFP4,
        has(FLASHINFER, "block_scale_interleave", "fused_moe.cutlass_fused_moe"),
        _tiles(128),
        numerics="mxfp4_w4a4",
    ),
    _few_bits(
        "experts",
        "flashinfer_cute:ExpertsNvfp4CuteDsl",
        RANK_PLATFORM,
        _NVFP4,
        has(FLASHINFER, "nvfp4_quantize", _CUTE_MOE, _CUTE_SCALES, "block_scale_interleave"),
        _tiles(128),
        numerics="mxfp4_w4a4",
    ),
    _few_bits(
        "experts",
        "ExpertsMxfp4",
        RANK_SPECIALISED,
        _MXFP4,
        has(FLASHINFER, "mxfp8_quantize", _FP4_MOE, *_SHUFFLE),
        _tiles(256),
        numerics="fp8_w8a8",
    ),
    _packed(
        "experts",
        "ExpertsFp8Packed",
        has(DEEP_GEMM, "m_grouped_fp8_gemm_nt_contiguous"),
        EXPERT_BLOCKS,
    ),
)
LINEAR: tuple[Kernel, ...] = (
    _few_bits(
        "linear",
        "LinearNvfp4",
        RANK_SPECIALISED,
        _NVFP4,
        _QUANTISE,
        _tiles(64, rows=32),
        numerics="mxfp4_w4a4",
    ),
    _few_bits(
        "linear",
        "LinearMxfp8",
        RANK_SPECIALISED,
        _MXFP8,
        _QUANTISE_MX,
        _tiles(128, rows=32),
        numerics="fp8_w8a8",
    ),
    _packed(
        "linear",
        "LinearFp8Packed",
        has(DEEP_GEMM, "fp8_gemm_nt"),
        checks.linear_groups(BLOCK, 8),
    ),
)
ALL = ATTENTION + MOE + LINEAR


def defaults(facts: Facts) -> list[Change]:
    """FP8 latents where attention is sparse and a library reads them. Shared experts apart where
    the routed ones, which are quantised then, go to a kernel that takes these in fours."""
    if facts.device.arch not in ARCHITECTURES:
        return []
    features, wishes = facts.device.features, list[Change]()
    fours = "flashinfer.fused_moe.trtllm_fp8_block_scale_routed_moe" in features
    if fours and facts.quantized:
        why = "TRT-LLM's kernels take experts in fours"
        wishes.append(Change("fusion", ("shared_experts=off",), why))
    if "index_topk" in facts.dims and "flash_mla.flash_mla_with_kvcache" in features:
        why = "sparse attention reads chosen tokens one by one: fewer bytes, and twice the context"
        wishes.append(Change("kv_cache_dtype", "fp8", why))
    return wishes
