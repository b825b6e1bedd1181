"""Page tables of steps: whose pages lie where."""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack_into

import numpy as np
import numpy.typing as npt
import torch

from ds_runtime.engine.step.transfer import Upload

Table = npt.NDArray[np.int32]


def padded(lists: Sequence[list[int]]) -> Table:
    """[sequences, most] int32: each one's pages, filled up with its first."""
    most, flat = max(map(len, lists), default=1), list[int]()
    for pages in lists:
        flat += pages
        flat += pages[:1] * (most - len(pages))
    table = np.empty((len(lists), most), np.int32)
    pack_into(f"{len(flat)}i", table.data, 0, *flat)  # numpy reads ints a third as fast
    return table


class PageTable:
    """A captured step's page table at a fixed place, `tensor` [rows, pages] int32 of the spare page
    at first. It goes to the device when it has changed: a sequence got a page, or another came.
    """

    def __init__(self, rows: int, pages: int, spare: int, device: torch.device) -> None:
        self.tensor = torch.full((rows, pages), spare, dtype=torch.int32, device=device)
        self._held: Table | None = None
        self._next: Table | None = None
        self._spare = spare
        self._lists: list[list[int]] | None = None
        self._whole = np.zeros((rows, 1), np.int32)

    def held(self, lists: list[list[int]]) -> Table:
        """All pages of sequences, filled up with each one's first, and of spare ones behind them:
        [rows, most]. The same array, which nobody changes, while the pages are the same.
        """
        if lists != self._lists:
            spare = [[self._spare]] * (self.tensor.shape[0] - len(lists))
            self._whole, self._lists = padded([*lists, *spare]), lists
        return self._whole

    def add(self, table: Table, upload: Upload) -> int | None:
        """[rows, n] for the next step, n ≤ pages: its number in the upload; None if it is there."""
        if self._held is table or (self._held is not None and np.array_equal(self._held, table)):
            return None
        self._next = table
        return upload.add(table)

    def take(self, sent: Upload, number: int | None) -> None:
        """What `add` has added, once it was sent."""
        if number is not None:
            table = sent[number]
            self.tensor[:, : table.shape[1]].copy_(table)
            self._held = self._next
