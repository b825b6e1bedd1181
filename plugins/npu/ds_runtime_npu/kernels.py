"""The npu plugin's whole offer on one page. Torch-free.

All of it is torch-npu's ops, whose schemas have been the same from 2.9 to 2.14. Nothing here ran
on an Ascend NPU.
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
    Layout,
    gates,
)
from ds_runtime_npu.platform import INSTALL

PROVIDER = "npu"
_DENSE, _INT8 = frozenset({"dense", "fp8_block"}), frozenset({"int8_channel"})
_WIDENED = "FP8 weights are held in the compute dtype: these chips multiply none"
_CONTRACTS = {"mla_decode": 2}  # the version that each op's kernels are written for; else 1
_LATENT, _ROPE = 512, 64
_MOST_HEADS, _MOST_COLUMNS = 128, 65535
_MOST_PAGE, _PAGE = 1024, 16
_ARCHS = ("ascend910b", "ascend910_93")


def _bytes_per_token(facts: Facts) -> int:
    return 2 * (facts.dims["kv_lora"] + facts.dims["qk_rope"])


LATENT_SPLIT = Layout(
    name="latent_split",
    version=1,
    allocate="ds_runtime_npu.cache:allocate",
    bytes_per_token=_bytes_per_token,
)


def _npu(facts: Facts) -> str | None:
    arch = facts.device.arch
    if not arch.startswith("ascend"):
        return f"runs on Ascend NPUs, not on {facts.device.type}"
    if arch not in _ARCHS:
        return f"made for {' and '.join(_ARCHS)}, not for {arch}"
    if "torch_npu" not in facts.device.features:
        return Fixable("torch-npu is not installed", INSTALL)
    return None


def _halves(facts: Facts) -> str | None:
    if facts.dtype in ("bfloat16", "float16"):
        return None
    return f"computes in bfloat16 or float16, not {facts.dtype}"


def _latent(facts: Facts) -> str | None:
    latent, rope = facts.dims.get("kv_lora", 0), facts.dims.get("qk_rope", 0)
    if (latent, rope) != (_LATENT, _ROPE):
        return f"made for {_LATENT} latent and {_ROPE} rotated values, not {latent} and {rope}"
    return None


def _heads(facts: Facts) -> str | None:
    heads = facts.dims.get("heads", 0)
    return f"at most {_MOST_HEADS} heads, not {heads}" if heads > _MOST_HEADS else None


def _same_kv(facts: Facts) -> str | None:
    if facts.kv_dtype != facts.dtype:
        said = f"keeps a cache of the compute dtype {facts.dtype}, not {facts.kv_dtype}"
        return Fixable(said, "pass --kv-cache-dtype auto")
    return None


def _pages(facts: Facts) -> str | None:
    if facts.page_size % _PAGE == 0 and facts.page_size <= _MOST_PAGE:
        return None
    said = f"page size {facts.page_size}, takes multiples of {_PAGE} up to {_MOST_PAGE}"
    return Fixable(said, "pass --page-size 128")


def _heads_192(facts: Facts) -> str | None:
    dims = facts.dims
    shape = dims.get("qk_nope", 0), dims.get("qk_rope", 0), dims.get("v", 0)
    if shape == (128, 64, 128):
        return None
    return f"made for heads of 128 and 64 query and 128 value dims, not {shape}"


def _whole(multiple: int) -> Gate:
    """Both sides of every matrix in multiples, and none beyond what the ops index."""

    def check(facts: Facts) -> str | None:
        sides = facts.shape[-2:]
        odd = [n for n in sides if n % multiple]
        if odd:
            return f"needs sides in multiples of {multiple}, and {odd[0]} is none"
        wide = [n for n in sides if n > _MOST_COLUMNS]
        return f"takes at most {_MOST_COLUMNS} columns, not {wide[0]}" if wide else None

    return check


def _absorbs(facts: Facts) -> str | None:
    dims = facts.dims
    odd = [dims[n] for n in ("qk_nope", "v", "kv_lora") if dims.get(n, 0) % 16]
    return f"multiplies dims in multiples of 16, and {odd[0]} is none" if odd else None


def _offer(
    op: str,
    fn: str,
    *checks: Gate,
    formats: frozenset[str] = frozenset(),
    rank: int = RANK_SPECIALISED,
    graph_safe: bool = True,
    copies: float = 1,
    note: str = "",
) -> Kernel:
    return Kernel(
        op=OPS[op],
        fn=f"ds_runtime_npu.{fn}",
        provider=PROVIDER,
        rank=rank,
        refuse=gates(_npu, *checks),
        formats=formats,
        layouts=frozenset({LATENT_SPLIT.tag}) if OPS[op].layout else frozenset(),
        phases=frozenset({"prefill", "decode", "verify"}),
        contract=_CONTRACTS.get(op, 1),
        graph_safe=graph_safe,
        copies=copies,
        note=note,
        numerics="int8_w8a8" if formats == _INT8 else "",
        keeps=formats & _INT8,
    )


_MLA = gates(_halves, _latent, _heads, _same_kv, _pages)
_CACHE = gates(_halves, _same_kv, _pages)
ATTENTION: tuple[Kernel, ...] = (
    _offer(
        "mla_decode",
        "attention:MlaDecode",
        _MLA,
        graph_safe=False,
        note="takes lengths from the host",
    ),
    _offer("sparse_prefill", "attention:sparse_mla", _MLA),
    _offer("sparse_decode", "attention:sparse_mla", _MLA),
    _offer("mha_prefill", "attention:mha_prefill", _halves, _heads_192),
    _offer("merge_state", "attention:merge_state", _halves),
    _offer(
        "mla_absorb",
        "attention:MlaAbsorb",
        _halves,
        _absorbs,
        formats=_DENSE,
        copies=2,
        note=_WIDENED,
    ),
    _offer("cache_write", "cache:cache_write", _CACHE),
    _offer("cache_gather", "cache:cache_gather", _CACHE),
    _offer("cache_move", "cache:cache_move", _CACHE, rank=RANK_PLATFORM),
)
MOE: tuple[Kernel, ...] = (
    _offer("experts", "experts:ExpertsInt8", _halves, _whole(32), formats=_INT8),
    _offer("experts", "experts:Experts", _halves, _whole(16), formats=_DENSE, note=_WIDENED),
)
TOPK: tuple[Kernel, ...] = (
    _offer("route", "experts:choose", note="routings that the op does not know in torch"),
)
LINEAR: tuple[Kernel, ...] = (
    _offer("linear", "linear:LinearInt8", _halves, _whole(32), formats=_INT8),
    _offer("linear", "linear:LinearDense", formats=_DENSE, rank=RANK_PLATFORM, note=_WIDENED),
)
SMALL: tuple[Kernel, ...] = (
    _offer("rms_norm", "small:rms_norm", _halves),
    _offer("add_rms_norm", "small:add_rms_norm", _halves),
    _offer("rope", "small:rope"),
    _offer("silu_mul", "small:silu_mul", _halves),
)
