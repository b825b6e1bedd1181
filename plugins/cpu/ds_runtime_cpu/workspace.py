"""Bytes that native kernels hold in a call, as their sources divide it. Torch-free."""

from __future__ import annotations

from ds_runtime.api import Facts

_SLICE, _ROWS = 1024, 64  # csrc/mla_decode.cpp: query rows of a slice, and of a unit
_VECTOR, _KEYS = 16, 192  # floats of a vector, keys of a block: at most, of any instruction set
_UNIT, _LINE = 64, 64  # bytes of a unit, and that every part begins at
_PARTS = 16  # of a thread's memory, each at a line


def mla_decode(facts: Facts, rows: int) -> int:
    """Bytes at most: partial results of the ranges that the longest sequences are divided into,
    for the rows of a slice, and what each of this rank's threads needs."""
    heads, latent = facts.dims["heads"], facts.dims["kv_lora"]
    width, item = latent + facts.dims["qk_rope"], 2 if facts.dtype == "bfloat16" else 4
    tokens = min(rows, max(1, _SLICE // heads))
    ranges, columns = _ranges(facts.context), _up(latent, 2 * _VECTOR) + _VECTOR
    partial = tokens * _up(heads, _VECTOR) * ranges * (columns + 2) * 4 if ranges > 1 else 0
    units = tokens * -(-heads // _ROWS) * ranges * _UNIT
    blocks = 2 * _KEYS * _up(width, 32) + _KEYS * (_ROWS + 8 * _VECTOR)  # widened, staged, turned
    desk = item * (_ROWS * _up(width, 32) + blocks)
    desk += 4 * (_KEYS * _ROWS + _ROWS * columns + 6 * _ROWS) + _PARTS * _LINE
    return partial + units + facts.threads * desk + 5 * _LINE


def _ranges(context: int) -> int:
    """At most, of a sequence of so many keys or fewer: struct Ranges of csrc/mla_decode.cpp."""
    most = 1
    while context >= 512 * most and (most < 16 or context > 1024 * most):
        most *= 2
    return most if most <= 2 else most + 14  # short ones in place of the last two


def _up(n: int, step: int) -> int:
    return -(-n // step) * step
