"""Encodings that several kinds of checkpoint share, and checks of the values that choose them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ds_runtime.errors import UnsupportedError, shown
from ds_runtime.ops.contract import Encoding

BLOCK = [128, 128]


def expect(key: str, value: object, *allowed: object) -> None:
    """UnsupportedError unless the value is one of those."""
    if not any(value == a and type(value) is type(a) for a in allowed):
        wanted = " or ".join(repr(a) for a in allowed)
        raise UnsupportedError(f"{key} {shown(value)} is not supported; expected {wanted}")


def mapping(key: str, value: object) -> Mapping[str, Any]:
    """The value, or {} for None; UnsupportedError if it is no JSON object."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UnsupportedError(f"{key} {shown(value)} is not supported; expected an object")
    return value


def rows(format: str, scale: str = "weight_scale") -> Encoding:
    """Codes one by one in [out, in], with scales next to them."""
    return Encoding(format, "rows", {"weight": "weight", "scale": scale})


def in_blocks(key: str, kind: str, size: object, scale: str = "weight_scale") -> Encoding:
    """Codes of a kind, "fp8" or "int8", with a scale per block of `size` rows and columns."""
    if size == "128x128":
        size = BLOCK
    pair = list(size) if isinstance(size, list | tuple) else []
    if len(pair) != 2 or not all(type(n) is int and n > 0 for n in pair):
        raise UnsupportedError(
            f"{key} {shown(size)} is not supported; expected [rows, columns], such as {BLOCK}"
        )
    if pair == BLOCK:
        return rows(f"{kind}_block", scale)
    return replace(rows(f"{kind}_group", scale), block=(pair[0], pair[1]))


def with_input_scale(encoding: Encoding) -> Encoding:
    """The same, where a static scale of activations may lie next to it."""
    return replace(
        encoding,
        tensors={**encoding.tensors, "input_scale": "input_scale"},
        optional=encoding.optional | {"input_scale"},
    )


NVFP4 = Encoding(
    "nvfp4",
    "nibbles",
    {"weight": "weight", "scale": "weight_scale", "global": "weight_scale_2"}
    | {"input_scale": "input_scale"},
    frozenset({"input_scale"}),
)
MXFP4 = Encoding("mxfp4", "nibbles", {"weight": "weight", "scale": "weight_scale"})
