"""The CUDA plugin's offer on one page; blackwell.py has the other. Torch-free.

Each library is an adapter and a provider of its own, so that pins may name it. What is installed,
and which functions it exports, are features of the device (software.py); what is missing is refused
with the package's name. Ranks on compute capability 9.0 are by measurement (cuda_kernels.md and
sparse_attention.md in benchmarks/results): what was not faster than portable kernels, or was not
run, stays behind them. On capability 10, which nobody could run, they are by what the libraries
say.
"""

from __future__ import annotations

from ds_runtime.api import (
    FP8_EXPERTS,
    FP8_ROWS,
    RANK_PLATFORM,
    RANK_PORTABLE,
    RANK_REFERENCE,
    RANK_SPECIALISED,
    Kernel,
)
from ds_runtime_cuda.gates import (
    BF16,
    DENSE,
    FP8,
    HALVES,
    INDEX_PAGES,
    SCALED_PAGES,
    arch,
    blocks,
    expert_blocks,
    fp8_keys,
    heads_192,
    latent,
    library,
    most_heads,
    multiplies_fp8,
    offer,
    pages,
    same_kv,
    scaled_kv,
    sixteen_bytes,
)

RANK_BEHIND = (RANK_REFERENCE + RANK_PORTABLE) // 2  # before references, behind portable kernels


_FA3 = library("sgl_kernel", "flash_attn.flash_attn_varlen_func")
_FA3_KV = library("sgl_kernel", "flash_attn.flash_attn_with_kvcache")
_TRTLLM_MLA = library("flashinfer", "mla.trtllm_batch_decode_with_kv_cache_mla")
_TRTLLM_MOE = library("flashinfer", "fused_moe.trtllm_fp8_block_scale_routed_moe")
_FLASH_MLA = library("flash_mla", "flash_mla_with_kvcache", "get_mla_decoding_metadata")
_SPARSE = library("flash_mla", "flash_mla_sparse_fwd")
_SCALED = library("flash_mla", "flash_mla_with_kvcache", "get_mla_metadata")
_MQA_LOGITS = library(
    "deep_gemm", "fp8_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata"
)


def _sparse(op: str) -> tuple[Kernel, Kernel]:
    """FlashMLA over bfloat16 pages, and over FP8 groups."""
    here, common = arch("sm90", "sm100"), (BF16, latent, most_heads)
    plain = offer(op, "flash_mla:sparse_mla", RANK_PLATFORM, here, _SPARSE, *common, same_kv)
    scaled = offer(
        op,
        "flash_mla:scaled_sparse_mla",
        RANK_PLATFORM,
        here,
        _SCALED,
        *common,
        scaled_kv,
        pages(64),
        layouts=SCALED_PAGES,
    )
    return plain, scaled


ATTENTION: tuple[Kernel, ...] = (
    *_sparse("sparse_prefill"),
    *_sparse("sparse_decode"),
    offer(
        "index_scores",
        "deep_gemm:index_scores",
        RANK_PLATFORM,
        arch("sm90"),
        _MQA_LOGITS,
        HALVES,
        fp8_keys,
        pages(64),
        layouts=INDEX_PAGES,
    ),
    offer(
        "mla_decode",
        "flashinfer:MlaDecodeTrtllm",
        RANK_SPECIALISED,
        arch("sm100", "sm103"),
        _TRTLLM_MLA,
        BF16,
        latent,
        same_kv,
        pages(32, 64),
    ),
    offer(
        "mla_decode",
        "sgl_kernel:MlaDecode",
        RANK_BEHIND,
        arch("sm90"),
        _FA3_KV,
        HALVES,
        latent,
        same_kv,
        note="FlashAttention 3",
    ),
    offer(
        "mla_decode",
        "flash_mla:MlaDecode",
        RANK_PLATFORM,
        arch("sm90"),
        _FLASH_MLA,
        HALVES,
        latent,
        same_kv,
        pages(64),
    ),
    offer(
        "mla_decode",
        "flashinfer:MlaDecode",
        RANK_BEHIND,
        library("flashinfer", "mla.BatchMLAPagedAttentionWrapper"),
        HALVES,
        latent,
        same_kv,
        note="planned on the host before every step",
    ),
    offer(
        "mha_prefill",
        "sgl_kernel:mha_prefill",
        RANK_BEHIND,
        arch("sm90"),
        _FA3,
        HALVES,
        heads_192,
        note="FlashAttention 3",
    ),
    offer(
        "mha_prefill",
        "flashinfer:mha_prefill",
        RANK_BEHIND,
        library("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper"),
        HALVES,
        heads_192,
        graph_safe=False,
    ),
)
MOE: tuple[Kernel, ...] = (
    offer(
        "experts",
        "flashinfer:ExpertsTrtllm",
        RANK_SPECIALISED,
        arch("sm100", "sm103"),
        _TRTLLM_MOE,
        BF16,
        expert_blocks,
        formats=FP8,
    ),
    offer(
        "experts",
        "deep_gemm:ExpertsFp8",
        RANK_BEHIND,
        arch("sm90"),
        library("deep_gemm", "m_grouped_fp8_gemm_nt_contiguous"),
        BF16,
        expert_blocks,
        formats=FP8,
        note="fills every expert's rows up to 128: for long prompts",
        packing=FP8_EXPERTS,
        from_rows=4096,  # where it takes as long as the portable kernel, 256 experts, top 8
    ),
    offer(
        "experts",
        "torch_ops:ExpertsGroupedMm",
        RANK_BEHIND,
        BF16,
        sixteen_bytes,
        formats=DENSE,
    ),
)
LINEAR: tuple[Kernel, ...] = (
    offer(
        "linear",
        "deep_gemm:LinearFp8",
        RANK_SPECIALISED,
        arch("sm90"),
        library("deep_gemm", "fp8_gemm_nt"),
        BF16,
        blocks(out=8),
        formats=FP8,
        packing=FP8_ROWS,
        from_rows=2,  # one row needs no matrix unit, and no launch that quantises it
    ),
    offer(
        "linear",
        "flashinfer:LinearGroupwise",
        RANK_SPECIALISED,
        arch("sm100", "sm103"),
        library("flashinfer", "gemm.gemm_fp8_nt_groupwise"),
        BF16,
        blocks(out=128),
        formats=FP8,
    ),
    offer(
        "linear",
        "torch_ops:LinearScaledMm",
        RANK_PLATFORM,
        arch("sm90"),
        multiplies_fp8,
        BF16,
        blocks(out=16),
        formats=FP8,
    ),
    offer("linear", "torch_ops:LinearCublas", RANK_BEHIND, formats=DENSE),
)
