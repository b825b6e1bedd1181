"""The CUDA plugin's whole offer on one page. Torch-free.

Each library is an adapter and a provider of its own, so that pins may name it. What is installed,
and which functions it exports, are features of the device (software.py); what is missing is refused
with the package's name. Ranks on compute capability 9.0 are by measurement
(benchmarks/results/cuda_kernels.md): what was not faster than portable kernels, or was not run,
stays behind them. On capability 10, which nobody could run, they are by what the libraries say.
"""

from __future__ import annotations

from ds_runtime.api import (
    FP8_EXPERTS,
    FP8_GROUPS,
    FP8_ROWS,
    OPS,
    RANK_PLATFORM,
    RANK_PORTABLE,
    RANK_REFERENCE,
    RANK_SPECIALISED,
    Facts,
    Fixable,
    Gate,
    Kernel,
    gates,
)
from ds_runtime_cuda.software import INSTALL, LIBRARIES

RANK_BEHIND = (RANK_REFERENCE + RANK_PORTABLE) // 2  # before references, behind portable kernels
_FP8, _DENSE = frozenset({"fp8_block"}), frozenset({"dense"})
_LATENT_PAGES = frozenset({"latent_pages.v1"})
_SCALED_PAGES = frozenset({"latent_fp8_groups.v1"})
_INDEX_PAGES = frozenset({"index_pages.v1"})
_CONTRACTS = {"mla_decode": 2}  # the version that each op's kernels are written for; else 1
_LATENT, _ROPE = 512, 64
_BLOCK = 128
_DISTRIBUTION = {library.module: library.distributions[0] for library in LIBRARIES}


def _gpu(facts: Facts) -> str | None:
    arch = facts.device.arch
    return None if arch.startswith("sm") else f"runs on NVIDIA GPUs, not on {facts.device.type}"


def _arch(*wanted: str) -> Gate:
    def check(facts: Facts) -> str | None:
        arch = facts.device.arch
        return None if arch in wanted else f"made for {' and '.join(wanted)}, not for {arch}"

    return gates(_gpu, check)


def _dtype(*wanted: str) -> Gate:
    def check(facts: Facts) -> str | None:
        if facts.dtype in wanted:
            return None
        return f"computes in {' or '.join(wanted)}, not {facts.dtype}"

    return check


def _library(module: str, *functions: str) -> Gate:
    def check(facts: Facts) -> str | None:
        features = facts.device.features
        if module not in features:
            return Fixable(f"{_DISTRIBUTION[module]} is not installed", INSTALL)
        if f"{module}:mixed" in features:
            return f"two packages have been installed into {module}/: uninstall both, then one"
        missing = [f for f in functions if f"{module}.{f}" not in features]
        if missing:
            return f"the installed {module} has no {', '.join(missing)}; {INSTALL} brings one"
        return None

    return check


def _latent(facts: Facts) -> str | None:
    latent, rope = facts.dims.get("kv_lora", 0), facts.dims.get("qk_rope", 0)
    if (latent, rope) != (_LATENT, _ROPE):
        return f"made for {_LATENT} latent and {_ROPE} rotated values, not {latent} and {rope}"
    return None


def _same_kv(facts: Facts) -> str | None:
    if facts.kv_dtype != facts.dtype:
        said = f"reads a cache of the compute dtype {facts.dtype}, not {facts.kv_dtype}"
        return Fixable(said, "pass --kv-cache-dtype auto")
    return None


def _scaled_kv(facts: Facts) -> str | None:
    if facts.kv_dtype != FP8_GROUPS:
        said = f"reads a cache of {FP8_GROUPS}, not of {facts.kv_dtype}"
        return Fixable(said, "pass --kv-cache-dtype fp8")
    return None


def _most_heads(facts: Facts) -> str | None:
    heads = facts.dims.get("heads", 0)
    return f"takes up to 128 heads, not {heads}" if heads > 128 else None


def _fp8_keys(facts: Facts) -> str | None:
    if facts.index_dtype != "float8_e4m3fn":
        said = f"scores float8_e4m3fn keys, not {facts.index_dtype}"
        return Fixable(said, "pass --index-cache-dtype fp8")
    heads, d = facts.dims.get("index_heads", 0), facts.dims.get("index_dim", 0)
    if heads > 64 or d not in (32, 64, 128):
        return f"takes up to 64 index heads of 32, 64 or 128 values, not {heads} of {d}"
    return None


