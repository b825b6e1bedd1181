"""Quark: one config for all Linears, others for the layers that `layer_quant_config` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ds_runtime.errors import UnsupportedError, shown
from ds_runtime.ops.contract import DENSE, Encoding
from ds_runtime.weights.loaders.encodings import (
    BLOCK,
    MXFP4,
    expect,
    in_blocks,
    mapping,
    rows,
    with_input_scale,
)
from ds_runtime.weights.loaders.names import ModuleNames

_FLOAT8 = ("fp8_e4m3", "fp8_e4m3fn")
_SCHEMES = {"per_tensor": "tensor", "per_channel": "channel"}


def quark(quantization: Mapping[str, Any]) -> Callable[[str], Encoding]:
    """The encoding of each module: `exclude` first, then its layer's config, then the global."""
    get = quantization.get
    excluded = ModuleNames(get("exclude"), "exclude")
    layers = [
        (ModuleNames([name], "layer_quant_config"), _encoding(f"layer_quant_config.{name}", config))
        for name, config in mapping("layer_quant_config", get("layer_quant_config")).items()
    ]
    kinds = mapping("layer_type_quant_config", get("layer_type_quant_config"))
    every = _encoding("global_quant_config", kinds.get("Linear", get("global_quant_config")))

    def of(module: str) -> Encoding:
        if module in excluded:
            return DENSE
        return next((encoding for names, encoding in layers if module in names), every)

    return of


def _encoding(key: str, config: object) -> Encoding:
    weight = mapping(key, config).get("weight")
    if weight is None:
        return DENSE
    key = f"{key}.weight"
    spec = mapping(key, weight)
    dtype, scheme = spec.get("dtype"), spec.get("qscheme")
    expect(f"{key}.is_dynamic", spec.get("is_dynamic") or False, False)
    if dtype in ("fp4", "mxfp4", "mx"):
        expect(f"{key}.qscheme", scheme, "per_group")
        expect(f"{key}.group_size", spec.get("group_size"), 32)
        expect(f"{key}.scale_format", spec.get("scale_format", "e8m0"), "e8m0")
        return MXFP4
    if dtype in _FLOAT8 and scheme == "per_block":
        return in_blocks(f"{key}.block_size", "fp8", spec.get("block_size", BLOCK))
    if dtype in _FLOAT8 and scheme == "per_group":
        expect(f"{key}.group_size", spec.get("group_size"), 32)
        return rows("mxfp8")
    kind = _SCHEMES.get(str(scheme))
    if dtype in _FLOAT8 and kind:
        return with_input_scale(rows(f"fp8_{kind}"))
    if dtype == "int8" and kind:
        return with_input_scale(rows("int8_channel"))
    raise UnsupportedError(
        f"{key} of dtype {shown(dtype)} and qscheme {shown(scheme)} is not supported; expected "
        "fp4 per_group, fp8_e4m3 or int8"
    )
