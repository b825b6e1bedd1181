"""The CUDA plugin's offer; linears.py and blackwell.py have the rest. Torch-free.

Each library is an adapter and a provider of its own, so that pins may name it. What is installed,
and which functions it exports, are features of the device (software.py); what is missing is refused
with the package's name. Ranks on compute capability 9.0 are by measurement (cuda_kernels.md and
sparse_attention.md in benchmarks/results; rows of experts: device_decode.md). What was not faster
than portable kernels, or was not run, ranks below them. On capability 10, which nobody could run,
they are by what the libraries say. On 8.9 and 12, where nothing has run either, portable kernels
serve: what is made for 9.0 or 10 names these, and refuses there.
"""

from __future__ import annotations

from ds_runtime.api import (
    DENSE_EXPERTS,
    FP8_EXPERTS,
    FP8_ROWS,
    RANK_PLATFORM,
    RANK_SPECIALISED,
    Compiles,
    Facts,
    Footprint,
    Gate,
    Kernel,
    Promises,
    RowRange,
    checks,
)
from ds_runtime_cuda import blackwell
from ds_runtime_cuda.gates import (
    BF16,
    BLOCK,
    CODED,
    CODED_FP8,
    DENSE,
    EXPANDED,
    EXPERT_BLOCKS,
    FP8,
    HALVES,
    HEADS_192,
    LATENT,
    RANK_BEHIND,
    RANK_BESIDE,
    SCALED_PAGES,
    arch,
    as_wide_as,
    column_pairs,
    copied_keys,
    cuda,
    deep_gemm,
    few_chosen,
    few_experts,
    flash_mla,
    flashinfer,
    fp8_keys,
    has,
    in_fours,
    many_experts,
    quantises,
    queues,
    scaled_kv,
    scales_on_chip,
    sgl_kernel,
    whole_pages,
)
from ds_runtime_cuda.linears import LINEAR
from ds_runtime_cuda.software import BINDINGS, DEEP_GEMM, FLASH_MLA, FLASHINFER, SGL_KERNEL, TRITON

_FA3 = has(SGL_KERNEL, "flash_attn.flash_attn_varlen_func")
_FA3_KV = has(SGL_KERNEL, "flash_attn.flash_attn_with_kvcache")
_TRTLLM_MOE = has(FLASHINFER, "fused_moe.trtllm_fp8_block_scale_routed_moe")
_FLASH_MLA = has(FLASH_MLA, "flash_mla_with_kvcache", "get_mla_decoding_metadata")
_SPARSE = has(FLASH_MLA, "flash_mla_sparse_fwd")
_SCALED = has(FLASH_MLA, "flash_mla_with_kvcache", "get_mla_metadata")
_MQA_LOGITS = has(
    DEEP_GEMM, "fp8_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata"
)
_TOPK = has(FLASHINFER, "top_k_page_table_transform", "TopKTieBreak")


def _sparse(op: str) -> tuple[Kernel, Kernel, Kernel]:
    """FlashMLA over bfloat16 pages, and over FP8 groups; FlashAttention 3, which nobody ran yet."""
    here, common = arch("sm90", "sm100"), (BF16, LATENT, checks.heads(128))
    plain = flash_mla.offer(
        op, "flash_mla:sparse_mla", RANK_PLATFORM, here, _SPARSE, *common, checks.same_kv
    )
    scaled = flash_mla.offer(
        op,
        "flash_mla:scaled_sparse_mla",
        RANK_PLATFORM,
        here,
        _SCALED,
        *common,
        scaled_kv,
        checks.page_sizes(64),
        layouts=SCALED_PAGES,
    )
    flash3 = sgl_kernel.offer(
        op,
        "sgl_kernel:sparse_mla",
        RANK_BEHIND,
        arch("sm90"),
        _FA3_KV,
        HALVES,
        LATENT,
        checks.same_kv,
        note="FlashAttention 3",
    )
    return plain, scaled, flash3


_FEW = 16  # heads up to which the portable kernel is ahead of one that computes 64


def _most_filled(facts: Facts) -> str | None:
    heads = facts.dims.get("heads", 0)
    return None if heads > _FEW else f"ranked below portable kernels for {heads} heads"


def _few_filled(facts: Facts) -> str | None:
    heads = facts.dims.get("heads", 0)
    return None if heads <= _FEW else f"offered before portable kernels for {heads} heads"


def _flash_mla(name: str, rank: int, heads: Gate, note: str = "") -> Kernel:
    paged = checks.page_sizes(64)
    common = (arch("sm90"), _FLASH_MLA, quantises, HALVES, LATENT, checks.same_kv, paged)
    return flash_mla.offer("mla_decode", f"flash_mla:{name}", rank, *common, heads, note=note)


