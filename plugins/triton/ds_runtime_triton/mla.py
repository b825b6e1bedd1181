"""MlaDecode over `latent_pages`, in the compute dtype or in e4m3."""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2

import torch
from torch import Tensor

from ds_runtime.api import Batch, DecodePart, Facts, Limits
from ds_runtime_triton.config import folder, tuned
from ds_runtime_triton.jit.mla import mla_combine_kernel, mla_decode_kernel
from ds_runtime_triton.launch import cdiv, pow2

_AT_ONCE = 8  # splits of a row whose sums are read together


@dataclass
class DecodeState:
    """Fixed buffers of a step: pages by sequence; by row its sequence and the tokens it sees."""

    table: Tensor  # [sequences, pages] int32
    owner: Tensor  # [rows] int32
    lens: Tensor  # [rows] int32
    each: Tensor  # [rows] int32, 0 … rows − 1: the owners where every sequence has one row
    bits: Tensor  # [rows] int64: which of its last TAIL tokens a row of a tree sees
    tokens: int  # that a sequence can have
    single: bool = True
    tree: bool = False


class MlaDecode:
    """Every row's tokens are split so that all programs together fill the device once."""

    def __init__(self, facts: Facts) -> None:
        dims = facts.dims
        self.latent, self.rope = dims["kv_lora"], dims["qk_rope"]
        self.cores = facts.device.cores
        arch = folder(facts.device.arch, facts.dtype)
        self.sizes = tuned(arch, "mla_decode", f"H={dims['heads']}")

    def state(self, limits: Limits) -> DecodeState:
        rows, device = limits.max_sequences * limits.max_queries, limits.device
        pages = limits.max_pages_per_sequence
        each = torch.arange(rows, dtype=torch.int32, device=device)
        return DecodeState(
            torch.zeros(limits.max_sequences, pages, dtype=torch.int32, device=device),
            each.clone(),
            torch.ones(rows, dtype=torch.int32, device=device),
            each,
            torch.full((rows,), -1, dtype=torch.int64, device=device),
            pages * limits.page_size,
        )

    def prepare(self, state: DecodeState, batch: Batch) -> None:
        part = batch.decode
        if part is None or part.size == 0:
            return
        table = part.page_table
        state.table[: table.shape[0], : table.shape[1]].copy_(table)
        if part.q_lens:
            _spread(state, part)
        else:
            state.lens[: part.size].copy_(part.kv_lens)
            if not state.single:
                state.owner.copy_(state.each)
        state.single = not part.q_lens
        state.tree = part.tree is not None
        if part.tree is not None:
            state.bits[: part.rows].copy_(part.tree)

    def run(self, state: DecodeState, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        rows, heads, _ = q.shape
        out = torch.empty(rows, heads, self.latent, dtype=q.dtype, device=q.device)
        if rows == 0:
            return out
        if q.stride(2) != 1:
            q = q.contiguous()
        config = dict(self.sizes.at(rows))
        blocks = cdiv(heads, config["BLOCK_H"])
        splits = self._splits(state, rows * blocks, config.pop("WAVES"), config)
        size = rows * heads * splits if splits > 1 else 1
        partial = torch.empty(size, self.latent, dtype=torch.float32, device=q.device)
        sums = torch.empty(size, dtype=torch.float32, device=q.device)
        wide, high = pow2(self.latent, 16), pow2(self.rope, 16)
        mla_decode_kernel[(blocks, splits, rows)](
            q, cache, state.table, state.owner, state.lens, state.bits, out, partial, sums, heads,
            self.latent, self.rope, scale * log2(e), *q.stride()[:2],
            *cache.stride()[:2], state.table.stride(0), PAGE=cache.shape[1], SPLITS=splits,
            LATENT=wide, ROPE=high, TREE=state.tree,
            EXACT=wide == self.latent and high == self.rope, **config,
        )  # fmt: skip
        if splits > 1:
            combine(partial, sums, state.lens, out, splits, config["BLOCK_N"])
        return out

    def _splits(self, state: DecodeState, programs: int, waves: int, config: dict[str, int]) -> int:
        """Pieces of a row. Lengths change under a captured step, so only bounds decide."""
        most = cdiv(state.tokens, 2 * config["BLOCK_N"])
        return max(1, min(self.cores * waves // programs, most, 64))


def combine(
    partial: Tensor, sums: Tensor, lens: Tensor | None, out: Tensor, splits: int, block: int
) -> None:
    """out [rows, heads, latent] from float32 partial [rows, heads, splits, latent] and sums [rows,
    heads, splits], see store_heads. lens [rows]: then only the splits with a block of tokens count.
    """
    rows, heads, latent = out.shape
    most = pow2(splits)
    mla_combine_kernel[(rows, heads)](
        partial, sums, lens, out, heads, latent, splits, block, pow2(latent, 16), most,
        min(most, _AT_ONCE), num_warps=4,
    )  # fmt: skip


def _spread(state: DecodeState, part: DecodePart) -> None:
    """Rows of sequences that have several: row j of n sees its sequence but for n − 1 − j."""
    lens, owner = [], []
    for i, (length, count) in enumerate(zip(part.host_kv_lens, part.q_lens, strict=True)):
        apart = part.tree is None
        lens += [length - (count - 1 - j) * apart for j in range(count)]
        owner += [i] * count
    pinned = state.lens.device.type != "cpu"  # the copy then waits for nothing
    both = torch.tensor([lens, owner], dtype=torch.int32, pin_memory=pinned)
    state.lens[: part.rows].copy_(both[0], non_blocking=True)
    state.owner[: part.rows].copy_(both[1], non_blocking=True)


# The name that the plan shows.
mla_decode = MlaDecode