def _pages(*sizes: int) -> Gate:
    def check(facts: Facts) -> str | None:
        if facts.page_size in sizes:
            return None
        said = f"page size {facts.page_size}, takes {' or '.join(map(str, sizes))}"
        return Fixable(said, f"pass --page-size {sizes[-1]}")

    return check


def _heads_192(facts: Facts) -> str | None:
    dims = facts.dims
    shape = dims.get("qk_nope", 0) + dims.get("qk_rope", 0), dims.get("v", 0)
    return None if shape == (192, 128) else f"made for heads of 192 and 128 dims, not {shape}"


def _blocks(*, out: int = 1) -> Gate:
    """Inputs in whole groups of 128; outputs a multiple of `out`."""

    def check(facts: Facts) -> str | None:
        if not facts.shape:
            return None
        rows, cols = facts.shape[-2:]
        if cols % _BLOCK:
            return f"quantises groups of {_BLOCK} inputs, and {cols} are not whole groups"
        if rows % out:
            return f"needs a multiple of {out} outputs, not {rows}"
        return None

    return check


def _expert_blocks(facts: Facts) -> str | None:
    """Both matmuls in whole blocks: (experts, width, hidden)."""
    cut = [n for n in facts.shape[1:] if n % _BLOCK]
    return f"needs whole blocks of {_BLOCK}, and {cut[0]} are none" if cut else None


def _sixteen_bytes(facts: Facts) -> str | None:
    odd = [n for n in facts.shape[1:] if n % 8]
    return f"needs rows of whole 16 bytes, and {odd[0]} values are none" if odd else None


def _fp8(facts: Facts) -> str | None:
    if "float8_e4m3fn" in facts.device.fast_dtypes:
        return None
    return f"{facts.device.name} does not multiply float8_e4m3fn"


def _offer(
    op: str,
    fn: str,
    rank: int,
    *checks: Gate,
    formats: frozenset[str] = frozenset(),
    layouts: frozenset[str] = _LATENT_PAGES,
    graph_safe: bool = True,
    note: str = "",
    packing: str = "",
    from_rows: int = 0,
) -> Kernel:
    fp8, module = formats == _FP8, fn.partition(":")[0]
    return Kernel(
        op=OPS[op],
        fn=f"ds_runtime_cuda.{fn}",
        provider="cuda" if module == "torch_ops" else module,
        rank=rank,
        refuse=gates(_gpu, *checks),
        formats=formats,
        layouts=layouts if OPS[op].layout else frozenset(),
        phases=frozenset({"prefill", "decode", "verify"}),
        contract=_CONTRACTS.get(op, 1),
        graph_safe=graph_safe,
        note=note,
        numerics="fp8_w8a8" if fp8 else "",
        keeps=_FP8 if fp8 else frozenset(),
        packing=packing,
        from_rows=from_rows,
    )


_BF16, _HALVES = _dtype("bfloat16"), _dtype("bfloat16", "float16")
_FA3 = _library("sgl_kernel", "flash_attn.flash_attn_varlen_func")
_FA3_KV = _library("sgl_kernel", "flash_attn.flash_attn_with_kvcache")
_TRTLLM_MLA = _library("flashinfer", "mla.trtllm_batch_decode_with_kv_cache_mla")
_TRTLLM_MOE = _library("flashinfer", "fused_moe.trtllm_fp8_block_scale_routed_moe")
_FLASH_MLA = _library("flash_mla", "flash_mla_with_kvcache", "get_mla_decoding_metadata")
_SPARSE = _library("flash_mla", "flash_mla_sparse_fwd")
_SCALED = _library("flash_mla", "flash_mla_with_kvcache", "get_mla_metadata")
_MQA_LOGITS = _library(
    "deep_gemm", "fp8_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata"
)


def _sparse(op: str) -> tuple[Kernel, Kernel]:
    """FlashMLA over bfloat16 pages, and over FP8 groups."""
    here, common = _arch("sm90", "sm100"), (_BF16, _latent, _most_heads)
    plain = _offer(op, "flash_mla:sparse_mla", RANK_BEHIND, here, _SPARSE, *common, _same_kv)
    scaled = _offer(
        op,
        "flash_mla:scaled_sparse_mla",
        RANK_BEHIND,
        here,
        _SCALED,
        *common,
        _scaled_kv,
        _pages(64),
        layouts=_SCALED_PAGES,
    )
    return plain, scaled


