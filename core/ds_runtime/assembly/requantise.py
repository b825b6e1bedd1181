"""`--quantize` and its like for drafts: weights rounded to fewer bits while they are loaded.

Which Linear gets which format is decided from names alone, so that the plan shows it without
weights; the rounding itself is in `ops/reference/matrices/rounding.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TYPE_CHECKING

from ds_runtime.description.structure import EXPERTS, HEAD, JOIN, KV_B
from ds_runtime.errors import ConfigError

if TYPE_CHECKING:
    from ds_runtime.config import EngineConfig

DRAFT_FORMAT, _COLUMNS = "fp8_block", 128  # that share a scale
DRAFT_EXPERTS = "w4afp8"
_FORMATS = {"int8": "int8_channel", "int4": "int4_group"}
_FROM = frozenset({"dense", "fp8_tensor", "fp8_channel", "fp8_block", "mxfp8", "int8_block"})


def target_format(quantize: str, module: str, stored: str) -> str:
    """The format that a Linear is packed from, given the checkpoint's own.

    The head is rounded to int8 at most: what it gets wrong, nothing after it repairs. kv_b stays
    as it is: decode multiplies by it from both sides, and it is small.
    """
    name = module.rpartition(".")[2]
    if quantize == "none" or stored not in _FROM or name == KV_B:
        return stored
    return "int8_channel" if name == HEAD else _FORMATS[quantize]


def with_target(quantize: str, format_of: Callable[[str], str]) -> Callable[[str], str]:
    """`format_of` after rounding."""
    return lambda module: target_format(quantize, module, format_of(module))


def rounds_drafts(
    config: EngineConfig, head: str, hidden: int, fast_dtypes: Container[str]
) -> bool:
    """Whether what drafts alone are made by is rounded to FP8. head: the format of the model's.
    ConfigError where that was asked for and the head has few bits already."""
    asked = config.speculative_draft_quantize
    if asked == "fp8" and head != "dense":
        raise ConfigError(
            f"--speculative-draft-quantize fp8: the head is {head} already, and is not rounded "
            "again: leave the flag out"
        )
    fits = head == "dense" and config.dtype != "float32" and hidden % _COLUMNS == 0
    return asked == "fp8" or (asked != "none" and fits and "float8_e4m3fn" in fast_dtypes)


def with_fp8_drafts(format_of: Callable[[str], str]) -> Callable[[str], str]:
    """`format_of` of a draft layer's modules, with their join rounded to FP8 where it is dense."""

    def found(module: str) -> str:
        format = format_of(module)
        return DRAFT_FORMAT if format == "dense" and module.endswith(f".{JOIN}") else format

    return found


def with_w4afp8_experts(
    format_of: Callable[[str], str], stored: Callable[[str], str], has_experts: bool
) -> Callable[[str], str]:
    """`format_of` of a draft layer's modules, with its routed experts rounded to int4. stored: the
    checkpoint's own. ConfigError where there are none, and from what is returned where they are
    not rounded again."""
    if not has_experts:
        raise ConfigError(
            f"--speculative-draft-quantize {DRAFT_EXPERTS}: the draft layer has no routed experts: "
            "leave the flag out"
        )

    def found(module: str) -> str:
        if f".{EXPERTS}." not in module:
            return format_of(module)
        if (format := stored(module)) not in _FROM:
            raise ConfigError(
                f"--speculative-draft-quantize {DRAFT_EXPERTS}: {module} is {format} already, and "
                "is not rounded again: leave the flag out"
            )
        return DRAFT_EXPERTS

    return found
