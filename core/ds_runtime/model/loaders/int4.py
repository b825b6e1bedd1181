"""AWQ and GPTQ: 4-bit codes and zero points, packed eight to a word, and transposed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ds_runtime.errors import UnsupportedError, shown
from ds_runtime.model.loaders.encodings import expect
from ds_runtime.model.loaders.names import Names
from ds_runtime.ops.spec import DENSE, Encoding

_TENSORS = {"weight": "qweight", "scale": "scales", "zero": "qzeros"}
_ALWAYS_DENSE = Names(["lm_head", "embed_tokens", "gate"], "")


def awq(quantization: Mapping[str, Any]) -> Callable[[str], Encoding]:
    """`version` "gemm": words along the output rows, in AWQ's order of nibbles."""
    get = quantization.get
    expect("bits", get("bits", get("w_bit")), 4)
    expect("version", str(get("version", "gemm")).lower(), "gemm")
    expect("zero_point", get("zero_point", True), True)
    group = _group(get("group_size", get("q_group_size")))
    return _all_but(Encoding("int4_group", "awq", _TENSORS, block=(1, group)), quantization)


def gptq(quantization: Mapping[str, Any]) -> Callable[[str], Encoding]:
    """Words along the input columns; `desc_act` gives every column a group of its own choice.

    Where it is false, `g_idx` must name the groups in order: the layout sees to that.
    """
    get = quantization.get
    expect("bits", get("bits"), 4)
    expect("desc_act", get("desc_act", False), False, True)
    layout = get("checkpoint_format", "gptq")
    expect("checkpoint_format", layout, "gptq", "gptq_v2")
    group = _group(get("group_size"))
    if get("desc_act", False) and group:
        tensors = {**_TENSORS, "group": "g_idx"}
        encoding = Encoding("int4_actorder", layout, tensors, block=(1, group))
    else:
        encoding = Encoding("int4_group", layout, _TENSORS, unread=("g_idx",), block=(1, group))
    return _all_but(encoding, quantization)


def _group(size: object) -> int:
    """Columns per scale; −1 means the whole row."""
    if size == -1:
        return 0
    if isinstance(size, bool) or not isinstance(size, int) or size < 8 or size % 8:
        raise UnsupportedError(
            f"group_size {shown(size)} is not supported; expected a multiple of 8, or -1"
        )
    return size


def _all_but(encoding: Encoding, quantization: Mapping[str, Any]) -> Callable[[str], Encoding]:
    keys = ("modules_to_not_convert", "ignored_layers")
    kept = [_ALWAYS_DENSE, *(Names(quantization.get(key), key) for key in keys)]
    return lambda module: DENSE if any(module in names for names in kept) else encoding
