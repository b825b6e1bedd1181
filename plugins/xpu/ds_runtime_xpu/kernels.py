"""The xpu plugin's whole offer on one page. Torch-free.

Each package is an adapter and a provider of its own, so that pins may name it; what is installed,
and which functions it has, are features of the device (software.py). Nobody could run any of it
here: ranks follow what the packages say of themselves. Portable Triton serves the rest.
"""

from __future__ import annotations

from ds_runtime.api import (
    OPS,
    RANK_PLATFORM,
    RANK_SPECIALISED,
    Facts,
    Fixable,
    Gate,
    Kernel,
    gates,
)
from ds_runtime_xpu.software import DISTRIBUTIONS, INSTALL

_FP8, _DENSE = frozenset({"fp8_block"}), frozenset({"dense"})
_LAYOUTS = {"kv": frozenset({"latent_pages.v1"}), "index": frozenset({"index_pages.v1"})}
_CONTRACTS = {"mla_decode": 2}  # the version that each op's kernels are written for; else 1
_PROVIDERS = {  # names that no other plugin has
    "torch_ops": "xpu",
    "vllm_moe": "vllm_xpu",
    "vllm_index": "vllm_xpu",
    "sgl_kernel": "sgl_xpu",
}
_BLOCK = 128
_MOST_HEADS = 128
_INDEX = 64, 128  # heads and width of V3.2's indexer


def _gpu(facts: Facts) -> str | None:
    arch = facts.device.arch
    return None if arch.startswith("xe") else f"runs on Intel GPUs, not on {facts.device.type}"


def _xe2(facts: Facts) -> str | None:
    arch = facts.device.arch
    return None if arch == "xe2-hpg" else f"made for xe2-hpg (Arc B-series), not for {arch}"


def _dtype(*wanted: str) -> Gate:
    def check(facts: Facts) -> str | None:
        if facts.dtype in wanted:
            return None
        return f"computes in {' or '.join(wanted)}, not {facts.dtype}"

    return check


def _package(module: str, *functions: str) -> Gate:
    def check(facts: Facts) -> str | None:
        features = facts.device.features
        if module in DISTRIBUTIONS and module not in features:
            return Fixable(f"{DISTRIBUTIONS[module][0]} is not installed", INSTALL)
        missing = [f for f in functions if f"{module}.{f}" not in features]
        if missing == ["xpu"]:
            return f"the installed {module} is the build for NVIDIA GPUs: uninstall it"
        if missing:
            return f"the installed {module} has no {', '.join(missing)}; {INSTALL} brings one"
        return None

    return check


def _latent(facts: Facts) -> str | None:
    latent, rope = facts.dims.get("kv_lora", 0), facts.dims.get("qk_rope", 0)
    if (latent, rope) != (512, 64):
        return f"made for 512 latent and 64 rotated values, not {latent} and {rope}"
    return None


def _heads(facts: Facts) -> str | None:
    heads = facts.dims.get("heads", 0)
    if heads > _MOST_HEADS:
        return Fixable(f"takes at most {_MOST_HEADS} heads, not {heads}", "raise --tp")
    return None


def _eight_heads(facts: Facts) -> str | None:
    heads = facts.dims.get("heads", 0)
    return f"takes multiples of 8 heads, not {heads}" if heads % 8 else None


def _same_kv(facts: Facts) -> str | None:
    if facts.kv_dtype != facts.dtype:
        said = f"reads a cache of the compute dtype {facts.dtype}, not {facts.kv_dtype}"
        return Fixable(said, "pass --kv-cache-dtype auto")
    return None


def _pages(*sizes: int) -> Gate:
    def check(facts: Facts) -> str | None:
        if facts.page_size in sizes:
            return None
        said = f"page size {facts.page_size}, takes {' or '.join(map(str, sizes))}"
        return Fixable(said, "pass --page-size 64")

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


def _sixteens(facts: Facts) -> str | None:
    """Whole groups of 128 inputs, and outputs that oneDNN's group scales take."""
    if not facts.shape:
        return None
    rows, cols = facts.shape[-2:]
    if cols % _BLOCK:
        return f"quantises groups of {_BLOCK} inputs, and {cols} are not whole groups"
    return f"needs a multiple of 16 outputs, not {rows}" if rows % 16 else None


def _expert_blocks(facts: Facts) -> str | None:
    cut = [n for n in facts.shape[1:] if n % _BLOCK]
    return f"needs whole blocks of {_BLOCK}, and {cut[0]} are none" if cut else None


def _sixteen_bytes(facts: Facts) -> str | None:
    odd = [n for n in facts.shape[1:] if n % 8]
    return f"needs rows of whole 16 bytes, and {odd[0]} values are none" if odd else None


def _offer(
    op: str,
    fn: str,
    rank: int,
    *checks: Gate,
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
        refuse=gates(_gpu, *checks),
        formats=formats,
        layouts=_LAYOUTS.get(OPS[op].layout, frozenset()),
        phases=frozenset({"prefill", "decode", "verify"}),
        contract=_CONTRACTS.get(op, 1),
        note=note,
        numerics=numerics,
        keeps=formats - _DENSE,
    )


_BF16, _HALVES = _dtype("bfloat16"), _dtype("bfloat16", "float16")
_MOE = _package("vllm_xpu_kernels", "XpuFusedMoe")

ATTENTION: tuple[Kernel, ...] = (
    _offer(
        "mla_decode",
        "sgl_kernel:MlaDecode",
        RANK_SPECIALISED,
        _xe2,
        _package("sgl_kernel", "flash_mla_decode", "xpu"),
        _HALVES,
        _latent,
        _heads,
        _same_kv,
        _pages(16, 32, 64, 128),
    ),
    *(
        _offer(
            op,
            "sgl_kernel:sparse_mla",
            RANK_SPECIALISED,
            _xe2,
            _package("sgl_kernel", "flash_mla_sparse_fwd", "xpu"),
            _BF16,
            _latent,
            _eight_heads,
            _same_kv,
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
        _pages(64),
    ),
    _offer(
        "index_scores",
        "vllm_index:index_scores",
        RANK_SPECIALISED,
        _xe2,
        _package("vllm_xpu_kernels", "fp8_paged_mqa_logits"),
        _index,
        _pages(64),
    ),
)
MOE: tuple[Kernel, ...] = (
    _offer(
        "experts",
        "vllm_moe:ExpertsFp8",
        RANK_SPECIALISED,
        _xe2,
        _MOE,
        _HALVES,
        _expert_blocks,
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
        _expert_blocks,
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
        _expert_blocks,
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
        _sixteens,
        formats=_FP8,
        numerics="fp8_w8a8",
        note="oneDNN with group scales",
    ),
    _offer("linear", "torch_ops:LinearOneDnn", RANK_PLATFORM, formats=_DENSE, note="oneDNN"),
)
