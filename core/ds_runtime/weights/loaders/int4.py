"""AWQ and GPTQ: 4-bit codes and zero points, packed eight to a word, and transposed.

GPTQModel's `dynamic` says of modules, by regex, what differs from the rest of the config, and
optimum's `modules_in_block_to_quantize` which modules are quantised at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ds_runtime.errors import UnsupportedError, shown
from ds_runtime.ops.contract import DENSE, Encoding
from ds_runtime.weights.loaders.encodings import expect, mapping
from ds_runtime.weights.loaders.names import ModuleNames, compiled, not_converted

_TENSORS = {"weight": "qweight", "scale": "scales", "zero": "qzeros"}
_PLAIN = re.compile(r"[\w.-]+")
_KEPT = ("modules_to_not_convert", "ignored_layers")
_ALWAYS_DENSE = ModuleNames(["lm_head", "embed_tokens", "gate"], "")


def awq(quantization: Mapping[str, Any]) -> Callable[[str], Encoding]:
    """`version` "gemm": words along the output rows, in AWQ's order of nibbles."""
    return _by_module(quantization, _awq)


def gptq(quantization: Mapping[str, Any]) -> Callable[[str], Encoding]:
    """Words along the input columns; `desc_act` gives every column a group of its own choice.

    Where it is false, `g_idx` must name the groups in order: the layout sees to that.
    """
    listed, of = _quantised(quantization), _by_module(quantization, _gptq)
    return of if listed is None else lambda module: of(module) if listed(module) else DENSE


_LISTED = "modules_in_block_to_quantize"


def _quantised(quantization: Mapping[str, Any]) -> Callable[[str], bool] | None:
    """Whether a module is quantised, or None where no list says which are.

    Lists of lists, or one of all: names are ends of paths, as in optimum, or whole parts of them,
    as programs find them that serve such checkpoints.
    """
    said = quantization.get(_LISTED)
    if not said:
        return None
    entries: list[Any] = []
    if isinstance(said, list | tuple):
        for each in said:
            entries += each if isinstance(each, list | tuple) else [each]
    if not entries or not all(isinstance(e, str) and e.strip(".") for e in entries):
        raise UnsupportedError(
            f"{_LISTED} {shown(said)} is not supported; expected lists of module names"
        )
    names, ends = ModuleNames([e for e in entries if _PLAIN.fullmatch(e)], _LISTED), tuple(entries)
    return lambda module: module.endswith(ends) or module in names


def _awq(quantization: Mapping[str, Any]) -> Encoding:
    get = quantization.get
    expect("bits", get("bits", get("w_bit")), 4)
    expect("version", str(get("version", "gemm")).lower(), "gemm")
    expect("zero_point", get("zero_point", True), True)
    group = _group(get("group_size", get("q_group_size")))
    return Encoding("int4_group", "awq", _TENSORS, block=(1, group))


def _gptq(quantization: Mapping[str, Any]) -> Encoding:
    get = quantization.get
    expect("bits", get("bits"), 4)
    expect("desc_act", get("desc_act", False), False, True)
    layout = get("checkpoint_format", "gptq")
    expect("checkpoint_format", layout, "gptq", "gptq_v2")
    group = _group(get("group_size"))
    if get("desc_act", False) and group:
        tensors = {**_TENSORS, "group": "g_idx"}
        return Encoding("int4_actorder", layout, tensors, block=(1, group))
    return Encoding("int4_group", layout, _TENSORS, unread=("g_idx",), block=(1, group))


def _group(size: object) -> int:
    """Columns per scale; −1 means the whole row."""
    if size == -1:
        return 0
    if isinstance(size, bool) or not isinstance(size, int) or size < 8 or size % 8:
        raise UnsupportedError(
            f"group_size {shown(size)} is not supported; expected a multiple of 8, or -1"
        )
    return size


def _by_module(
    quantization: Mapping[str, Any], encoding_of: Callable[[Mapping[str, Any]], Encoding]
) -> Callable[[str], Encoding]:
    """The lists of dense modules first, then the first entry of `dynamic` that matches."""
    every = encoding_of(quantization)
    kept = [_ALWAYS_DENSE, *not_converted(quantization, _KEPT)]
    dynamic = _dynamic(quantization, encoding_of)

    def of(module: str) -> Encoding:
        if any(module in names for names in kept):
            return DENSE
        return next((e for regex, e in dynamic if regex.match(module)), every)

    return of


def _dynamic(
    quantization: Mapping[str, Any], encoding_of: Callable[[Mapping[str, Any]], Encoding]
) -> list[tuple[re.Pattern[str], Encoding]]:
    """(regex for the beginning of a path, encoding) of each entry: "-:REGEX" leaves modules dense,
    "+:REGEX" and REGEX give them other values of the config's keys."""
    found = []
    for entry, said in mapping("dynamic", quantization.get("dynamic")).items():
        key = f"dynamic.{entry}"
        regex = compiled(entry.removeprefix("-:").removeprefix("+:"), key)
        other = mapping(key, said)
        if entry.startswith("-:"):
            found.append((regex, DENSE))
            continue
        try:
            found.append((regex, encoding_of({**quantization, **other})))
        except UnsupportedError as e:
            raise UnsupportedError(f"{key}: {e}") from e
    return found
