"""What kernels hold beyond their results, and the constants that it follows from. Torch-free."""

from __future__ import annotations

from ds_runtime.api import Facts

SPLITS = 32  # pieces of one row of sparse attention, at most
WAVES, BLOCK_H = 2, 64  # of its configurations, at most
COUNTED, BINS = 2, 256  # digits of a score that all chunks count, and values of one
LISTED = 2048  # tokens of a row that agree with the k-th best in them, at most; a power of two
CHUNKS = 64  # of one row of scores, at most; what they count is read at once
PROGRAMS = 2048  # that count scores, where rows are few, at most
_ROUNDED = 512  # an allocation's size is a multiple of this


def sparse_mla(facts: Facts, rows: int) -> int:
    """Bytes of what splits hand to the launch that combines them: there are as many as fill the
    device, and one, which needs nothing, where rows alone do."""
    heads, latent = facts.dims["heads"], facts.dims["kv_lora"]
    most = facts.device.cores * WAVES * BLOCK_H
    return 4 * (latent + 1) * min(rows * heads * SPLITS, most) + 4 * latent + 4 * _ROUNDED


def index_topk(facts: Facts, rows: int) -> int:
    """Bytes of the counts, of their sums, and of the tokens that they leave open."""
    counts = COUNTED * BINS * (max(rows, PROGRAMS) + rows)
    return 4 * (counts + rows * LISTED) + 3 * _ROUNDED
