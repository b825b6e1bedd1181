"""`--quantize`: weights rounded to fewer bits while they are loaded.

Which Linear gets which format is decided from names alone, so that the plan shows it without
weights; the rounding itself is in `ops/reference/rounding.py`.
"""

from __future__ import annotations

from collections.abc import Callable

_FORMATS = {"int8": "int8_channel", "int4": "int4_group"}
_FROM = frozenset({"dense", "fp8_tensor", "fp8_channel", "fp8_block", "mxfp8", "int8_block"})


def target_format(quantize: str, module: str, stored: str) -> str:
    """The format that a Linear is packed from, given the checkpoint's own.

    The head is rounded to int8 at most: what it gets wrong, nothing after it repairs. kv_b stays
    as it is: decode multiplies by it from both sides, and it is small.
    """
    name = module.rpartition(".")[2]
    if quantize == "none" or stored not in _FROM or name == "kv_b_proj":
        return stored
    return "int8_channel" if name == "lm_head" else _FORMATS[quantize]


def with_target(quantize: str, format_of: Callable[[str], str]) -> Callable[[str], str]:
    """`format_of` after rounding."""
    return lambda module: target_format(quantize, module, format_of(module))
