"""Checkpoints whose quant_method names one format for all: none, fp8, int8 and mxfp8."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ds_runtime.ops.contract import DENSE, Encoding
from ds_runtime.weights.loaders.encodings import MXFP4, expect, in_blocks, rows
from ds_runtime.weights.loaders.names import is_routed, kept_dense, not_converted

_KEPT = ("modules_to_not_convert", "ignored_layers", "ignore")


def plain(quantization: Mapping[str, Any]) -> Callable[[str], Encoding]:
    """Everything in 16 or 32 bits."""
    return lambda module: DENSE


def fp8(quantization: Mapping[str, Any]) -> Callable[[str], Encoding]:
    """DeepSeek's own: e4m3 in blocks, scales as floats or as exponent bytes. V4's config names the
    dtype of experts, which may be two e2m1 in a byte, and its scales have another name."""
    get = quantization.get
    expect("expert_dtype", experts := get("expert_dtype"), None, "fp4", "fp8")
    scale = "weight_scale_inv" if experts is None else "scale"
    encoding = in_blocks("weight_block_size", "fp8", get("weight_block_size"), scale)
    expect("fmt", get("fmt", "e4m3"), "e4m3")
    expect("activation_scheme", get("activation_scheme", "dynamic"), "dynamic")
    others = all_but(encoding, quantization)
    if experts != "fp4":
        return others
    pairs = replace(MXFP4, tensors={"weight": "weight", "scale": scale})
    return lambda m: pairs if is_routed(m) else others(m)


def int8(quantization: Mapping[str, Any]) -> Callable[[str], Encoding]:
    """int8 with a scale per row, or per block; activations are rounded as they come."""
    encoding = rows("int8_channel")
    if quantization["quant_method"] == "blockwise_int8":
        size = quantization.get("weight_block_size")
        encoding = in_blocks("weight_block_size", "int8", size, "weight_scale_inv")
    scheme = quantization.get("activation_scheme", "dynamic")
    expect("activation_scheme", scheme, "dynamic")
    expect("is_dynamic", quantization.get("is_dynamic", True), True)
    return all_but(encoding, quantization)


def mxfp8(quantization: Mapping[str, Any]) -> Callable[[str], Encoding]:
    """e4m3 with an exponent byte per 32 columns."""
    size = _listed(quantization.get("weight_block_size", [1, 32]))
    expect("weight_block_size", size, [1, 32])
    return all_but(rows("mxfp8", "weight_scale_inv"), quantization)


def all_but(encoding: Encoding, quantization: Mapping[str, Any]) -> Callable[[str], Encoding]:
    """This encoding for every Linear that native checkpoints quantise, less those listed."""
    kept = not_converted(quantization, _KEPT)
    return lambda m: DENSE if kept_dense(m) or any(m in names for names in kept) else encoding


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
