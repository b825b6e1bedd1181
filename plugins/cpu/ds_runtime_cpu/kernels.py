"""The CPU plugin's whole offer on one page. Torch-free.

Ranks are by measurement, of one thread (benchmarks/results/cpu_kernels.md) and against zentorch on
two (benchmarks/results/cpu_zentorch.md). On a Xeon, with AMX and without, the native matmuls in
bfloat16 are 1.1 to 1.5 times as fast as oneDNN's packing up to 16 tokens. At 512 they are as fast.
What needs the native library refuses without it, and the next rank takes over.
"""

from __future__ import annotations

from typing import Unpack

from ds_runtime.api import (
    FP4_KEYS,
    FP8_GROUPS,
    RANK_PLATFORM,
    RANK_PORTABLE,
    RANK_SPECIALISED,
    Declared,
    Facts,
    Fixable,
    Footprint,
    Gate,
    Kernel,
    Promises,
    Provider,
    checks,
    gates,
    installed,
)
from ds_runtime_cpu import machine, native, workspace

_FORMATS = {"dense", "fp8_block", "int8_channel", "int4_group"}
_DENSE = {"dense", "fp8_block"}
_CODES = frozenset({"fp8_block", "mxfp4"})  # that panels keep
_OWN = Promises(batch_invariant=True)
_ANY_PART = Promises(batch_invariant=True, skips_absent=True)
_SCALED_PAGES, _EXPANDED_PAGES = {"latent_fp8_groups.v1"}, {"expanded_pages.v1"}
_FP8 = "fp8 weights are converted to the compute dtype when packed: twice the bytes for bfloat16"
_TIGHT = "bfloat16 weights take 12 bits, without loss, where the processor multiplies their pairs"
_PANELS = f"fp8 and fp4 stay so unless a shard cuts their blocks below 32 columns; {_TIGHT}"
_A8 = (
    "activations are rounded to int8, by token or by token and group; weights whose groups no "
    "multiple of 32 columns divides are held in the compute dtype"
)
_KV_B = "kv_b is kept twice: whole for prefill, and per head for decode"
MAX_EXPERTS = 1024  # of the native router's buffers
_MAX_INDEX = 1024  # of the native index prologue's
_MAX_HEAD = 2048  # of native norms of heads
_MAX_STREAMS = 8  # of csrc/streams.cpp


def _on_cpu(facts: Facts) -> str | None:
    return None if facts.device.type == "cpu" else f"runs on CPUs, not on {facts.device.family}"


def _dtype(facts: Facts) -> str | None:
    if facts.dtype in native.DTYPES:
        return None
    said = f"computes in {' or '.join(native.DTYPES)}, not {facts.dtype}"
    return Fixable(said, "pass --dtype bfloat16")


def _library(facts: Facts) -> str | None:
    """A device that is only described has what its features say, whatever this machine has."""
    if machine.DESCRIBED in facts.device.features:
        return None if machine.NATIVE in facts.device.features else native.NOT_BUILT
    return native.why_not()


def _kv_dtype(facts: Facts) -> str | None:
    if facts.kv_dtype in (facts.dtype, "float8_e4m3fn"):
        return None
    return f"knows a cache of {facts.dtype} or float8_e4m3fn, not {facts.kv_dtype}"


def _scaled(facts: Facts) -> str | None:
    if facts.kv_dtype == FP8_GROUPS:
        return None
    return f"knows a cache of {FP8_GROUPS}, not of {facts.kv_dtype}"


def _index(facts: Facts) -> str | None:
    if facts.index_dtype not in (facts.dtype, "float8_e4m3fn"):
        said = f"knows index keys of {facts.dtype} or float8_e4m3fn, not {facts.index_dtype}"
        fp4 = facts.index_dtype == FP4_KEYS
        remedy = "leave --trained-rounding out" if fp4 else "pass --index-cache-dtype auto"
        return Fixable(said, remedy)
    return _index_dim(facts)


def _index_dim(facts: Facts) -> str | None:
    dim = facts.dims["index_dim"]
    if dim > _MAX_INDEX or dim & (dim - 1):
        return f"rotates index keys of a power of two up to {_MAX_INDEX}, not {dim}"
    return None


