"""MlaDecode over `latent_pages`, in the compute dtype or in e4m3."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import e, log2

import torch
from torch import Tensor

from ds_runtime.api import Batch, Facts, Limits, RowOwners
from ds_runtime_triton.config import Sizes, chosen
from ds_runtime_triton.jit.mla import mla_combine_kernel, mla_decode_kernel
from ds_runtime_triton.launch import cdiv, pow2
from ds_runtime_triton.workspace import FEW, HELD, MLA_SPLITS

_PIECE = 256  # tokens of a piece at least, where rows must have bits of their own
_AT_ONCE = 8  # whose sums are read together


@dataclass
class DecodeState:
    """Of a step: pages by sequence; by row its sequence and the tokens it sees."""

    table: Tensor  # [sequences, pages] int32
    owner: Tensor  # [rows] int32
    lens: Tensor  # [rows] int32
    each: Tensor  # [rows] int32, 0 … rows − 1: the owners where every sequence has one row
    bits: Tensor  # [rows] int64: which of its last TAIL tokens a row of a tree sees
    owners: RowOwners
    tokens: int  # that a sequence can have
    page_size: int
    tree: bool = False


def variant(facts: Facts, rows: int) -> Hashable:
    """`Compiles.variant` of MlaDecode."""
    sizes = _sizes(facts)
    config = sizes.at(rows)
    programs = rows * cdiv(facts.dims["heads"], config["BLOCK_H"])
    return sizes.number(rows), fills(facts.device.cores, programs, config["WAVES"])


def fills(cores: int, programs: int, waves: int) -> bool:
    """Whether this many programs leave no room for another split of each row: few tokens split
    none, either, and are not asked."""
    return cores * waves // max(1, programs) <= 1


def _sizes(facts: Facts) -> Sizes:
    heads = facts.dims["heads"]
    sizes = chosen(facts, "mla_decode", f"H={heads}")
    return Sizes((1,), (sizes.at(heads),)) if facts.own_bits else sizes


class MlaDecode:
    """Every row's tokens are split so that all programs together fill the device once. Where rows
    must have bits of their own, into pieces of one size, for rows whose pieces there is room for.
    """

    prepares_on_device = True

    def __init__(self, facts: Facts) -> None:
        dims = facts.dims
        self.latent, self.rope = dims["kv_lora"], dims["qk_rope"]
        self.cores, self.own_bits = facts.device.cores, facts.own_bits
        self.sizes = _sizes(facts)

    def state(self, limits: Limits) -> DecodeState:
        rows, device = limits.max_sequences * limits.max_queries, limits.device
        most = limits.max_pages_per_sequence
        pages = torch.zeros(1, most, dtype=torch.int32, device=device)  # a step brings its own
        each = torch.arange(rows, dtype=torch.int32, device=device)
        return DecodeState(
            pages,
            each,
            torch.ones(rows, dtype=torch.int32, device=device),
            each,
            torch.full((rows,), -1, dtype=torch.int64, device=device),
            RowOwners(device),
            most * limits.page_size,
            limits.page_size,
        )

    def prepare(self, state: DecodeState, batch: Batch) -> None:
        part = batch.decode
        if part is None or part.size == 0:
            return
        state.table, state.owner, state.lens = part.page_table, state.each, part.kv_lens
        if part.q_lens:
            state.owner, behind = state.owners.of(part.q_lens)
            state.lens = state.lens.index_select(0, state.owner)
            if part.tree is None:
                state.lens = state.lens - behind
        state.tree = part.tree is not None
        if part.tree is not None:
            state.bits = part.tree

    def run(self, state: DecodeState, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        rows, heads, _ = q.shape
        out = torch.empty(rows, heads, self.latent, dtype=q.dtype, device=q.device)
        if rows == 0:
            return out
        if q.stride(2) != 1:
            q = q.contiguous()
        config = dict(self.sizes.at(rows))
        blocks, waves = cdiv(heads, config["BLOCK_H"]), config.pop("WAVES")
        splits, each, least = self._splits(state, rows * blocks, waves, config), rows, 1
        if self.own_bits:
            least = _PIECE // config["BLOCK_N"]
            splits = min(cdiv(state.table.shape[1] * state.page_size, _PIECE), FEW)
            each = max(1, HELD // (heads * splits * self.latent * 4))
        parted = splits > 1 or self.own_bits
        size = min(rows, each) * heads * splits if parted else 1
        partial = torch.empty(size, self.latent, dtype=torch.float32, device=q.device)
        sums = torch.empty(size, dtype=torch.float32, device=q.device)
        wide, high = pow2(self.latent, 16), pow2(self.rope, 16)
        for first in range(0, rows, each):
            some = slice(first, first + each)
            own, into, lens = q[some], out[some], state.lens[some]
            mla_decode_kernel[(blocks, splits, len(own))](
                own, cache, state.table, state.owner[some], lens, state.bits[some], into,
                partial, sums, heads, self.latent, self.rope, scale * log2(e), *q.stride()[:2],
                *cache.stride()[:2], state.table.stride(0), splits, PAGE=cache.shape[1],
                SPLIT=parted, LATENT=wide, ROPE=high, TREE=state.tree, LEAST=least,
                EXACT=wide == self.latent and high == self.rope, **config,
            )  # fmt: skip
            if parted:
                combine(partial, sums, lens, into, splits, config["BLOCK_N"], least)
        return out

    def _splits(self, state: DecodeState, programs: int, waves: int, config: dict[str, int]) -> int:
        """Pieces of a row. Lengths change under a captured step, so only bounds decide."""
        most = cdiv(state.tokens, 2 * config["BLOCK_N"])
        return max(1, min(self.cores * waves // programs, most, MLA_SPLITS))


def combine(
    partial: Tensor,
    sums: Tensor,
    lens: Tensor | None,
    out: Tensor,
    splits: int,
    block: int,
    least: int = 1,
) -> None:
    """out [rows, heads, latent] from float32 partial [rows, heads, splits, latent] and sums [rows,
    heads, splits], see store_heads. lens [rows]: then only the splits with a block of tokens count,
    which have `least` of them.
    """
    rows, heads, latent = out.shape
    mla_combine_kernel[(rows, heads)](
        partial, sums, lens, out, heads, latent, splits, block, pow2(latent, 16), MLA_SPLITS,
        _AT_ONCE, least, num_warps=4,
    )  # fmt: skip


# The name that the plan shows.
mla_decode = MlaDecode
