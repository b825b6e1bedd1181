"""The xpu plugin's whole offer on one page. Torch-free.

Each package is an adapter and a provider of its own, so that pins may name it; what is installed,
and which functions it has, are features of the device (software.py). Nobody could run any of it
here: ranks follow what the packages say of themselves. Portable Triton serves the rest.
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
from ds_runtime_xpu.software import DISTRIBUTIONS, remedy

_FP8, _DENSE = frozenset({"fp8_block"}), frozenset({"dense"})
_LAYOUTS = {"kv": frozenset({"latent_pages.v1"}), "index": frozenset({"index_pages.v1"})}
_CONTRACTS = {"mla_decode": 2}  # the version that each op's kernels are written for; else 1
_PROVIDERS = {  # names that no other plugin has
    "torch_ops": "xpu",
    "vllm_moe": "vllm_xpu",
    "vllm_index": "vllm_xpu",
    "sgl_kernel": "sgl_xpu",
}
_FP8_LATENTS = frozenset({"float8_e4m3fn", FP8_GROUPS})
_BLOCK = 128
_INDEX = 64, 128  # heads and width of V3.2's indexer


def _gpu(facts: Facts) -> str | None:
    arch = facts.device.arch
    return None if arch.startswith("xe") else f"runs on Intel GPUs, not on {facts.device.family}"


def _xe2(facts: Facts) -> str | None:
    arch = facts.device.arch
    return None if arch == "xe2-hpg" else f"made for xe2-hpg (Arc B-series), not for {arch}"


def _package(module: str, *functions: str) -> Gate:
    def check(facts: Facts) -> str | None:
        features = facts.device.features
        if module in DISTRIBUTIONS and module not in features:
            return Fixable(f"{DISTRIBUTIONS[module][0]} is not installed", remedy(module))
        missing = [f for f in functions if f"{module}.{f}" not in features]
        if missing == ["xpu"]:
            said = f"the installed {module} is the build for NVIDIA GPUs"
            return Fixable(said, f"uninstall it, and {remedy(module)}")
        if missing:
            said = f"the installed {module} has no {', '.join(missing)}"
            return Fixable(said, remedy(module))
        return None

    return check


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
    if facts.kv_dtype in _FP8_LATENTS:
        said = f"{facts.device.arch} multiplies no FP8, and nothing here reads FP8 latents"
        return Fixable(said, "pass --kv-cache-dtype auto")
    return None


def _sixteen_bytes(facts: Facts) -> str | None:
    odd = [n for n in facts.shape[1:] if n % 8]
    return f"needs rows of whole 16 bytes, and {odd[0]} values are none" if odd else None


def _offer(
    op: str,
    fn: str,
    rank: int,
    *each: Gate,
    formats: frozenset[str] = frozenset(),
    numerics: str = "",
    note: str = "",
) -> Kernel:
    module = fn.partition(":")[0]
    return Kernel(
        op=OPS[op],
        fn=f"ds_runtime_xpu.{fn}",
        provider=_PROVIDERS[module],
        rank=rank,
        refuse=gates(_gpu, *each),
        formats=formats,
        layouts=_LAYOUTS.get(OPS[op].layout, frozenset()),
        phases=frozenset({"prefill", "decode", "verify"}),
        contract=_CONTRACTS.get(op, 1),
        note=note,
        numerics=numerics,
        keeps=formats - _DENSE,
    )


_BF16, _HALVES = checks.dtypes("bfloat16"), checks.dtypes("bfloat16", "float16")
_LATENT, _EXPERT_BLOCKS = checks.latent(512, 64), checks.expert_widths(_BLOCK)
_MOE = _package("vllm_xpu_kernels", "XpuFusedMoe")

FP8_SCORES = _offer(
    "index_scores",
    "vllm_index:index_scores",
    RANK_SPECIALISED,
    _xe2,
    _package("vllm_xpu_kernels", "fp8_paged_mqa_logits"),
    _index,
    checks.page_sizes(64),
)
ATTENTION: tuple[Kernel, ...] = (
    _offer(
        "mla_decode",
        "sgl_kernel:MlaDecode",
        RANK_SPECIALISED,
        _latents,
        _xe2,
        _package("sgl_kernel", "flash_mla_decode", "xpu"),
        _HALVES,
        _LATENT,
        checks.heads(128),
        checks.same_kv,
        checks.page_sizes(16, 32, 128, 64),
    ),
    *(
        _offer(
            op,
            "sgl_kernel:sparse_mla",
            RANK_SPECIALISED,
            _latents,
            _xe2,
            _package("sgl_kernel", "flash_mla_sparse_fwd", "xpu"),
            _BF16,
            _LATENT,
            checks.heads(128, multiple=8),
            checks.same_kv,
        )
        for op in ("sparse_prefill", "sparse_decode")
    ),
    _offer(
        "index_prologue",
        "vllm_index:index_prologue",
        RANK_PLATFORM,
        _package("vllm_xpu_kernels", "per_token_group_fp8_quant", "indexer_k_quant_and_cache"),
        _HALVES,
        _index,
        checks.page_sizes(64),
    ),
    FP8_SCORES,
)
MOE: tuple[Kernel, ...] = (
    _offer(
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
    _offer(
        "experts",
        "vllm_moe:ExpertsMxfp8",
        RANK_SPECIALISED,
        _xe2,
        _MOE,
        _HALVES,
        _EXPERT_BLOCKS,
        formats=frozenset({"mxfp8"}),
        note="weights widened in the kernel, activations not rounded",
    ),
    _offer(
        "experts",
        "vllm_moe:ExpertsMxfp4",
        RANK_SPECIALISED,
        _xe2,
        _MOE,
        _HALVES,
        _EXPERT_BLOCKS,
        formats=frozenset({"mxfp4"}),
        note="weights widened in the kernel, activations not rounded",
    ),
    _offer(
        "experts",
        "vllm_moe:ExpertsDense",
        RANK_PLATFORM,
        _MOE,
        _HALVES,
        _sixteen_bytes,
        formats=_DENSE,
    ),
)
LINEAR: tuple[Kernel, ...] = (
    _offer(
        "linear",
        "torch_ops:LinearScaledMm",
        RANK_SPECIALISED,
        _xe2,
        _package("torch", "scaled_mm"),
        _package("vllm_xpu_kernels", "per_token_group_fp8_quant"),
        _BF16,
        checks.linear_groups(_BLOCK, 16),
        formats=_FP8,
        numerics="fp8_w8a8",
        note="oneDNN with group scales",
    ),
    _offer("linear", "torch_ops:LinearOneDnn", RANK_PLATFORM, formats=_DENSE, note="oneDNN"),
)