def _index_keys(facts: Facts) -> str | None:
    """As `_index`, and keys in FP4, which 32 share a scale of."""
    if facts.index_dtype != FP4_KEYS:
        return _index(facts)
    dim = facts.dims["index_dim"]
    return f"index_head_dim {dim} is no multiple of 32" if dim % 32 else _index_dim(facts)


def _experts(facts: Facts) -> str | None:
    if facts.dims.get("experts", 0) > MAX_EXPERTS:
        return f"chooses among at most {MAX_EXPERTS} experts, not {facts.dims['experts']}"
    return None


def _head(facts: Facts) -> str | None:
    dims = facts.dims.get("kv_lora", 0) + facts.dims.get("qk_rope", 0)
    return f"takes heads of at most {_MAX_HEAD} dims, not {dims}" if dims > _MAX_HEAD else None


def _streams(facts: Facts) -> str | None:
    streams = facts.dims.get("streams", 0)
    return (
        f"mixes at most {_MAX_STREAMS} streams, not {streams}" if streams > _MAX_STREAMS else None
    )


def _x86(facts: Facts) -> str | None:
    arch = facts.device.arch
    if arch.startswith("x86-64"):
        return None
    return f"oneDNN's weight packing is used on x86-64 only, not {arch}"


def _zentorch(facts: Facts) -> str | None:
    """Its releases are built for one minor version of torch each, which pip does not check."""
    found, torch = installed("zentorch"), installed("torch") or ""
    if machine.DESCRIBED in facts.device.features or found is None:
        return Fixable("zentorch is not installed", "pip install zentorch, of torch's version")
    if found.split(".")[:2] != torch.split(".")[:2]:
        wanted = ".".join(torch.split(".")[:2])
        said = f"zentorch {found} is built for another torch than {torch}"
        return Fixable(said, f"pip install 'zentorch=={wanted}.*'")
    return None


def _bfloat16(facts: Facts) -> str | None:
    if facts.dtype == "bfloat16":
        return None
    said = f"computes in bfloat16, not {facts.dtype}"
    return Fixable(said, "pass --dtype bfloat16")


def _avx512(facts: Facts) -> str | None:
    if "avx512bw" in facts.device.features:
        return None
    return f"is used with AVX-512, which {facts.device.arch} lacks"


def _packs(facts: Facts) -> str | None:
    if facts.dtype == "bfloat16" and not facts.device.features & {"avx512bw", "amx_bf16"}:
        return f"oneDNN packs bfloat16 for AVX-512 or AMX, which {facts.device.arch} lacks"
    return None


_torch_only = gates(_dtype, _on_cpu)
_needs_native = gates(_torch_only, _library)
_native_cache = gates(_kv_dtype, _needs_native)
_native_scaled = gates(_scaled, _needs_native)
_native_index = gates(_index, _needs_native)
_native_keys = gates(_index_keys, _needs_native)
_native_route = gates(_experts, _needs_native)
_native_heads = gates(_head, _needs_native)
_native_streams = gates(_streams, _needs_native)
_matmul_decode = gates(checks.same_kv, _torch_only)
_onednn = gates(_x86, _packs, _torch_only)
_zen = gates(_zentorch, _bfloat16, _avx512, _on_cpu)


cpu = Provider(
    "cpu",
    "ds_runtime_cpu",
    phases={"prefill", "decode", "verify", "tree"},
    numerics={"int8_channel": "int8_w8a8", "int4_group": "int4_w4a8"},
)


def _nothing(facts: Facts, rows: int) -> int:
    return 0


def _reads(facts: Facts) -> float:
    """Of a weight in panels: bfloat16 in 12 bits where `panels.Stack` narrows it."""
    tight = facts.device.arch in ("x86-64-avx512bf16", "x86-64-amx")
    dense = facts.weight_format == "dense" and facts.dtype == "bfloat16"
    return 0.75 if tight and dense else 1.0


def _native(op: str, fn: str, *each: Gate, **declared: Unpack[Declared]) -> Kernel:
    return cpu.offer(op, fn, RANK_SPECIALISED, *(each or (_needs_native,)), **declared)


