"""Who holds which row and which pages, on every rank.

Rows and pages change hands at once, also while a launched step still uses them. Devices run steps
in the order of their plans, so the new holder always writes after the old one. Where attention is
divided by sequences, every group of ranks has pages and a prefix cache of its own
(`kv/rank_pages.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ds_runtime.common.balance import most_beside
from ds_runtime.engine.schedule.request import Request
from ds_runtime.engine.step.plan import StepPlan
from ds_runtime.kv.holder import Holder
from ds_runtime.kv.rank_pages import Pages


class Holdings:
    """Every row, and the pages of every group that has some of its own: `groups`, by number."""

    def __init__(self, groups: Sequence[Pages], num_rows: int) -> None:
        self.groups = tuple(groups)
        self.snapshots = [pages.snapshots for pages in groups if pages.snapshots is not None]
        self.keeps_states = bool(self.snapshots)
        self.copying = bool(self.snapshots or any(p.below for p in groups))
        self.rows = list(range(num_rows))  # free ones, a heap: low rows first

    @property
    def caches(self) -> bool:
        """Whether there are prefix caches."""
        return self.groups[0].prefix is not None

    @property
    def num_free(self) -> int:
        """Free pages of all groups."""
        return sum(pages.pool.num_free for pages in self.groups)

    @property
    def num_cached(self) -> int:
        """Pages of all groups that only the prefix caches hold."""
        return sum(pages.num_cached for pages in self.groups)

    @property
    def num_pages(self) -> int:
        """Pages of all groups."""
        return sum(pages.pool.num_pages for pages in self.groups)

    @property
    def most_pages(self) -> int:
        """That one request can have."""
        return min(pages.pool.num_pages for pages in self.groups)

    @property
    def counts(self) -> dict[str, int]:
        """Of snapshots and of host memory, as Stats names them."""
        made, below = self.snapshots, [pages.below for pages in self.groups if pages.below]
        return {
            "snapshots_total": sum(one.pool.num_pages for one in made),
            "snapshots_kept": sum(one.num_kept for one in made),
            "snapshot_hits": sum(one.num_hits for one in made),
            "snapshots_evicted": sum(one.num_evicted for one in made),
            "host_pages_total": sum(one.pages.count for one in below),
            "host_pages_kept": sum(len(one.pages) for one in below),
            "host_pages_evicted": sum(one.pages.num_evicted for one in below),
        }

    def take(self, request: Request, reads_cache: bool) -> bool:
        """A row, and pages on one group for all that the request has to compute. False if no group
        has enough, or if another request computes the beginning of its prompt just now: it is
        `behind` that one then.

        Of the groups that have, the one whose prefix cache knows most of it, or soon will, as long
        as that runs not many more than others. Then the one that runs the fewest, then the
        emptiest.
        """
        fewest = min(pages.num_running for pages in self.groups)
        limit = most_beside(fewest)

        def order(group: int) -> tuple[bool, int, int, int, int]:
            pages = self.groups[group]
            left = pages.pool.num_free + pages.num_cached
            return pages.num_running > limit, -ahead[group][0], pages.num_running, -left, group

        found = [pages.match(request, reads_cache) for pages in self.groups]
        ahead: list[tuple[int, Holder | None]] = [(0, None)] * len(found)
        if reads_cache:
            both = zip(self.groups, found, strict=True)
            ahead = [pages.ahead(request, known, here=False) for pages, known in both]
        groups = sorted(range(len(self.groups)), key=order)
        first = groups[0]
        if reads_cache:
            ahead[first] = self.groups[first].ahead(request, found[first])
        request.behind_pages, request.behind = ahead[first]
        if request.behind is not None:
            return False
        if reads_cache and self.groups[groups[0]].fetch(request, found[groups[0]]):
            return False
        for group in groups:
            if self.groups[group].take(request, found[group], self.rows[0]):
                request.group = group
                heapq.heappop(self.rows)
                return True
        return False

    def drain(self, plan: StepPlan) -> None:
        """Tell a plan what is to be copied in front of its step."""
        for group, pages in enumerate(self.groups):
            if pages.snapshots is not None:
                plan.copies += [(group, *pair) for pair in pages.snapshots.drain()]
            if pages.below is not None:
                noted = pages.below.drain()
                plan.saves += [(group, *pair) for pair in noted.saves]
                plan.loads += [(group, *pair) for pair in noted.loads]
                plan.hurried |= noted.hurried

    def release(self, request: Request) -> None:
        """Take row and pages back."""
        heapq.heappush(self.rows, request.row)
        self.groups[request.group].release(request)
        request.row, request.on_device = -1, False
        request.num_drafts, request.drafts, request.draft_parents = 0, [], []
        request.is_verifying = False

    def forget(self, weights: int) -> None:
        """Nothing that these weights made is read again."""
        for pages in self.groups:
            if pages.prefix is not None:
                pages.prefix.forget(weights)

    def flush(self) -> int:
        """Empty the prefix caches; the number of pages freed."""
        return sum(pages.flush() for pages in self.groups)
