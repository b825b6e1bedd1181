"""DeepSeek's sparse attention with the kernels in jit/: index scores, attention over chosen slots.

Tiles are by what is on chip: 64 KB on gfx942, 160 KB on gfx950, 227 KB on compute capability 9.0,
where the kernels were tested (benchmarks/results/rocm_tilelang.md).
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

LATENT = 512


class Tiles(NamedTuple):
    """Of attention: slots of a tile, tiles in flight, threads. Of scores: the same, and how many
    tiles of tokens a program takes."""

    slots: int
    stages: int
    threads: int
    tokens: int
    token_stages: int
    token_threads: int
    tiles: int


TILES = {
    65536: Tiles(32, 1, 128, 128, 1, 256, 8),
    163840: Tiles(64, 1, 256, 128, 2, 256, 8),
    232448: Tiles(64, 2, 128, 128, 2, 128, 8),
}
HEADS = 16  # that a program of attention takes


@cache
def _library(module: str) -> Any:
    return import_module(f"ds_runtime_rocm.jit.{module}")


@cache
def _device(index: int) -> tuple[Tiles, int]:
    """(tiles that fit, compute units) of a GPU."""
    found = torch.cuda.get_device_properties(index)
    most = getattr(found, "shared_memory_per_block_optin", 65536)
    return TILES[max(size for size in TILES if size <= most)], found.multi_processor_count


def _here(x: Tensor) -> tuple[Tiles, int]:
    return _device(x.device.index or 0)


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
    tiles, _ = _here(q)
    if missing := -heads % 16:  # heads of zeros weigh nothing
        q = torch.nn.functional.pad(q, (0, 0, 0, missing))
        weights = torch.nn.functional.pad(weights, (0, missing))
    kernel = _library("index_scores").scores(
        q.shape[1], dim, page, _name(q.dtype), tiles.tokens, tiles.tiles, tiles.token_stages,
        tiles.token_threads,
    )  # fmt: skip
    kernel(q.contiguous(), weights.contiguous(), cache, page_table.contiguous(), owners, lens, out)
    return out


def sparse_mla(q: Tensor, cache: Tensor, slots: Tensor, kv_lora: int, scale: float) -> Tensor:
    """SparseMla for latent_pages: few rows are cut into shares that fill the device."""
    rows, heads, width = q.shape
    out = q.new_empty(rows, heads, kv_lora)
    if not rows:
        return out
    tiles, units = _here(q)
    if missing := -slots.shape[1] % tiles.slots:
        slots = torch.nn.functional.pad(slots, (0, missing), value=-1)
    blocks, groups = slots.shape[1] // tiles.slots, -(-heads // HEADS)
    # As many shares as keep every unit busy once, of equal numbers of blocks.
    wanted = max(1, units // (rows * groups))
    shares = max(n for n in range(1, blocks + 1) if blocks % n == 0 and n <= wanted)
    parts = q.new_empty(shares, rows, heads, kv_lora, dtype=torch.float32)
    sums = q.new_empty(shares, rows, heads, dtype=torch.float32)
    found, dtype = _library("sparse_mla"), _name(q.dtype)
    shape = heads, kv_lora, width - kv_lora, dtype, HEADS, tiles.slots, tiles.stages, tiles.threads
    kernel = found.shares(*shape, scale)
    kernel(
        q.contiguous(), cache.flatten(0, 1), slots.contiguous(), parts, sums,
        slots.shape[1] // shares,
    )  # fmt: skip
    found.join(heads, kv_lora, dtype, 128)(parts, sums, out)
    return out
