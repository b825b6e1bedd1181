"""ModelOpt's exports (NVFP4, FP8, MXFP8, mixed) and W4AFP8, which borrows their file.

The config is hf_quant_config.json, or the same embedded in config.json; where both are there,
they must agree. `kv_cache_quant_algo` and the k_scale and v_scale tensors are calibrated for a
cache that holds keys and values; this runtime caches latents, and leaves them unread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ds_runtime.description.hf import QUANT_FILE as FILE
from ds_runtime.errors import UnsupportedError, shown
from ds_runtime.ops.contract import DENSE, Encoding
from ds_runtime.weights.loaders import native
from ds_runtime.weights.loaders.encodings import NVFP4, expect, mapping, rows, with_input_scale
from ds_runtime.weights.loaders.names import ModuleNames, is_routed

W4AFP8 = Encoding(
    "w4afp8",
    "nibbles",
    {"weight": "weight", "scale": "weight_scale_inv"},
    frozenset({"input_scale"}),
)
_OLD_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_ALGOS = {
    "NVFP4": NVFP4,
    "FP8": with_input_scale(rows("fp8_tensor")),
    "FP8_PER_CHANNEL_PER_TOKEN": rows("fp8_channel"),
    "MXFP8": rows("mxfp8"),
}
_MIXED = ("MIXED_PRECISION", "W4AFP8")


def owns(quantization: Mapping[str, Any]) -> bool:
    """Whether this is such an export."""
    method = str(quantization.get("quant_method", "")).lower()
    return (
        FILE in quantization
        or method.startswith("modelopt")
        or method == "w4afp8"
        or "quant_algo" in quantization
    )


def modelopt(quantization: Mapping[str, Any]) -> Callable[[str], Encoding]:
    """The encoding of each module by algorithm, exclude list and quantised layers."""
    config = _agreed(quantization)
    algo = config.get("quant_algo")
    if str(quantization.get("quant_method", "")).lower() == "w4afp8":
        algo = algo or "W4AFP8"
    expect("quant_algo", algo, *_ALGOS, *_MIXED)
    excluded = [ModuleNames(config.get(key), key) for key in ("exclude_modules", "ignore")]
    if algo in _MIXED:
        inner = _mixed(quantization, config)
    else:
        if algo == "NVFP4":
            expect("group_size", config.get("group_size", 16), 16)
        encoding = _ALGOS[str(algo)]

        def inner(module: str) -> Encoding:
            return encoding

    return lambda m: DENSE if any(m in names for names in excluded) else inner(m)


def _agreed(quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one config of both files; UnsupportedError if they say different things."""
    file = mapping(FILE, quantization.get(FILE))
    stated = mapping(f"{FILE}: quantization", file.get("quantization", file))
    embedded = {k: v for k, v in quantization.items() if k != FILE}
    method = str(embedded.get("quant_method", "")).lower()
    if stated and method not in ("", "fp8", "w4afp8") and not method.startswith("modelopt"):
        raise UnsupportedError(
            f"quant_method {shown(embedded['quant_method'])} of config.json and quant_algo "
            f"{shown(stated.get('quant_algo'))} of {FILE} contradict each other; remove the file "
            "that does not belong to the weights"
        )
    for key in ("quant_algo", "group_size"):
        here, there = embedded.get(key), stated.get(key)
        if here is not None and there is not None and here != there:
            raise UnsupportedError(
                f"{key} is {shown(here)} in config.json and {shown(there)} in {FILE}; remove the "
                "file that does not belong to the weights"
            )
    return {**embedded, **stated}


def _mixed(quantization: Mapping[str, Any], config: Mapping[str, Any]) -> Callable[[str], Encoding]:
    """By `quantized_layers`; without NVFP4 among them, routed experts are W4AFP8. The rest is
    native FP8, unless the layers are listed and config.json does not speak of FP8 blocks."""
    layers = mapping("quantized_layers", config.get("quantized_layers"))
    algos: dict[str, list[str]] = {}
    for name, layer in layers.items():
        algo = mapping(f"quantized_layers.{name}", layer).get("quant_algo")
        expect(f"quantized_layers.{name}.quant_algo", algo, *_ALGOS, "W4A8_AWQ", "W4AFP8", "FP8_PB")
        algos.setdefault(str(algo), []).append(name)
    listed = [(ModuleNames(names, "quantized_layers"), algo) for algo, names in algos.items()]
    if "NVFP4" not in algos:
        expect("group_size", config.get("group_size"), None, 128)
    blocks = "weight_block_size" in quantization or "NVFP4" not in algos
    rest = native.fp8({"weight_block_size": [128, 128], **_native(quantization)})

    def of(module: str) -> Encoding:
        algo = next((a for names, a in listed if module in names), "")
        if algo in _ALGOS and (algo == "NVFP4" or "NVFP4" in algos):
            return _ALGOS[algo]
        if "NVFP4" not in algos and is_routed(module):
            return w4afp8(module)
        return rest(module) if blocks else DENSE

    return of


def _native(quantization: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("weight_block_size", "fmt", "activation_scheme", "modules_to_not_convert")
    return {k: quantization[k] for k in keys if quantization.get(k) is not None}


def w4afp8(module: str) -> Encoding:
    """Two's complement nibbles, native block scales for the rest; input scales go by w1, w2, w3."""
    name = module.rpartition(".")[2]
    if name not in _OLD_NAMES:
        return W4AFP8
    tensors = {**W4AFP8.tensors, "input_scale": f"../{_OLD_NAMES[name]}.input_scale"}
    return Encoding("w4afp8", "nibbles", tensors, W4AFP8.optional, ("input_scale",))