def _in_order(op: str, fn: str, *each: Gate, **declared: Unpack[Declared]) -> Kernel:
    """Native: each element of a result is summed in the order that any other number of rows, or of
    sequences, would have."""
    says: Declared = {"promises": _OWN, **declared}
    return _native(op, fn, *each, **says)


def _by_row(op: str, fn: str, *each: Gate, **declared: Unpack[Declared]) -> Kernel:
    """As `_in_order`, by one thread, and nothing is allocated beside results."""
    none: Declared = {"footprint": Footprint(workspace=_nothing)}
    says: Declared = {**none, **declared}
    return _in_order(op, fn, *each, **says)


def _panels(op: str, fn: str, **declared: Unpack[Declared]) -> Kernel:
    """A kernel that keeps fp8 blocks and fp4 as they are, and sums as `_in_order`."""
    said: Declared = {"formats": {"dense", *_CODES}, "note": _PANELS, "promises": _OWN}
    says: Declared = {**said, "footprint": Footprint(keeps=_CODES, reads=_reads), **declared}
    return _native(op, fn, **says)


def _by_host(op: str, fn: str, *each: Gate, **declared: Unpack[Declared]) -> Kernel:
    """It looks at values to decide what to call: no recording of that would serve another step."""
    says: Declared = {"promises": Promises(graph_safe=False), **declared}
    return cpu.offer(op, fn, RANK_PLATFORM, *each, **says)


