"""The npu plugin's whole offer on one page. Torch-free.

All of it is torch-npu's ops, whose schemas have been the same from 2.9 to 2.14. Nothing here ran
on an Ascend NPU.
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
    Layout,
    checks,
    gates,
    install_command,
)
from ds_runtime_npu.platform import EXTRA

PROVIDER = "npu"
_DENSE, _INT8 = frozenset({"dense", "fp8_block"}), frozenset({"int8_channel"})
_WIDENED = "FP8 weights are held in the compute dtype: these chips multiply none"
# The version of the contract that each op's kernels are written for; else 1.
_CONTRACTS = {"mha_prefill": 2, "mla_absorb": 2, "mla_decode": 2, "route": 2}
_MOST_COLUMNS = 65535
_PROLOG_HIDDEN, _PROLOG_INNER = (6144, 7168, 7680), 1536
_INDEX_HEADS, _INDEX_DIM = 64, 128
_INDEX_PAGES = frozenset({"index_pages.v1"})
_FP8_LATENTS = frozenset({"float8_e4m3fn", FP8_GROUPS})
_ARCHS = ("ascend910b", "ascend910_93")


def _bytes_per_token(facts: Facts) -> int:
    return 2 * (facts.dims["kv_lora"] + facts.dims["qk_rope"])


LATENT_SPLIT = Layout(
    name="latent_split",
    version=2,
    allocate="ds_runtime_npu.cache:allocate",
    bytes_per_token=_bytes_per_token,
)


def _npu(facts: Facts) -> str | None:
    arch = facts.device.arch
    if not arch.startswith("ascend"):
        return f"runs on Ascend NPUs, not on {facts.device.family}"
    if arch not in _ARCHS:
        return f"made for {' and '.join(_ARCHS)}, not for {arch}"
    if "torch_npu" not in facts.device.features:
        return Fixable("torch-npu is not installed", install_command(EXTRA))
    return None


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


def _prolog(facts: Facts) -> str | None:
    hidden, inner, heads = (facts.dims.get(n, 0) for n in ("hidden", "q_lora", "heads"))
    if hidden not in _PROLOG_HIDDEN or inner != _PROLOG_INNER:
        sizes = " or ".join(map(str, _PROLOG_HIDDEN))
        wanted = f"{sizes} hidden values and {_PROLOG_INNER} of the query latent"
        return f"made for {wanted}, not {hidden} and {inner}"
    if heads & (heads - 1) or heads > 128:
        return f"takes a power of two of heads up to 128, not {heads}"
    return None


def _latents(facts: Facts) -> str | None:
    if facts.kv_dtype in _FP8_LATENTS:
        said = "Ascend 910 multiplies no FP8, and its cache holds no FP8 latents"
        return Fixable(said, "pass --kv-cache-dtype auto")
    return None


def _indexer(facts: Facts) -> str | None:
    dims = facts.dims
    heads, dim, keep = (dims.get(f"index_{n}", 0) for n in ("heads", "dim", "topk"))
    if heads > _INDEX_HEADS or dim != _INDEX_DIM:
        wanted = f"up to {_INDEX_HEADS} index heads of {_INDEX_DIM} values"
        return f"takes {wanted}, not {heads} of {dim}"
    if not (keep <= 2048 or (keep <= 8192 and keep % 1024 == 0)):
        return f"keeps up to 2048 tokens, or multiples of 1024 up to 8192, not {keep}"
    if facts.index_dtype != facts.dtype:
        said = f"reads index keys of the compute dtype {facts.dtype}, not {facts.index_dtype}"
        return Fixable(said, f"pass --index-cache-dtype {facts.dtype}")
    return None


def _offer(
    op: str,
    fn: str,
    *each: Gate,
    formats: frozenset[str] = frozenset(),
    rank: int = RANK_SPECIALISED,
    copies: float = 1,
    note: str = "",
) -> Kernel:
    layouts = {"": frozenset[str](), "kv": frozenset({LATENT_SPLIT.tag}), "index": _INDEX_PAGES}
    return Kernel(
        op=OPS[op],
        fn=f"ds_runtime_npu.{fn}",
        provider=PROVIDER,
        rank=rank,
        refuse=gates(_npu, *each),
        formats=formats,
        layouts=layouts[OPS[op].layout],
        phases=frozenset({"prefill", "decode", "verify"}),
        contract=_CONTRACTS.get(op, 1),
        copies=copies,
        note=note,
        numerics="int8_w8a8" if formats == _INT8 else "",
        keeps=formats & _INT8,
    )


_HALVES = checks.dtypes("bfloat16", "float16")
_PAGES = checks.page_multiples(16, most=1024, best=128)
_LATENT, _HEADS_192 = checks.latent(512, 64), checks.head_dims(128, 64, 128)
_CACHE = gates(_latents, _HALVES, checks.same_kv, _PAGES)
_MLA = gates(_latents, _HALVES, _LATENT, checks.heads(128), checks.same_kv, _PAGES)
ATTENTION: tuple[Kernel, ...] = (
    _offer(
        "mla_inputs",
        "inputs:MlaProlog",
        _latents,
        checks.dtypes("bfloat16"),
        _LATENT,
        _HEADS_192,
        _prolog,
        checks.same_kv,
        checks.page_sizes(16, 128),
        formats=_DENSE,
        note="keeps its weights beside those of prefill; --disable-fusion mla_inputs frees them",
    ),
    _offer(
        "mla_decode",
        "attention:MlaDecode",
        _MLA,
        note="takes lengths from the host: captured, it is told them at each replay",
    ),
    _offer("index_select", "indexer:index_select", _HALVES, _indexer, _PAGES),
    _offer("sparse_prefill", "attention:sparse_mla", _MLA),
    _offer("sparse_decode", "attention:sparse_mla", _MLA),
    _offer("mha_prefill", "attention:mha_prefill", _HALVES, _HEADS_192),
    _offer("merge_state", "attention:merge_state", _HALVES),
    _offer(
        "mla_absorb",
        "attention:MlaAbsorb",
        _HALVES,
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
    _offer("experts", "experts:ExpertsInt8", _HALVES, _whole(32), formats=_INT8),
    _offer("experts", "experts:Experts", _HALVES, _whole(16), formats=_DENSE, note=_WIDENED),
)
TOPK: tuple[Kernel, ...] = (
    _offer("route", "experts:choose", note="routings that the op does not know in torch"),
)
LINEAR: tuple[Kernel, ...] = (
    _offer("linear", "linear:LinearInt8", _HALVES, _whole(32), formats=_INT8),
    _offer("linear", "linear:LinearDense", formats=_DENSE, rank=RANK_PLATFORM, note=_WIDENED),
)
SMALL: tuple[Kernel, ...] = (
    _offer("rms_norm", "small:rms_norm", _HALVES),
    _offer("add_rms_norm", "small:add_rms_norm", _HALVES),
    _offer("rope", "small:rope"),
    _offer("silu_mul", "small:silu_mul", _HALVES),
)