ATTENTION: tuple[Kernel, ...] = (
    *_sparse("sparse_prefill"),
    *_sparse("sparse_decode"),
    _offer(
        "index_scores",
        "deep_gemm:index_scores",
        RANK_BEHIND,
        _arch("sm90"),
        _MQA_LOGITS,
        _HALVES,
        _fp8_keys,
        _pages(64),
        layouts=_INDEX_PAGES,
    ),
    _offer(
        "mla_decode",
        "flashinfer:MlaDecodeTrtllm",
        RANK_SPECIALISED,
        _arch("sm100", "sm103"),
        _TRTLLM_MLA,
        _BF16,
        _latent,
        _same_kv,
        _pages(32, 64),
    ),
    _offer(
        "mla_decode",
        "sgl_kernel:MlaDecode",
        RANK_BEHIND,
        _arch("sm90"),
        _FA3_KV,
        _HALVES,
        _latent,
        _same_kv,
        note="FlashAttention 3",
    ),
    _offer(
        "mla_decode",
        "flash_mla:MlaDecode",
        RANK_PLATFORM,
        _arch("sm90"),
        _FLASH_MLA,
        _HALVES,
        _latent,
        _same_kv,
        _pages(64),
    ),
    _offer(
        "mla_decode",
        "flashinfer:MlaDecode",
        RANK_BEHIND,
        _library("flashinfer", "mla.BatchMLAPagedAttentionWrapper"),
        _HALVES,
        _latent,
        _same_kv,
        note="planned on the host before every step",
    ),
    _offer(
        "mha_prefill",
        "sgl_kernel:mha_prefill",
        RANK_BEHIND,
        _arch("sm90"),
        _FA3,
        _HALVES,
        _heads_192,
        note="FlashAttention 3",
    ),
    _offer(
        "mha_prefill",
        "flashinfer:mha_prefill",
        RANK_BEHIND,
        _library("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper"),
        _HALVES,
        _heads_192,
        graph_safe=False,
    ),
)
MOE: tuple[Kernel, ...] = (
    _offer(
        "experts",
        "flashinfer:ExpertsTrtllm",
        RANK_SPECIALISED,
        _arch("sm100", "sm103"),
        _TRTLLM_MOE,
        _BF16,
        _expert_blocks,
        formats=_FP8,
    ),
    _offer(
        "experts",
        "deep_gemm:ExpertsFp8",
        RANK_BEHIND,
        _arch("sm90"),
        _library("deep_gemm", "m_grouped_fp8_gemm_nt_contiguous"),
        _BF16,
        _expert_blocks,
        formats=_FP8,
        note="fills every expert's rows up to 128: for long prompts",
        packing=FP8_EXPERTS,
        from_rows=4096,  # where it takes as long as the portable kernel, 256 experts, top 8
    ),
    _offer(
        "experts",
        "torch_ops:ExpertsGroupedMm",
        RANK_BEHIND,
        _BF16,
        _sixteen_bytes,
        formats=_DENSE,
    ),
)
LINEAR: tuple[Kernel, ...] = (
    _offer(
        "linear",
        "deep_gemm:LinearFp8",
        RANK_SPECIALISED,
        _arch("sm90"),
        _library("deep_gemm", "fp8_gemm_nt"),
        _BF16,
        _blocks(out=8),
        formats=_FP8,
        packing=FP8_ROWS,
        from_rows=2,  # one row needs no matrix unit, and no launch that quantises it
    ),
    _offer(
        "linear",
        "flashinfer:LinearGroupwise",
        RANK_SPECIALISED,
        _arch("sm100", "sm103"),
        _library("flashinfer", "gemm.gemm_fp8_nt_groupwise"),
        _BF16,
        _blocks(out=_BLOCK),
        formats=_FP8,
    ),
    _offer(
        "linear",
        "torch_ops:LinearScaledMm",
        RANK_PLATFORM,
        _arch("sm90"),
        _fp8,
        _BF16,
        _blocks(out=16),
        formats=_FP8,
    ),
    _offer("linear", "torch_ops:LinearCublas", RANK_BEHIND, formats=_DENSE),
)
