"""What kernels hold beyond their results, and the constants that it follows from. Torch-free."""

from __future__ import annotations

from ds_runtime.api import Facts

SPLITS = 32  # pieces of one row of sparse attention, at most
WAVES, BLOCK_H = 2, 64  # of its configurations, at most
DIGITS, BINS = 4, 256  # of a score, and values of one
CHUNKS = 64  # of one row of scores, at most; their counts are read at once
PROGRAMS = 2048  # that count scores, where rows are few, at most
_ROUNDED = 512  # an allocation's size is a multiple of this


def sparse_mla(facts: Facts, rows: int) -> int:
    """Bytes of what splits hand to the launch that combines them: there are as many as fill the
    device, and one, which needs nothing, where rows alone do."""
    heads, latent = facts.dims["heads"], facts.dims["kv_lora"]
    most = facts.device.cores * WAVES * BLOCK_H
    return 4 * (latent + 1) * min(rows * heads * SPLITS, most) + 4 * latent + 4 * _ROUNDED


def index_topk(facts: Facts, rows: int) -> int:
    """Bytes of the counts, and of what the passes have settled."""
    return 4 * DIGITS * (BINS * max(rows, PROGRAMS) + 2 * rows) + 2 * _ROUNDED
