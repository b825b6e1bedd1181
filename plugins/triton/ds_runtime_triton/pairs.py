"""Pairs (token, choice) sorted into tiles of one expert, and added up again; see jit/experts.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ds_runtime_triton.jit.experts import sort_pairs_kernel, sum_pairs_kernel
from ds_runtime_triton.launch import cdiv, pow2

_CHUNK = 4096  # pairs that a program of the sort looks at together
_COLUMNS = 1024  # of one program of the sum
# From so many tokens on: rows that a program beside the sort quantises together, and its warps. By
# measurement at 512 tokens on an H200; between 65 and 511 nothing was tried but 8.
_SORT = ((512, 32, 8), (65, 8, 4), (0, 1, 4))


class Tiles(NamedTuple):
    """Up to BLOCK_M pairs of one expert each: order [tiles · BLOCK_M] of pairs, owner [tiles], used
    [1], how many there are, all int32. And `most`, how many there may be."""

    order: Tensor
    owner: Tensor
    used: Tensor
    most: int


def sort_chunk(pairs: int) -> int:
    """Pairs that a program of the sort looks at together."""
    return min(_CHUNK, pow2(pairs, 16))


def sort_rows(tokens: int) -> tuple[int, int]:
    """(rows that a program next to the sort quantises, its warps)."""
    return next((rows, warps) for least, rows, warps in _SORT if tokens >= least)


def tiles_of(pairs: int, experts: int, block: int, device: torch.device) -> Tiles:
    """Room for what sort_pairs_kernel finds."""
    most = pairs // block + min(experts, pairs)
    order = torch.empty(most * block, dtype=torch.int32, device=device)
    owner = torch.empty(most, dtype=torch.int32, device=device)
    return Tiles(order, owner, torch.empty(1, dtype=torch.int32, device=device), most)


def sorted_pairs(ids: Tensor, experts: int, block: int) -> Tiles:
    """Tiles of up to `block` pairs of one expert."""
    pairs = ids.numel()
    tiles = tiles_of(pairs, experts, block, ids.device)
    sort_pairs_kernel[(cdiv(experts, 2),)](
        ids, *tiles[:3], pairs, experts, ids, ids, ids, 0, 0, 0, EXPERTS=pow2(experts, 2),
        BLOCK_M=block, CHUNK=sort_chunk(pairs), GROUP_K=0, UE8M0=False, ROWS=1,
        num_warps=4,
    )  # fmt: skip
    return tiles


def sum_of_pairs(y: Tensor, ids: Tensor, absent: bool) -> Tensor:
    """[tokens · top_k, n] → [tokens, n], each token's rows added. absent: but those of −1."""
    (tokens, top_k), n = ids.shape, y.shape[1]
    out = torch.empty(tokens, n, dtype=y.dtype, device=y.device)
    width = min(_COLUMNS, pow2(n, 16))
    sum_pairs_kernel[(tokens, cdiv(n, width))](y, out, ids, n, top_k, width, absent, num_warps=4)
    return out
