"""What kernels hold beyond their results, and the constants that it follows from. Torch-free."""

from __future__ import annotations

from ds_runtime.api import Facts

SPLITS, MLA_SPLITS = 32, 64  # pieces of one row of sparse and of dense attention, at most
WAVES, BLOCK_H = 2, 64  # of configurations of either, at most
COUNTED, BINS = 2, 256  # digits of a score that all chunks count, and values of one
LISTED = 2048  # tokens of a row that agree with the k-th best in them, at most; a power of two
CHUNKS = 64  # of one row of scores, at most; what they count is read at once
PROGRAMS = 2048  # that count scores, where rows are few, at most
# Where rows must have bits of their own: pieces of a row of dense attention, bytes of what they
# hand over at a time, and rows of sparse attention that are launched together.
FEW, HELD, TOGETHER = 16, 1 << 27, 64
_ROUNDED = 512  # an allocation's size is a multiple of this


def sparse_mla(facts: Facts, rows: int) -> int:
    """Bytes of what splits hand to the launch that combines them: there are as many as fill the
    device, and one, which needs nothing, where rows alone do."""
    heads, latent = facts.dims["heads"], facts.dims["kv_lora"]
    most = facts.device.cores * WAVES * BLOCK_H
    return 4 * (latent + 1) * min(rows * heads * SPLITS, most) + 4 * latent + 4 * _ROUNDED


def mla_decode(facts: Facts, rows: int) -> int:
    """Bytes of what pieces hand to the launch that combines them."""
    heads, latent = facts.dims["heads"], facts.dims["kv_lora"]
    if facts.own_bits:
        row = heads * FEW
        return 4 * (latent + 1) * min(rows * row, max(row, HELD // (4 * latent))) + 2 * _ROUNDED
    most = facts.device.cores * WAVES * BLOCK_H
    return 4 * (latent + 1) * max(min(rows * heads * MLA_SPLITS, most), 1) + 2 * _ROUNDED


def sparse_mla_ordered(facts: Facts, rows: int) -> int:
    """As sparse_mla, of the rows that are launched together."""
    return sparse_mla(facts, min(rows, TOGETHER))


def index_topk(facts: Facts, rows: int) -> int:
    """Bytes of the counts, of their sums, and of the tokens that they leave open."""
    counts = COUNTED * BINS * (max(rows, PROGRAMS) + rows)
    return 4 * (counts + rows * LISTED) + 3 * _ROUNDED
