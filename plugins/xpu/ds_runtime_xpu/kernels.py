"""The xpu plugin's whole offer on one page. Torch-free.

Each package is an adapter and a provider of its own, so that pins may name it. What is installed,
and which functions it has, are features of the device (software.py). Nobody could run any of it
here: ranks follow what the packages say of themselves. Portable Triton serves the rest.
"""

from __future__ import annotations

from ds_runtime.api import (
    RANK_PLATFORM,
    RANK_SPECIALISED,
    Facts,
    Fixable,
    Kernel,
    Provider,
    checks,
)
from ds_runtime_xpu.software import SGL, TORCH, VLLM

_FP8, _DENSE = {"fp8_block"}, {"dense"}
_BLOCK = 128
_INDEX = 64, 128  # heads and width of V3.2's indexer
xpu, vllm_xpu, sgl_xpu = (  # names that no other plugin has
    Provider(
        name,
        "ds_runtime_xpu",
        checks.devices("xe", "Intel GPUs"),
    )
    for name in ("xpu", "vllm_xpu", "sgl_xpu")
)


def _xe2(facts: Facts) -> str | None:
    arch = facts.device.arch
    return None if arch == "xe2-hpg" else f"made for xe2-hpg (Arc B-series), not for {arch}"


def _index(facts: Facts) -> str | None:
    shape = facts.dims.get("index_heads", 0), facts.dims.get("index_dim", 0)
    if shape != _INDEX:
        return (
            f"made for {_INDEX[0]} index heads of {_INDEX[1]} values, not {shape[0]} of {shape[1]}"
        )
    if facts.index_dtype != "float8_e4m3fn":
        said = f"reads index keys in float8_e4m3fn, not {facts.index_dtype}"
        return Fixable(said, "pass --index-cache-dtype fp8")
    return None


def _latents(facts: Facts) -> str | None:
    arch = facts.device.arch
    return checks.wide_latents(f"{arch} multiplies no FP8, and nothing here reads FP8 latents")(
        facts
    )


_BF16, _HALVES = checks.dtypes("bfloat16"), checks.dtypes("bfloat16", "float16")
_LATENT, _EXPERT_BLOCKS = checks.latent(512, 64), checks.expert_widths(_BLOCK)
_MOE = VLLM.has("XpuFusedMoe")

FP8_SCORES = vllm_xpu.offer(
    "index_scores",
    "vllm_index:index_scores",
    RANK_SPECIALISED,
    _xe2,
    VLLM.has("fp8_paged_mqa_logits"),
    _index,
    checks.page_sizes(64),
)
ATTENTION: tuple[Kernel, ...] = (
    sgl_xpu.offer(
        "mla_decode",
        "sgl_kernel:MlaDecode",
        RANK_SPECIALISED,
        _latents,
        _xe2,
        SGL.has("flash_mla_decode"),
        _HALVES,
        _LATENT,
        checks.heads(128),
        checks.same_kv,
        checks.page_sizes(16, 32, 128, 64),
    ),
    *(
        sgl_xpu.offer(
            op,
            "sgl_kernel:sparse_mla",
            RANK_SPECIALISED,
            _latents,
            _xe2,
            SGL.has("flash_mla_sparse_fwd"),
            _BF16,
            _LATENT,
            checks.heads(128, multiple=8),
            checks.same_kv,
        )
        for op in ("sparse_prefill", "sparse_decode")
    ),
    vllm_xpu.offer(
        "index_prologue",
        "vllm_index:index_prologue",
        RANK_PLATFORM,
        VLLM.has("per_token_group_fp8_quant", "indexer_k_quant_and_cache"),
        _HALVES,
        _index,
        checks.page_sizes(64),
    ),
    FP8_SCORES,
)
MOE: tuple[Kernel, ...] = (
    vllm_xpu.offer(
        "experts",
        "vllm_moe:ExpertsFp8",
        RANK_SPECIALISED,
        _xe2,
        _MOE,
        _HALVES,
        _EXPERT_BLOCKS,
        formats=_FP8,
        note="weights widened in the kernel, activations not rounded",
    ),
    vllm_xpu.offer(
        "experts",
        "vllm_moe:ExpertsMxfp8",
        RANK_SPECIALISED,
        _xe2,
        _MOE,
        _HALVES,
        _EXPERT_BLOCKS,
        formats={"mxfp8"},
        note="weights widened in the kernel, activations not rounded",
    ),
    vllm_xpu.offer(
        "experts",
        "vllm_moe:ExpertsMxfp4",
        RANK_SPECIALISED,
        _xe2,
        _MOE,
        _HALVES,
        _EXPERT_BLOCKS,
        formats={"mxfp4"},
        note="weights widened in the kernel, activations not rounded",
    ),
    vllm_xpu.offer(
        "experts",
        "vllm_moe:ExpertsDense",
        RANK_PLATFORM,
        _MOE,
        _HALVES,
        checks.sixteen_bytes,
        formats=_DENSE,
    ),
)
LINEAR: tuple[Kernel, ...] = (
    xpu.offer(
        "linear",
        "torch_ops:LinearScaledMm",
        RANK_SPECIALISED,
        _xe2,
        TORCH.has("scaled_mm"),
        VLLM.has("per_token_group_fp8_quant"),
        _BF16,
        checks.linear_groups(_BLOCK, 16),
        formats=_FP8,
        numerics="fp8_w8a8",
        note="oneDNN with group scales",
    ),
    xpu.offer("linear", "torch_ops:LinearOneDnn", RANK_PLATFORM, formats=_DENSE, note="oneDNN"),
)
OFFERS = ATTENTION + MOE + LINEAR
