"""DeepSeek's sparse attention with the kernels in jit/: index scores, attention over chosen slots.

Tiles are by architecture, for attention by heads as well. 64 KB are on chip on gfx942, 160 KB on
gfx950, 227 KB on compute capability 9.0, where the kernels were tested
(benchmarks/results/rocm_tilelang.md).
"""

from __future__ import annotations

import contextlib
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_runtime.api import kept_in

LATENT = 512


class Scores(NamedTuple):
    """Tokens of a tile, tiles in flight, threads, tiles of a program."""

    tokens: int
    stages: int
    threads: int
    tiles: int


class Attention(NamedTuple):
    """Slots of a tile, tiles in flight, threads; the kernel in jit/sparse_mla.py."""

    slots: int
    stages: int
    threads: int
    kernel: str = "shares"


SCORES = {
    "gfx942": Scores(128, 1, 256, 8),
    "gfx950": Scores(128, 2, 256, 8),
    "sm90": Scores(128, 2, 128, 8),
}
# By the heads that a program takes: 16 of any number, more of their multiples.
ATTENTION = {
    "gfx942": {16: Attention(32, 1, 128)},
    "gfx950": {16: Attention(64, 1, 256)},
    "sm90": {64: Attention(64, 2, 384, "wide"), 16: Attention(64, 2, 128)},
}


@cache
def _library(module: str) -> Any:
    with contextlib.suppress(ImportError, AttributeError):  # other releases keep them elsewhere
        kept_in("tilelang", import_module("tilelang").env.TILELANG_CACHE_DIR, tells=False)
    return import_module(f"ds_runtime_rocm.jit.{module}")


@cache
def _device(index: int) -> tuple[str, int]:
    """(architecture whose tiles fit, compute units) of a GPU."""
    found = torch.cuda.get_device_properties(index)
    name = f"sm{found.major}{found.minor}"
    if torch.version.hip:
        name = found.gcnArchName.split(":")[0]
    return name if name in ATTENTION else "gfx942", found.multi_processor_count


def _here(x: Tensor) -> tuple[str, int]:
    return _device(x.device.index or 0)


def tiling(name: str, heads: int) -> tuple[int, Attention]:
    """(heads that a program takes, tiles) of an architecture for this many heads."""
    known = ATTENTION[name]
    taken = max(n for n in known if n == min(known) or heads % n == 0)
    return taken, known[taken]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def index_scores(
    q: Tensor, weights: Tensor, cache: Tensor, page_table: Tensor, owners: Tensor, lens: Tensor
) -> Tensor:
    """IndexScores for index_pages in a dtype of two bytes."""
    rows, heads, dim = q.shape
    page = cache.shape[1]
    out = q.new_empty(rows, page_table.shape[1] * page, dtype=torch.float32)
    if not rows:
        return out
    tiles = SCORES[_here(q)[0]]
    if missing := -heads % 16:  # heads of zeros weigh nothing
        q = torch.nn.functional.pad(q, (0, 0, 0, missing))
        weights = torch.nn.functional.pad(weights, (0, missing))
    kernel = _library("index_scores").scores(
        q.shape[1], dim, page, _name(q.dtype), tiles.tokens, tiles.tiles, tiles.stages,
        tiles.threads,
    )  # fmt: skip
    kernel(q.contiguous(), weights.contiguous(), cache, page_table.contiguous(), owners, lens, out)
    return out


def sparse_mla(q: Tensor, cache: Tensor, slots: Tensor, kv_lora: int, scale: float) -> Tensor:
    """SparseMla for latent_pages."""
    return attend(q, cache, slots, kv_lora, scale, *tiling(_here(q)[0], q.shape[1]))


def attend(
    q: Tensor, cache: Tensor, slots: Tensor, kv_lora: int, scale: float, taken: int,
    tiles: Attention,
) -> Tensor:  # fmt: skip
    """SparseMla in programs that take `taken` heads: few rows are cut into shares that fill the
    device, and joined."""
    rows, heads, width = q.shape
    out = q.new_empty(rows, heads, kv_lora)
    if not rows:
        return out
    units = _here(q)[1]
    if missing := -slots.shape[1] % tiles.slots:
        slots = torch.nn.functional.pad(slots, (0, missing), value=-1)
    blocks, groups = slots.shape[1] // tiles.slots, -(-heads // taken)
    # As many shares as keep every unit busy once, of equal numbers of blocks.
    wanted = max(1, units // (rows * groups))
    shares = max(n for n in range(1, blocks + 1) if blocks % n == 0 and n <= wanted)
    parts = out[None]
    if shares > 1:
        parts = q.new_empty(shares, rows, heads, kv_lora, dtype=torch.float32)
    sums = q.new_empty(shares, rows, heads, dtype=torch.float32)
    found, dtype = _library("sparse_mla"), _name(q.dtype)
    shape = heads, kv_lora, width - kv_lora, dtype, _name(parts.dtype), taken
    kernel = getattr(found, tiles.kernel)(*shape, *tiles[:3], scale)
    kernel(
        q.contiguous(), cache.flatten(0, 1), slots.contiguous(), parts, sums,
        slots.shape[1] // shares,
    )  # fmt: skip
    if shares > 1:
        found.join(heads, kv_lora, dtype, 128)(parts, sums, out)
    return out