ATTENTION: tuple[Kernel, ...] = (
    _native("mha_prefill", "attention:mha_prefill_native"),
    cpu.offer("mha_prefill", "attention:mha_prefill_matmul", RANK_PLATFORM, _torch_only),
    _in_order(
        "mla_decode",
        "attention:mla_decode_native",
        _native_cache,
        footprint=Footprint(workspace=workspace.mla_decode),
        promises=Promises(batch_invariant=True, many_rows=True),
    ),
    _by_host("mla_decode", "attention:mla_decode_matmul", _matmul_decode),
    _by_host("mha_decode", "attention:mha_decode_matmul", _matmul_decode, layouts=_EXPANDED_PAGES),
    _by_row(
        "mla_absorb",
        "absorb:mla_absorb_native",
        formats=_FORMATS,
        footprint=Footprint(frozenset({"fp8_block"}), 1.5, workspace=_nothing, reads=_reads),
        note="W_UK is kept twice: by rows to expand keys, by columns for the queries of decode; "
        f"{_TIGHT}",
    ),
    cpu.offer(
        "mla_absorb",
        "absorb:mla_absorb_matmul",
        RANK_PLATFORM,
        _onednn,
        formats=_FORMATS,
        footprint=Footprint(copies=2),  # whole for the expansion, per head for decode
        note=_KV_B,
    ),
    _native("cache_write", "prologue:cache_write", _native_cache),
    cpu.offer(
        "cache_move",
        "moves:cache_move",
        RANK_PLATFORM,
        _torch_only,
        layouts={"latent_pages.v1", *_SCALED_PAGES, *_EXPANDED_PAGES},
    ),
    _by_row("mla_prologue", "prologue:mla_prologue", _native_cache),
    *(
        _in_order(op, "window:window_sparse", _native_cache)
        for op in ("window_prefill", "window_decode")
    ),
    _by_row("norm_rope", "window:norm_rope", _native_heads),
    _by_row("rope_back", "window:rope_back", _native_heads),
    _native(
        "compress_windows",
        "window:compress_windows",
        _native_heads,
        footprint=Footprint(workspace=_nothing),
    ),
    _in_order("index_prologue", "sparse:index_prologue", _native_index),
    _by_row("index_encode", "sparse:index_encode", _native_keys),
    _in_order("index_scores", "sparse:index_scores", _native_keys),
    _in_order("index_topk", "sparse:index_topk"),
    _in_order("sparse_prefill", "sparse:sparse_mla", _native_cache),
    _in_order("sparse_decode", "sparse:sparse_mla", _native_cache),
    _native("cache_write", "prologue:scaled_cache_write", _native_scaled, layouts=_SCALED_PAGES),
    _by_row("mla_prologue", "prologue:scaled_mla_prologue", _native_scaled, layouts=_SCALED_PAGES),
    *(
        _in_order(op, "sparse:scaled_sparse_mla", _native_scaled, layouts=_SCALED_PAGES)
        for op in ("sparse_prefill", "sparse_decode")
    ),
)
MOE: tuple[Kernel, ...] = (
    *(
        spec
        for op, at in (("experts", "experts"), ("experts_limited", "limited"))
        for spec in (
            _panels(op, f"experts:{at}_native", promises=_ANY_PART),
            *(
                _in_order(op, f"experts:{at}_{name}", formats={form}, note=_A8, promises=_ANY_PART)
                for name, form in (("int8", "int8_channel"), ("int4", "int4_group"))
            ),
        )
    ),
    cpu.offer(
        "experts",
        "zen:experts_zentorch_int8",
        RANK_PLATFORM + 1,
        _zen,
        formats={"int8_channel"},
        note=_A8,
    ),
    cpu.offer(
        "experts", "zen:experts_zentorch", RANK_PLATFORM + 1, _zen, formats=_DENSE, note=_FP8
    ),
    _by_host(
        "experts",
        "experts:experts_prepacked",
        _onednn,
        formats=_FORMATS,
        note=_FP8,
        promises=Promises(graph_safe=False, skips_absent=True),
    ),
)
ROUTING: tuple[Kernel, ...] = (
    _by_row("router_logits", "routing:router_logits"),
    _by_row("route", "routing:route", _native_route),
    _by_row("route_softplus", "routing:route_softplus", _native_route),
)
LINEAR_KERNELS: tuple[Kernel, ...] = (
    _panels(
        "linear",
        "linear:linear_native",
        footprint=Footprint(keeps=_CODES, workspace=_nothing, reads=_reads),
    ),
    _in_order("linear", "linear:linear_int8", formats={"int8_channel"}, note=_A8),
    _in_order("linear", "linear:linear_int4", formats={"int4_group"}, note=_A8),
    _panels(
        "grouped_linear",
        "linear:grouped_linear",
        footprint=Footprint(keeps=_CODES, workspace=_nothing, reads=_reads),
    ),
    *(
        _in_order("grouped_linear", f"linear:grouped_linear_{name}", formats={form}, note=_A8)
        for name, form in (("int8", "int8_channel"), ("int4", "int4_group"))
    ),
    cpu.offer(
        "linear", "linear:linear_prepacked", RANK_PLATFORM, _onednn, formats=_FORMATS, note=_FP8
    ),
    cpu.offer(
        "linear", "linear:linear_plain", RANK_PORTABLE, _torch_only, formats=_FORMATS, note=_FP8
    ),
    _by_host("lora_delta", "lora:lora_delta", _torch_only),
    cpu.offer("lora_delta", "lora:lora_delta_masked", RANK_PORTABLE, _torch_only),
    *(
        cpu.offer(
            "lora_delta",
            f"lora:{fn}",
            rank,
            _needs_native,
            promises=Promises(batch_invariant=True, graph_safe=safe),
        )
        for fn, rank, safe in (
            ("lora_delta_ordered", RANK_PORTABLE - 1, False),
            ("lora_delta_ordered_masked", RANK_PORTABLE - 2, True),
        )
    ),
)
SMALL_OPS: tuple[Kernel, ...] = (
    _by_row("rms_norm", "small:rms_norm"),
    _by_row("add_rms_norm", "small:add_rms_norm"),
    _by_row("silu_mul", "small:silu_mul"),
    _by_row("silu_mul_limited", "small:silu_mul_limited"),
    _by_row("rope", "prologue:rope"),
    _in_order("hc_pre", "streams:hc_pre", _native_streams),
    _by_row("hc_post", "streams:hc_post", _native_streams),
    _in_order("hc_head", "streams:hc_head", _native_streams),
    _by_row("embed", "small:embed"),
    _by_row("quantize_group", "small:quantize_group"),
    _by_row("sample", "sampling:sample"),
    _by_row("mask_logits", "sampling:mask_logits"),
    _by_row("logprobs", "sampling:logprobs"),
)
OFFERS = ATTENTION + MOE + ROUTING + LINEAR_KERNELS + SMALL_OPS
