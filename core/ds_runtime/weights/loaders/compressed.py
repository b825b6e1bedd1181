"""compressed-tensors: groups of modules by name or class, each with its own scheme.

A name in `targets` counts before a regex, and both before the class "Linear"; `ignore` counts
before all. A module that no group targets is stored as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ds_runtime.errors import UnsupportedError, shown
from ds_runtime.ops.contract import DENSE, Encoding
from ds_runtime.weights.loaders.encodings import expect, in_blocks, mapping, rows, with_input_scale
from ds_runtime.weights.loaders.names import ModuleNames

_FORMATS = (  # of the whole checkpoint or of one group
    *("dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision"),
)
_CLASS = "Linear"


def compressed(quantization: Mapping[str, Any]) -> Callable[[str], Encoding]:
    """The encoding of each module by `config_groups` and `ignore`."""
    get = quantization.get
    overall = get("format", "dense")
    expect("format", overall, *_FORMATS)
    expect("quantization_status", get("quantization_status", "compressed"), "compressed", "frozen")
    sparsity = mapping("sparsity_config", get("sparsity_config")).get("format", "dense")
    expect("sparsity_config.format", sparsity, "dense")
    expect("transform_config", get("transform_config") or None, None)  # rotates what goes in
    ignored = ModuleNames(get("ignore"), "ignore")
    named: list[tuple[ModuleNames, Encoding]] = []
    matched: list[tuple[ModuleNames, Encoding]] = []  # by regex
    classes: list[Encoding] = []
    for group, scheme in mapping("config_groups", get("config_groups")).items():
        scheme = mapping(f"config_groups.{group}", scheme)
        encoding = _encoding(f"config_groups.{group}", scheme, scheme.get("format") or overall)
        names, regexes = ModuleNames.parted(scheme.get("targets"), f"config_groups.{group}.targets")
        named.append((names, encoding))
        matched.append((regexes, encoding))
        if _CLASS in names:
            classes.append(encoding)

    def of(module: str) -> Encoding:
        if module in ignored:
            return DENSE
        found = (encoding for targets, encoding in (*named, *matched) if module in targets)
        return next(found, classes[0] if classes else DENSE)

    return of


def _encoding(key: str, scheme: Mapping[str, Any], format: str) -> Encoding:
    """The encoding of one group of modules."""
    weights = mapping(f"{key}.weights", scheme.get("weights"))
    if not weights or format == "dense":
        return DENSE
    inputs = mapping(f"{key}.input_activations", scheme.get("input_activations"))
    key = f"{key}.weights"
    kind, bits = weights.get("type", "int"), weights.get("num_bits")
    expect(f"{key}.type", kind, "int", "float")
    makers = {
        ("int", 4): _int4,
        ("int", 8): _int8,
        ("float", 8): _float8,
        ("float", 4): _float4,
    }
    make = makers.get((str(kind), bits if isinstance(bits, int) else 0))
    if make is None:
        raise UnsupportedError(
            f"{key}.num_bits {shown(bits)} of type {kind!r} is not supported; expected 4 or 8"
        )
    return make(key, weights, inputs, format)


def _int4(key: str, weights: Mapping[str, Any], inputs: Mapping[str, Any], format: str) -> Encoding:
    expect("format", format, "pack-quantized", "int-quantized", "naive-quantized")
    group = _group(key, weights)
    symmetric, order = weights.get("symmetric", True), weights.get("actorder")
    expect(f"{key}.symmetric", symmetric, True, False)
    expect(f"{key}.actorder", order, None, False, True, "group", "weight", "static", "dynamic")
    fp8_inputs = inputs.get("type") == "float" and inputs.get("num_bits") == 8
    made = "w4afp8" if fp8_inputs and symmetric else "int4_group"
    if format != "pack-quantized":  # a code per byte
        expect(f"{key}.symmetric", symmetric, True)
        return replace(rows(made), block=(1, group))
    tensors = {"weight": "weight_packed", "scale": "weight_scale", "shape": "weight_shape"}
    if not symmetric:
        tensors["zero"] = "weight_zero_point"
    unread: tuple[str, ...] = () if not symmetric else ("weight_zero_point",)
    if order in (True, "group", "dynamic") and group:
        tensors["group"] = "weight_g_idx"
        return Encoding("int4_actorder", "words", tensors, unread=unread, block=(1, group))
    return Encoding(made, "words", tensors, unread=(*unread, "weight_g_idx"), block=(1, group))


def _group(key: str, weights: Mapping[str, Any]) -> int:
    """Columns per scale; 0 for whole rows."""
    strategy, size = weights.get("strategy"), weights.get("group_size")
    strategy = strategy or ("group" if size and size > 0 else "channel")
    expect(f"{key}.strategy", strategy, "group", "channel")
    if strategy == "channel":
        return 0
    if isinstance(size, bool) or not isinstance(size, int) or size < 8 or size % 8:
        raise UnsupportedError(
            f"{key}.group_size {shown(size)} is not supported; expected a multiple of 8"
        )
    return size


def _int8(key: str, weights: Mapping[str, Any], inputs: Mapping[str, Any], format: str) -> Encoding:
    expect("format", format, "int-quantized", "naive-quantized", "pack-quantized")
    symmetric, strategy = weights.get("symmetric", True), weights.get("strategy", "channel")
    expect(f"{key}.symmetric", symmetric, True, False)
    expect(f"{key}.actorder", weights.get("actorder"), None, False, "weight", "static")
    expect(f"{key}.strategy", strategy, "channel", "tensor", "block", "group")
    packed = format == "pack-quantized"
    if strategy == "block":
        expect("format", format, "int-quantized", "naive-quantized")
        expect(f"{key}.symmetric", symmetric, True)
        return in_blocks(f"{key}.block_structure", "int8", weights.get("block_structure"))
    if strategy == "tensor" and (packed or not symmetric):
        expect(f"{key}.strategy", strategy, "channel", "group")
    if strategy != "group" and symmetric and not packed:
        return with_input_scale(rows("int8_channel"))
    group = _group(key, weights) if strategy == "group" else 0
    made = "int8_group" if group or not symmetric else "int8_channel"
    tensors = {"weight": "weight_packed" if packed else "weight", "scale": "weight_scale"}
    if packed:
        tensors["shape"] = "weight_shape"
    unread: tuple[str, ...] = ("weight_g_idx",)
    if symmetric:
        unread += ("weight_zero_point",)
    else:
        tensors["zero"] = "weight_zero_point"
    return Encoding(made, "words" if packed else "rows", tensors, unread=unread, block=(1, group))


def _float8(
    key: str, weights: Mapping[str, Any], inputs: Mapping[str, Any], format: str
) -> Encoding:
    expect("format", format, "float-quantized", "naive-quantized", "mxfp8-quantized")
    expect(f"{key}.symmetric", weights.get("symmetric", True), True)
    strategy = weights.get("strategy", "tensor")
    expect(f"{key}.strategy", strategy, "tensor", "channel", "block", "group")
    if strategy == "block":
        return in_blocks(f"{key}.block_structure", "fp8", weights.get("block_structure"))
    if strategy == "group" and format != "mxfp8-quantized":
        return replace(rows("fp8_group"), block=(1, _group(key, weights)))
    if strategy == "group":
        expect(f"{key}.group_size", weights.get("group_size"), 32)
        return rows("mxfp8")
    return with_input_scale(rows(f"fp8_{strategy}"))


def _float4(
    key: str, weights: Mapping[str, Any], inputs: Mapping[str, Any], format: str
) -> Encoding:
    expect("format", format, "nvfp4-pack-quantized", "mxfp4-pack-quantized")
    tensors = {"weight": "weight_packed", "scale": "weight_scale"}
    if format.startswith("mx"):
        expect(f"{key}.group_size", weights.get("group_size", 32), 32)
        return Encoding("mxfp4", "nibbles", tensors)
    expect(f"{key}.group_size", weights.get("group_size", 16), 16)
    tensors |= {"global": "weight_global_scale", "input_scale": "input_global_scale"}
    optional = frozenset({"input_scale"})
    return Encoding("nvfp4", "nibbles", tensors, optional, divides=True)
