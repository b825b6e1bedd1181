"""The built-in plugin "reference": one torch kernel per op, the plain cache layout, two loaders.

It enters through the same hooks as every plugin, at rank 0: what nobody else offers runs here.
Torch-free at import; the kernels are in the sibling files, one per area.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ds_runtime.errors import shown
from ds_runtime.hookspecs import hookimpl
from ds_runtime.ops.spec import RANK_REFERENCE, Facts, Kernel, Layout, QuantLoader
from ds_runtime.ops.table import OPS

PROVIDER = "reference"
FORMATS = frozenset({"dense", "fp8_block"})
_OWNS_WEIGHTS = frozenset({"linear", "experts", "mla_absorb"})
_HOST_LOOPS = frozenset({"mla_decode", "experts", "mha_prefill", "cache_gather", "sample"})
_KEPT_DENSE = frozenset(
    {"lm_head", "head", "embed", "embed_tokens", "gate", "eh_proj", "norm", "enorm", "hnorm"}
)
_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def _bytes_per_token(facts: Facts) -> int:
    return (facts.dims["kv_lora"] + facts.dims["qk_rope"]) * _ITEM_BYTES[facts.kv_dtype]


LATENT_PAGES = Layout(
    name="latent_pages",
    version=1,
    allocate="ds_runtime.ops.reference.cache:allocate_latent_pages",
    bytes_per_token=_bytes_per_token,
)


def _refuse_kv_dtype(facts: Facts) -> str | None:
    if facts.kv_dtype in _ITEM_BYTES:
        return None
    return f"latent_pages holds {', '.join(_ITEM_BYTES)} rows, not {facts.kv_dtype}"


def _accept(facts: Facts) -> str | None:
    return None


def _offer(name: str) -> Kernel:
    op = OPS[name]
    return Kernel(
        op=op,
        fn=op.reference,
        provider=PROVIDER,
        rank=RANK_REFERENCE,
        refuse=_refuse_kv_dtype if op.layout == "kv" else _accept,
        formats=FORMATS if op.name in _OWNS_WEIGHTS else frozenset(),
        layouts=frozenset({LATENT_PAGES.tag}) if op.layout == "kv" else frozenset(),
        phases=frozenset({"prefill", "decode", "verify"}),
        graph_safe=op.name not in _HOST_LOOPS,
        source="ds_runtime.ops.reference",
    )


FP8_W8A8 = Kernel(
    op=OPS["linear"],
    fn="ds_runtime.ops.reference.linear:Fp8W8A8Linear",
    provider=PROVIDER,
    rank=RANK_REFERENCE - 1,  # below the plain reference: only a pin selects it
    formats=frozenset({"fp8_block"}),
    phases=frozenset({"prefill", "decode", "verify"}),
    note="FP8 arithmetic step by step, for comparing numerics; slow",
    source="ds_runtime.ops.reference",
    numerics="fp8_w8a8",
    keeps=frozenset({"fp8_block"}),
)


@hookimpl
def ds_attention(facts: Facts) -> Sequence[Kernel | Layout]:
    names = (
        "mha_prefill",
        "merge_state",
        "mla_decode",
        "mla_absorb",
        "mla_prologue",
        "cache_write",
        "cache_gather",
    )
    return [LATENT_PAGES, *(_offer(name) for name in names)]


@hookimpl
def ds_moe(facts: Facts) -> Sequence[Kernel]:
    return [_offer("experts")]


@hookimpl
def ds_topk(facts: Facts) -> Sequence[Kernel]:
    return [_offer("router_logits"), _offer("route")]


@hookimpl
def ds_ops(facts: Facts) -> Sequence[Kernel]:
    names = (
        "embed",
        "quantize_group",
        "rms_norm",
        "add_rms_norm",
        "rope",
        "silu_mul",
        "sample",
        "logprobs",
    )
    return [_offer(name) for name in names]


def _accepts_dense(quantization: Mapping[str, Any]) -> bool:
    return not quantization


def _format_dense(quantization: Mapping[str, Any], module: str) -> str:
    return "dense"


def _accepts_fp8(quantization: Mapping[str, Any]) -> bool:
    return quantization.get("quant_method") == "fp8" and _refuse_fp8(quantization) is None


def _refuse_fp8(quantization: Mapping[str, Any]) -> str | None:
    """Which value of an fp8 quantization_config is not read."""
    get = quantization.get
    if get("quant_method") != "fp8":
        return None
    reads = (
        ("weight_block_size", get("weight_block_size") in ([128, 128], (128, 128)), "[128, 128]"),
        (
            "modules_to_not_convert",
            _are_names(get("modules_to_not_convert")),
            "a list of module names",
        ),
        ("fmt", get("fmt", "e4m3") == "e4m3", "'e4m3'"),
        ("activation_scheme", get("activation_scheme", "dynamic") == "dynamic", "'dynamic'"),
    )
    for key, fine, wanted in reads:
        if not fine:
            return f"{key} {shown(get(key))} is not supported; expected {wanted}"
    return None


def _are_names(value: object) -> bool:
    return value is None or (
        isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)
    )


def _segments(path: str) -> list[str]:
    return path.removeprefix("model.").removesuffix(".weight").split(".")


def _names(entry: str, module: str) -> bool:
    """Whether `entry` names `module`, a parent of it, or a part of its path."""
    part, whole = _segments(entry), _segments(module)
    return any(whole[i : i + len(part)] == part for i in range(len(whole) - len(part) + 1))


def _format_fp8(quantization: Mapping[str, Any], module: str) -> str:
    last = _segments(module)[-1]
    if last in _KEPT_DENSE or last.endswith("norm"):
        return "dense"
    kept = quantization.get("modules_to_not_convert") or ()
    return "dense" if any(_names(entry, module) for entry in kept) else "fp8_block"


_DENSE_COMPONENTS = {"dense": ("weight",)}


@hookimpl
def ds_quant_loaders(facts: Facts) -> Sequence[QuantLoader | Kernel]:
    read = "ds_runtime.model.quant:read_part"
    dense = QuantLoader(
        name="dense",
        accepts=_accepts_dense,
        format_of=_format_dense,
        components=_DENSE_COMPONENTS,
        read=read,
        provider=PROVIDER,
    )
    fp8 = QuantLoader(
        name="fp8",
        accepts=_accepts_fp8,
        format_of=_format_fp8,
        components={**_DENSE_COMPONENTS, "fp8_block": ("weight", "weight_scale_inv")},
        read=read,
        provider=PROVIDER,
        refuse=_refuse_fp8,
    )
    return [dense, fp8, _offer("linear"), FP8_W8A8]
