"""The pool of KV pages: plain page ids 0 … num_pages − 1, handed out and taken back."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Free pages. Who holds the others is the scheduler's and the prefix cache's business."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = bytearray(b"\1" * num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def alloc(self, count: int) -> list[int]:
        """`count` pages with undefined content; there must be as many free."""
        assert 0 <= count <= len(self._free), f"{count} pages asked for, {len(self._free)} free"
        if count == 0:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert not self._is_free[page], f"page {page} is freed twice"
            self._is_free[page] = 1
            self._free.append(page)

    def free_pages(self) -> frozenset[int]:
        """The free page ids, for checks."""
        return frozenset(self._free)
