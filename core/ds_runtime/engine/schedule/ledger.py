"""Who holds which row and which pages, on every rank.

Rows and pages change hands at once, also while a launched step still uses them: devices run steps
in the order of their plans, so the new holder always writes after the old one. Where attention is
divided by sequences, every rank has pages and a prefix cache of its own (`kv/rank_pages.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ds_runtime.engine.schedule.request import Request
from ds_runtime.kv.holder import Holder
from ds_runtime.kv.rank_pages import Pages

_SLACK = 8  # requests more than the fewest that a rank may run and still get what it knows


class Holdings:
    """Every row, and the pages of every rank that has some of its own: `ranks`, by number."""

    def __init__(self, ranks: Sequence[Pages], num_rows: int) -> None:
        self.ranks = tuple(ranks)
        self.rows = list(range(num_rows))  # free ones, a heap: low rows first

    @property
    def caches(self) -> bool:
        """Whether there are prefix caches."""
        return self.ranks[0].prefix is not None

    @property
    def num_free(self) -> int:
        """Free pages of all ranks."""
        return sum(pages.pool.num_free for pages in self.ranks)

    @property
    def num_cached(self) -> int:
        """Pages of all ranks that only the prefix caches hold."""
        return sum(pages.num_cached for pages in self.ranks)

    @property
    def num_pages(self) -> int:
        """Pages of all ranks."""
        return sum(pages.pool.num_pages for pages in self.ranks)

    @property
    def most_pages(self) -> int:
        """That one request can have."""
        return min(pages.pool.num_pages for pages in self.ranks)

    def take(self, request: Request, reads_cache: bool) -> bool:
        """A row, and pages on one rank for all that the request has to compute; False if no rank
        has enough, or if another request computes the beginning of its prompt just now: it is
        `behind` that one then.

        Of the ranks that have, the one whose prefix cache knows most of it, or soon will, as long
        as that runs not many more than others; then the one that runs the fewest, then the
        emptiest.
        """
        fewest = min(pages.num_running for pages in self.ranks)
        limit = fewest * 3 // 2 + _SLACK

        def order(rank: int) -> tuple[bool, int, int, int, int]:
            pages = self.ranks[rank]
            left = pages.pool.num_free + pages.num_cached
            return pages.num_running > limit, -ahead[rank][0], pages.num_running, -left, rank

        found = [pages.match(request, reads_cache) for pages in self.ranks]
        ahead: list[tuple[int, Holder | None]] = [(0, None)] * len(found)
        if reads_cache:
            ahead = [p.ahead(request, known) for p, known in zip(self.ranks, found, strict=True)]
        ranks = sorted(range(len(self.ranks)), key=order)
        request.behind_pages, request.behind = ahead[ranks[0]]
        if request.behind is not None:
            return False
        for rank in ranks:
            if self.ranks[rank].take(request, found[rank], self.rows[0]):
                request.rank = rank
                heapq.heappop(self.rows)
                return True
        return False

    def copies(self) -> list[tuple[int, int, int]]:
        """(rank, source, target) of blocks that are copied in front of the next step, in order."""
        ranks = [(rank, pages.snapshots) for rank, pages in enumerate(self.ranks)]
        return [(rank, *pair) for rank, made in ranks if made for pair in made.drain()]

    def of(self, request: Request) -> Pages:
        """The pages of the rank that has a running request."""
        return self.ranks[request.rank]

    def release(self, request: Request) -> None:
        """Take row and pages back."""
        heapq.heappush(self.rows, request.row)
        self.of(request).release(request)
        request.row, request.on_device = -1, False
        request.num_drafts, request.drafts, request.draft_parents = 0, [], []
        request.is_verifying = False

    def forget(self, weights: int) -> None:
        """Nothing that these weights made is read again."""
        for pages in self.ranks:
            if pages.prefix is not None:
                pages.prefix.forget(weights)

    def flush(self) -> int:
        """Empty the prefix caches; the number of pages freed."""
        return sum(pages.flush() for pages in self.ranks)
