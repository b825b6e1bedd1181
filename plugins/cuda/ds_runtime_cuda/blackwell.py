"""What the CUDA plugin offers on compute capability 10 beside kernels.py. Torch-free.

Nobody could run it: ranks are by what the libraries say. Of two kernels for one format the one that
keeps the checkpoint's values comes first, the others are there for pins.
"""

from __future__ import annotations

from dataclasses import replace

from ds_runtime.api import RANK_PLATFORM, RANK_SPECIALISED, Change, Facts, Gate, Kernel
from ds_runtime_cuda.gates import (
    BF16,
    FP8,
    arch,
    blocks,
    expert_blocks,
    latent,
    library,
    most_heads,
    offer,
    pages,
    same_kv,
)

ARCHITECTURES = ("sm100", "sm103")
_HERE = arch(*ARCHITECTURES)
_NVFP4 = frozenset({"nvfp4"})
_MXFP8, _MXFP4 = frozenset({"mxfp8"}), frozenset({"mxfp4"})
_SHUFFLE = ("reorder_rows_for_gated_act_gemm", "shuffle_matrix_a", "shuffle_matrix_sf_a")
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
    op: str, fn: str, rank: int, formats: frozenset[str], *checks: Gate, numerics: str = ""
) -> Kernel:
    """A kernel of fp4's formats, whose adapter lies in flashinfer_fp4.py."""
    made = offer(op, f"flashinfer_fp4:{fn}", rank, _HERE, *checks, BF16, formats=formats)
    return replace(made, provider="flashinfer", numerics=numerics, keeps=formats)


def _packed(op: str, fn: str, *checks: Gate) -> Kernel:
    note = "scales are powers of two: others are rounded up, and codes with them"
    made = offer(
        op,
        f"deep_gemm_packed:{fn}",
        RANK_PLATFORM,
        _HERE,
        *checks,
        BF16,
        formats=FP8,
        note=note,
    )
    return replace(made, provider="deep_gemm")


def _sparse(op: str) -> Kernel:
    return offer(
        op,
        "flashinfer:sparse_mla",
        RANK_SPECIALISED,
        _HERE,
        library("flashinfer", "mla.trtllm_batch_decode_with_kv_cache_mla"),
        BF16,
        latent,
        most_heads,
        same_kv,
        pages(32, 64),
    )


_QUANTISE = library("flashinfer", "nvfp4_quantize", "block_scale_interleave", "gemm.mm_fp4")
_QUANTISE_MX = library("flashinfer", "mxfp8_quantize", "block_scale_interleave", "gemm.mm_mxfp8")

ATTENTION: tuple[Kernel, ...] = (_sparse("sparse_prefill"), _sparse("sparse_decode"))
MOE: tuple[Kernel, ...] = (
    _few_bits(
        "experts",
        "ExpertsNvfp4",
        RANK_SPECIALISED,
        _NVFP4,
        library("flashinfer", "nvfp4_quantize", _FP4_MOE, *_SHUFFLE),
        _tiles(128),
        numerics="mxfp4_w4a4",
    ),
    _few_bits(
        "experts",
        "ExpertsNvfp4Cutlass",
        RANK_PLATFORM,
        _NVFP4,
        library("flashinfer", "block_scale_interleave", "fused_moe.cutlass_fused_moe"),
        _tiles(128),
        numerics="mxfp4_w4a4",
    ),
    _few_bits(
        "experts",
        "ExpertsMxfp4",
        RANK_SPECIALISED,
        _MXFP4,
        library("flashinfer", "mxfp8_quantize", _FP4_MOE, *_SHUFFLE),
        _tiles(256),
        numerics="fp8_w8a8",
    ),
    _packed(
        "experts",
        "ExpertsFp8Packed",
        library("deep_gemm", "m_grouped_fp8_gemm_nt_contiguous"),
        expert_blocks,
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
    _packed("linear", "LinearFp8Packed", library("deep_gemm", "fp8_gemm_nt"), blocks(out=8)),
)
ALL = ATTENTION + MOE + LINEAR


def defaults(facts: Facts) -> list[Change]:
    """FP8 latents where attention is sparse and a library reads them."""
    read = "flash_mla.flash_mla_with_kvcache" in facts.device.features
    if facts.device.arch not in ARCHITECTURES or "index_topk" not in facts.dims or not read:
        return []
    why = "sparse attention reads chosen tokens one by one: fewer bytes, and twice the context"
    return [Change("kv_cache_dtype", "fp8", why)]