ATTENTION: tuple[Kernel, ...] = (
    *_sparse("sparse_prefill"),
    *_sparse("sparse_decode"),
    deep_gemm.offer(
        "index_scores",
        "deep_gemm:index_scores",
        RANK_PLATFORM,
        arch("sm90"),
        _MQA_LOGITS,
        HALVES,
        fp8_keys,
        checks.page_sizes(64),
        footprint=Footprint(workspace=copied_keys),
    ),
    flashinfer.offer(
        "index_topk",
        "flashinfer:index_topk",
        RANK_BEHIND,
        arch("sm90", "sm100", "sm103"),
        _TOPK,
        whole_pages,
        few_chosen,
    ),
    sgl_kernel.offer(
        "mla_decode",
        "sgl_kernel:MlaDecode",
        RANK_BEHIND,
        arch("sm90"),
        _FA3_KV,
        HALVES,
        LATENT,
        checks.same_kv,
        note="FlashAttention 3",
    ),
    deep_gemm.offer(
        "mla_absorb",
        "deep_gemm:MlaAbsorb",
        RANK_BESIDE,
        arch("sm90"),
        has(DEEP_GEMM, "fp8_gemm_nt"),
        BF16,
        checks.linear_groups(BLOCK, 8),
        formats=FP8,
        rows=RowRange(FP8_ROWS, EXPANDED, methods=frozenset({"expand"})),
        footprint=Footprint(copies=3),  # in FP8, and in bfloat16 for decode, if it packs
        compiles=Compiles("deep_gemm:compile_absorb"),
    ),
    _flash_mla("MlaDecode", RANK_PLATFORM, _most_filled),
    _flash_mla("MlaDecodeFewHeads", RANK_BEHIND, _few_filled, "computes 64 heads at once"),
    flashinfer.offer(
        "mla_decode",
        "flashinfer:MlaDecode",
        RANK_BEHIND,
        has(FLASHINFER, "mla.BatchMLAPagedAttentionWrapper", "mla.MLAPlanMetadata"),
        HALVES,
        LATENT,
        checks.same_kv,
        note="planned on the host before every step",
    ),
    *(
        cuda.offer(
            op,
            f"attention:{op}",
            RANK_PLATFORM,
            arch("sm90"),
            BINDINGS.has(),
            BF16,
            HEADS_192,
            note="compiled by NVRTC when it is first needed",
            compiles=Compiles("attention:compile_attention"),
        )
        for op in ("mha_prefill", "mha_prefill_quantize")
    ),
    sgl_kernel.offer(
        "mha_prefill",
        "sgl_kernel:mha_prefill",
        RANK_BEHIND,
        arch("sm90"),
        _FA3,
        HALVES,
        HEADS_192,
        note="FlashAttention 3",
    ),
    flashinfer.offer(
        "mha_prefill",
        "flashinfer:mha_prefill",
        RANK_BEHIND,
        has(FLASHINFER, "BatchPrefillWithRaggedKVCacheWrapper"),
        HALVES,
        HEADS_192,
        promises=Promises(graph_safe=False),
    ),
)

# Experts of other ranks are left out, and rows may come as FP8 codes
_CODED_PARTS = Promises(skips_absent=True, takes_codes=True)


def _streamed(
    name: str,
    formats: set[str],
    rows: RowRange,
    *each: Gate,
    rank: int = RANK_BESIDE,
    second: float = 0,
) -> Kernel:
    """Own kernels, for sizes at which they were faster than portable ones."""
    return cuda.offer(
        "experts",
        f"experts_streaming:{name}",
        rank,
        arch("sm90"),
        BINDINGS.has(),
        BF16,
        EXPERT_BLOCKS,
        few_experts,
        *each,
        formats=formats,
        promises=Promises(skips_absent=True, takes_codes=formats == FP8),
        note="compiled by NVRTC when it is first needed",
        rows=rows,
        footprint=Footprint(second_form=second),
        compiles=Compiles(f"experts_streaming:compile_{'coded' if second else 'experts'}"),
    )


MOE: tuple[Kernel, ...] = (
    flashinfer.offer(
        "experts",
        "flashinfer:ExpertsTrtllm",
        RANK_SPECIALISED,
        arch("sm100", "sm103"),
        _TRTLLM_MOE,
        quantises,
        BF16,
        EXPERT_BLOCKS,
        in_fours,
        formats=FP8,
    ),
    # Bounds of both by measurement of 256 experts of 2,048 by 7,168, top 8.
    cuda.offer(
        "experts",
        "grouped_fp8:ExpertsGrouped",
        RANK_BEHIND,
        arch("sm90"),
        BINDINGS.has(),
        TRITON.has(),
        BF16,
        EXPERT_BLOCKS,
        few_experts,
        column_pairs,
        formats=FP8,
        promises=_CODED_PARTS,
        note="compiled by NVRTC when it is first needed",
        rows=RowRange(FP8_EXPERTS, 1280, 10240),
        compiles=Compiles("grouped_fp8:compile_experts"),
    ),
    deep_gemm.offer(
        "experts",
        "deep_gemm:ExpertsFp8",
        RANK_BESIDE,
        arch("sm90"),
        has(DEEP_GEMM, "m_grouped_fp8_gemm_nt_contiguous"),
        quantises,
        BF16,
        EXPERT_BLOCKS,
        formats=FP8,
        promises=_CODED_PARTS,
        note="fills every expert's rows up to 128: for long prompts",
        rows=RowRange(FP8_EXPERTS, 4096),  # where it takes as long as the portable kernel
    ),
    cuda.offer(
        "experts",
        "torch_ops:ExpertsGroupedMm",
        RANK_BEHIND,
        BF16,
        checks.sixteen_bytes,
        queues,
        formats=DENSE,
        promises=Promises(skips_absent=True),
    ),
    _streamed(
        "ExpertsFp8",
        FP8,
        RowRange(FP8_EXPERTS, 3, 17),
        scales_on_chip,
        many_experts,
        as_wide_as(2048),
    ),
    _streamed(
        "ExpertsBlock7",
        FP8,
        RowRange(FP8_EXPERTS, 3, 321),
        scales_on_chip,
        many_experts,
        as_wide_as(512),
        rank=RANK_BESIDE + 1,
        second=CODED_FP8,
    ),
    _streamed("ExpertsDense", DENSE, RowRange(DENSE_EXPERTS, 3, 33)),
    _streamed(
        "ExpertsDense12", DENSE, RowRange(DENSE_EXPERTS, 1, 321), rank=RANK_BESIDE + 1, second=CODED
    ),
)
OFFERS = ATTENTION + MOE + LINEAR + blackwell.ALL
