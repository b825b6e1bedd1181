"""MhaDecode and CacheWrite over `expanded_pages`, in the compute dtype or in e4m3."""

from __future__ import annotations

from collections.abc import Hashable
from math import e, log2

import torch
from torch import Tensor

from ds_runtime.api import Facts
from ds_runtime_triton.jit.expanded import expanded_write_kernel, mha_decode_kernel
from ds_runtime_triton.launch import cdiv, pow2
from ds_runtime_triton.mla import DecodeState, MlaDecode, combine, fills

_TOKENS, _WAVES = 32, 4  # of a tile, and programs of a core
_VALUES = 1024  # of a token that one program writes


def variant(facts: Facts, rows: int) -> Hashable:
    """`Compiles.variant` of MhaDecode."""
    return fills(facts.device.cores, rows * facts.dims["heads"], _WAVES)


class MhaDecode(MlaDecode):
    """A program has one head of one row, over its split of the tokens."""

    def __init__(self, facts: Facts) -> None:
        self.v, self.cores = facts.dims["v"], facts.device.cores

    def run(  # type: ignore[override]
        self, state: DecodeState, q: Tensor, q_rope: Tensor, cache: Tensor, scale: float
    ) -> Tensor:
        rows, heads, nope = q.shape
        out = torch.empty(rows, heads, self.v, dtype=q.dtype, device=q.device)
        if rows == 0:
            return out
        rope = q_rope.shape[2]
        splits = self._splits(state, rows * heads, _WAVES, {"BLOCK_N": _TOKENS})
        size = rows * heads * splits if splits > 1 else 1
        partial = torch.empty(size, self.v, dtype=torch.float32, device=q.device)
        sums = torch.empty(size, dtype=torch.float32, device=q.device)
        mha_decode_kernel[(heads, splits, rows)](
            q, q_rope, cache, state.table, state.owner, state.lens, state.bits, out, partial, sums,
            heads, nope, rope, self.v, scale * log2(e), *q.stride()[:2], *q_rope.stride()[:2],
            *cache.stride()[:2], state.table.stride(0), splits, PAGE=cache.shape[1],
            SPLIT=splits > 1, NOPE=pow2(nope), ROPE=pow2(rope), V=pow2(self.v), BLOCK_N=_TOKENS,
            TREE=state.tree, num_warps=4,
        )  # fmt: skip
        if splits > 1:
            combine(partial, sums, state.lens, out, splits, _TOKENS)
        return out


def cache_write(cache: Tensor, latent: Tensor, k_rope: Tensor, slots: Tensor) -> None:
    """CacheWrite: a program per token and block of its keys and values, one more for the rest."""
    tokens, width = latent.shape
    if tokens:
        rope = k_rope.shape[1]
        block = min(pow2(width), _VALUES)
        expanded_write_kernel[(tokens, cdiv(width, block) + 1)](
            cache, latent, k_rope, slots, cache.shape[1], width, rope, *cache.stride()[:2],
            latent.stride(0), k_rope.stride(0), block, pow2(rope), num_warps=4,
        )  # fmt: skip


# The names that the plan shows.
mha_decode = MhaDecode
expanded_write = cache_write
