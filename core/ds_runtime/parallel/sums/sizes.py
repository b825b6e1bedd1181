"""Sizes of what ranks send each other, on which all of them agree. Torch-free."""

from __future__ import annotations

MANY = 1 << 18
"""Values of a sum in the order of the ranks from which on each rank adds a share."""

LINE = 64
"""Bytes of which rows that are sent with others beside them are a multiple."""

SCALED_BY = 128
"""Values of a row that share a scale, where the row is FP8 codes."""
