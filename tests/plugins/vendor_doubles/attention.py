"""What csrc/attention.cu does, for a host: over the addresses that its launch is given.

Stands in for ds_runtime_cuda.nvrtc.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ds_runtime.ops.batch import Segments
from ds_runtime.ops.reference.attention.dense import mha_prefill
from ds_runtime_cuda.quant import groups_of
from vendor_doubles import require
from vendor_doubles.experts_streaming import BF16, F32, FP8, I32, at, cores, module

__all__ = ["box_map", "cores", "launch", "module"]


def box_map(address: int, dtype: torch.dtype, rows: int, columns: int, box_rows: int, pitch: int):
    require(dtype == BF16 and address % 16 == 0 == pitch % 8, "whole 16 bytes of bfloat16")
    require(rows > 0 and 0 < columns <= pitch and box_rows <= 256, "boxes inside rows")
    return (address, rows, columns, box_rows, pitch, *(0 for _ in range(11)))


def _rows(words: list[int], heads: int, width: int, step: int) -> Tensor:
    """[tokens, heads, width] that a map finds, heads `step` columns apart."""
    address, rows, columns, _, pitch = words[:5]
    require((heads - 1) * step + width <= columns, "heads inside a row")
    held = at(address, BF16, (rows - 1) * pitch + columns)
    return held.as_strided((rows, heads, width), (pitch, step, 1))


def launch(function, grid, threads: int, shared: int, a: ctypes.Structure) -> None:
    name, defines, room = function
    require(name == "attention" and room == shared == defines["BYTES"], "as it was prepared")
    require(ctypes.sizeof(a) == defines["ARGS"] and grid == (132, 1) and threads == 384, "a launch")
    require(0 < a.sequences <= defines["SEQUENCES"], "sequences that fit")
    require(a.heads % a.together == 0, "all heads side by side with as many others")
    maps = [list(a.maps[i * 16 : i * 16 + 16]) for i in range(5)]
    require([m[3] for m in maps] == [64, 64, 128, 128, 128], "rows of a box")
    cus = [at(address, I32, a.sequences + 1) for address in (a.q_cu, a.k_cu)]
    (first, last), (low, high) = ((int(cu[0]), int(cu[-1])) for cu in cus)
    segs = [Segments(tuple(cu.diff().tolist()), cu - cu[0]) for cu in cus]
    q, q_rope = _rows(maps[0], a.heads, 128, a.q_head), _rows(maps[1], a.heads, 64, a.q_rope_head)
    k, v = _rows(maps[2], a.heads, 128, a.k_head), _rows(maps[4], a.heads, 128, a.v_head)
    k_rope = _rows(maps[3], 1, 64, 64)[:, 0]
    own, keys = slice(first, last), slice(low, high)
    parts = q[own], q_rope[own], k[keys], k_rope[keys], v[keys]
    made, lse = mha_prefill(*parts, *segs, bool(a.causal), a.scale / 1.4426950408889634)
    if a.codes:
        require(a.aligned >= last and not (a.out or a.lse), "scales in columns, and nothing else")
        codes, scales = groups_of(made.flatten(1), bool(a.powers))
        at(a.codes, FP8, last, a.heads, 128)[first:].copy_(codes)
        at(a.scales, F32, a.heads, a.aligned)[:, first:last].copy_(scales.T)
        return
    at(a.out, BF16, last, a.heads, 128)[first:].copy_(made)
    at(a.lse, F32, last, a.heads)[first:].copy_(lse)
