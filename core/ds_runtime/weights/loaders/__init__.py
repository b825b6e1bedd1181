"""The built-in plugin "checkpoints": a loader for each way in which DeepSeek weights are published.

Torch-free: what is read how is decided from config and names; `weights/quant.py` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ds_runtime.common.hookimpl import hookimpl
from ds_runtime.errors import UnsupportedError
from ds_runtime.ops.contract import Encoding, Facts, QuantLoader
from ds_runtime.weights.loaders import compressed, gguf, int4, modelopt, native, quark

PROVIDER = "checkpoints"
Quantization = Mapping[str, Any]


def _method(*names: str) -> Callable[[Quantization], bool]:
    """Whether quant_method is one of these, and no other file speaks."""

    def owns(quantization: Quantization) -> bool:
        method = str(quantization.get("quant_method", "")).lower()
        return method in names and not modelopt.owns(quantization)

    return owns


def _mxfp8(quantization: Quantization) -> bool:
    method = str(quantization.get("quant_method", "")).lower()
    return "mxfp8" in method and not modelopt.owns(quantization)


_LOADERS: Sequence[
    tuple[str, Callable[[Quantization], bool], Callable[[Quantization], Callable[[str], Encoding]]]
] = (
    ("dense", lambda quantization: not quantization, native.plain),
    ("fp8", _method("fp8"), native.fp8),
    ("int8", _method("w8a8_int8", "blockwise_int8"), native.int8),
    ("mxfp8", _mxfp8, native.mxfp8),
    ("awq", _method("awq"), int4.awq),
    ("gptq", _method("gptq"), int4.gptq),
    ("compressed-tensors", _method("compressed-tensors"), compressed.compressed),
    ("modelopt", modelopt.owns, modelopt.modelopt),
    ("quark", _method("quark"), quark.quark),
)


def _loader(
    name: str,
    owns: Callable[[Quantization], bool],
    encodings: Callable[[Quantization], Callable[[str], Encoding]],
    read: str = "ds_runtime.weights.quant:read_part",
) -> QuantLoader:
    def refuse(quantization: Quantization) -> str | None:
        if not owns(quantization):
            return None
        try:
            encodings(quantization)
        except UnsupportedError as e:
            return str(e)
        return None

    def accepts(quantization: Quantization) -> bool:
        return owns(quantization) and refuse(quantization) is None

    return QuantLoader(name, accepts, encodings, read, PROVIDER, refuse)


@hookimpl
def ds_quant_loaders(facts: Facts) -> Sequence[QuantLoader]:
    files = _loader(gguf.METHOD, _method(gguf.METHOD), gguf.gguf, gguf.READ)
    return [*(_loader(*each) for each in _LOADERS), files]
