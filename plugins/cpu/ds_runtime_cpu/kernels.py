"""The CPU plugin's whole offer on one page. Torch-free.

Ranks are by measurement of one thread on one AVX-512 core of a machine that other work shared
(benchmarks/results/cpu_kernels.md): the native kernels win wherever weights or cache are
streamed, oneDNN's packing wins once a matmul is bound by arithmetic. What needs the native
library refuses without it, and the next rank takes over.
"""

from __future__ import annotations

from collections.abc import Callable

from ds_runtime.api import (
    OPS,
    RANK_PLATFORM,
    RANK_PORTABLE,
    RANK_SPECIALISED,
    Facts,
    Kernel,
)
from ds_runtime_cpu import native

_FORMATS = frozenset({"dense", "fp8_block"})
_LATENT_PAGES = frozenset({"latent_pages.v1"})
_FP8 = "fp8 weights are converted to the compute dtype when packed: twice the bytes for bfloat16"
_KV_B = "kv_b is kept twice: whole for prefill, and per head for decode"
_MAX_LORA = 1024  # of the native decode kernel's accumulators


def _not_cpu(facts: Facts) -> str | None:
    return None if facts.device.type == "cpu" else f"runs on the CPU, not on {facts.device.type}"


def _needs_native(facts: Facts) -> str | None:
    if facts.dtype not in native.DTYPES:
        return f"computes in {' or '.join(native.DTYPES)}, not {facts.dtype}"
    return _not_cpu(facts) or native.why_not()


def _needs_same_kv(facts: Facts) -> str | None:
    if facts.kv_dtype != facts.dtype:
        return f"reads a cache of the compute dtype {facts.dtype}, not {facts.kv_dtype}"
    return _needs_native(facts)


def _native_decode(facts: Facts) -> str | None:
    if facts.dims.get("kv_lora", 0) > _MAX_LORA:
        return f"holds at most {_MAX_LORA} latent values per token, not {facts.dims['kv_lora']}"
    return _needs_same_kv(facts)


def _torch_only(facts: Facts) -> str | None:
    if facts.dtype not in native.DTYPES:
        return f"computes in {' or '.join(native.DTYPES)}, not {facts.dtype}"
    return _not_cpu(facts)


def _matmul_decode(facts: Facts) -> str | None:
    if facts.kv_dtype != facts.dtype:
        return f"reads a cache of the compute dtype {facts.dtype}, not {facts.kv_dtype}"
    return _torch_only(facts)


def _onednn(facts: Facts) -> str | None:
    features = facts.device.features
    if not facts.device.arch.startswith("x86-64"):
        return f"oneDNN's weight packing is used on x86-64 only, not {facts.device.arch}"
    if facts.dtype == "bfloat16" and not features & {"avx512bw", "amx_bf16"}:
        return f"oneDNN packs bfloat16 for AVX-512 or AMX, which {facts.device.arch} lacks"
    return _torch_only(facts)


def _native_absorb(facts: Facts) -> str | None:
    return _needs_native(facts) or _onednn(facts)


Refuse = Callable[[Facts], str | None]


def _offer(op: str, fn: str, rank: int, refuse: Refuse, note: str = "") -> Kernel:
    owns_weights = op in ("linear", "experts", "mla_absorb")
    return Kernel(
        op=OPS[op],
        fn=f"ds_runtime_cpu.{fn}",
        provider="cpu",
        rank=rank,
        refuse=refuse,
        formats=_FORMATS if owns_weights else frozenset(),
        layouts=_LATENT_PAGES if OPS[op].layout else frozenset(),
        note=_FP8 if owns_weights and not note else note,
        copies=2 if op == "mla_absorb" else 1,  # whole for the expansion, per head for decode
    )


ATTENTION: tuple[Kernel, ...] = (
    _offer("mha_prefill", "attention:mha_prefill", RANK_PLATFORM, _torch_only),
    _offer("mla_decode", "attention:mla_decode_native", RANK_SPECIALISED, _native_decode),
    _offer("mla_decode", "attention:mla_decode_matmul", RANK_PLATFORM, _matmul_decode),
    _offer("mla_absorb", "attention:mla_absorb_native", RANK_SPECIALISED, _native_absorb, _KV_B),
    _offer("mla_absorb", "attention:mla_absorb_matmul", RANK_PLATFORM, _onednn, _KV_B),
    _offer("cache_write", "small:cache_write", RANK_SPECIALISED, _needs_same_kv),
)
MOE: tuple[Kernel, ...] = (
    _offer("experts", "experts:experts_native", RANK_SPECIALISED, _needs_native),
    _offer("experts", "experts:experts_prepacked", RANK_PLATFORM, _onednn),
)
LINEAR_KERNELS: tuple[Kernel, ...] = (
    _offer("linear", "linear:linear_prepacked", RANK_SPECIALISED, _onednn),
    _offer("linear", "linear:linear_native", RANK_PLATFORM, _needs_native),
    _offer("linear", "linear:linear_plain", RANK_PORTABLE, _torch_only),
)
SMALL_OPS: tuple[Kernel, ...] = (
    _offer("rms_norm", "small:rms_norm", RANK_SPECIALISED, _needs_native),
    _offer("add_rms_norm", "small:add_rms_norm", RANK_SPECIALISED, _needs_native),
    _offer("silu_mul", "small:silu_mul", RANK_SPECIALISED, _needs_native),
    _offer("rope", "small:rope", RANK_SPECIALISED, _needs_native),
)
