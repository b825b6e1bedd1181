"""Who holds which row and which pages, and what the prefix caches keep of them.

Rows and pages change hands at once, also while a launched step still uses them: devices run steps
in the order of their plans, so the new holder always writes after the old one. Where attention is
divided by sequences, every group has pages and a prefix cache of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ds_runtime.engine.schedule.request import Request
from ds_runtime.kv.pages import PagePool
from ds_runtime.kv.prefix import Match, PrefixCache

_SLACK = 8  # requests more than the fewest that a group may run and still get what it knows


class Pages:
    """Every page of one group.

    A page is at any time exactly one of: free in `pool`, owned by one running request, or in
    `prefix` once. `prefix` None turns the prefix cache off. `num_running`: requests that run here.
    Pages of prompts that running requests will bring into `prefix` are known by their beginnings.
    """

    def __init__(self, pool: PagePool, prefix: PrefixCache | None, page_size: int) -> None:
        self.pool = pool
        self.prefix = prefix
        self.page_size = page_size
        self.num_running = 0
        self._coming: dict[int, Request] = {}

    @property
    def num_cached(self) -> int:
        """Pages that only the prefix cache holds."""
        return self.prefix.num_evictable if self.prefix else 0

    def match(self, request: Request, reads_cache: bool) -> Match | None:
        """What the prefix cache knows of the request, nothing unless it reads that."""
        if self.prefix is None:
            return None
        if not reads_cache:
            return Match(self.prefix.root(request.realm), [])
        return self.prefix.match(request.tokens(0, request.total_len), request.realm)

    def ahead(self, request: Request, known: Match | None) -> tuple[int, Request | None]:
        """How many pages of its prompt the request need not compute here, and who computes the last
        of them, if `known`, what is cached, has it not.
        """
        count, other, size = len(known.pages) if known else 0, None, self.page_size
        while self._coming and (count + 1) * size < request.prompt_len:
            by = self._coming.get(request.beginning(count, size))
            if by is None or by.order > request.order:
                break
            count, other = count + 1, by
        return count, other

    def _announce(self, request: Request) -> None:
        """Others need not compute what it will share of its prompt."""
        for index in range(request.num_shared, self._last(request)):
            self._coming.setdefault(request.beginning(index, self.page_size), request)

    def _came(self, request: Request, first: int, last: int) -> None:
        """These pages of it are shared, or never will be."""
        for index in range(first, min(last, self._last(request))):
            key = request.beginning(index, self.page_size)
            if self._coming.get(key) is request:
                del self._coming[key]

    def _last(self, request: Request) -> int:
        """How many pages of its prompt it shares."""
        shared = request.prompt_len if request.max_shared is None else request.max_shared
        return min(shared, request.prompt_len) // self.page_size

    def take(self, request: Request, known: Match | None) -> bool:
        """Pages for all that the request has to compute; False if there are too few.

        known: what `match` found just now, which is not computed again. As many pages as requests
        run here must be left, if only by eviction: fewer preemptions right afterwards.
        """
        prefix, pages = self.prefix, list[int]()
        if prefix and known:
            pages = known.pages
            prefix.lock(known.node)
        needed = -(-request.total_len // self.page_size) - len(pages)
        if not self._make_room(needed, self.num_running):
            if prefix and known:
                prefix.unlock(known.node)
            return False
        request.node, request.num_shared = known.node if known else None, len(pages)
        request.pages = pages + self.pool.alloc(needed)
        request.num_computed = len(pages) * self.page_size
        self.num_running += 1
        if prefix:
            self._announce(request)
        return True

    def grow(self, request: Request) -> bool:
        """A page for the next token if it needs one; False if there is none."""
        if request.num_computed < len(request.pages) * self.page_size:
            return True
        if not self._make_room(1):
            return False
        request.pages += self.pool.alloc(1)
        return True

    def cover(self, request: Request, count: int) -> int:
        """How many of the next `count` tokens have pages, once it has got what can be spared.

        For drafts, which may stay without: nobody is preempted for them. Reserves as `take` does.
        """
        missing = -(-(request.num_computed + count) // self.page_size) - len(request.pages)
        if missing > 0 and self._make_room(missing, self.num_running):
            request.pages += self.pool.alloc(missing)
        return min(count, len(request.pages) * self.page_size - request.num_computed)

    def _make_room(self, count: int, reserve: int = 0) -> bool:
        """Evict until `count` pages are free, if `reserve` more could follow."""
        if self.pool.num_free + self.num_cached < count + reserve:
            return False
        missing = count - self.pool.num_free
        if self.prefix and missing > 0:
            self.pool.free(self.prefix.evict(missing))
        return True

    def release(self, request: Request) -> None:
        """Take its pages back."""
        self.num_running -= 1
        if request.node is not None and self.prefix is not None:
            self._came(request, request.num_shared, len(request.pages))
            self.prefix.unlock(request.node)
        self.pool.free(request.pages[request.num_shared :])
        request.node = None
        request.pages, request.num_shared, request.num_computed = [], 0, 0

    def share(self, request: Request, computed: int, proved: bool = False) -> None:
        """Bring the request's full pages below token `computed` into the prefix cache.

        Not those with reasoning, where the request asks so: no later prompt begins with it.
        proved: logits that were computed from its pages are finite. Pages that others brought there
        meanwhile take the place of the request's own, and its next logits prove them.
        """
        if proved and self.prefix is not None and request.node is not None:
            self.prefix.prove(request.node)
        size, first = self.page_size, request.num_shared
        if request.max_shared is not None:
            computed = min(computed, request.max_shared)
        last = computed // size
        if self.prefix is None or last <= first:
            return
        assert request.node is not None
        tokens = request.tokens(first * size, last * size)
        path, twins = self.prefix.extend(request.node, tokens, request.pages[first:last], proved)
        request.pages[first:last] = path.pages
        request.node, request.num_shared = path.node, last
        self._came(request, first, last)
        self.pool.free(twins)

    def discard(self, request: Request) -> None:
        """Its logits are not finite, and it has left: no page that it computed stays in the prefix
        cache, nor one that it read before anybody's logits were computed from it.
        """
        if self.prefix is None:
            return
        known = (request.cached_tokens or 0) // self.page_size
        found = self.prefix.match(request.tokens(0, request.total_len), request.realm)
        self.pool.free(self.prefix.discard(found.node, known))

    def flush(self) -> int:
        """Empty the prefix cache; the number of pages freed."""
        if self.prefix is None:
            return 0
        pages = self.prefix.flush()
        self.pool.free(pages)
        return len(pages)


class Holdings:
    """Every row, and the pages of every group that has some of its own: `groups`, by number."""

    def __init__(self, groups: Sequence[Pages], num_rows: int) -> None:
        self.groups = tuple(groups)
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

    def take(self, request: Request, reads_cache: bool) -> bool:
        """A row, and pages on one group for all that the request has to compute; False if no group
        has enough, or if another request computes the beginning of its prompt just now: it is
        `behind` that one then.

        Of the groups that have, the one whose prefix cache knows most of it, or soon will, as long
        as that runs not many more than others; then the one that runs the fewest, then the
        emptiest.
        """
        fewest = min(pages.num_running for pages in self.groups)
        limit = fewest * 3 // 2 + _SLACK

        def order(group: int) -> tuple[bool, int, int, int, int]:
            pages = self.groups[group]
            left = pages.pool.num_free + pages.num_cached
            return pages.num_running > limit, -ahead[group][0], pages.num_running, -left, group

        found = [pages.match(request, reads_cache) for pages in self.groups]
        ahead: list[tuple[int, Request | None]] = [(0, None)] * len(found)
        if reads_cache:
            ahead = [p.ahead(request, known) for p, known in zip(self.groups, found, strict=True)]
        groups = sorted(range(len(self.groups)), key=order)
        request.behind_pages, request.behind = ahead[groups[0]]
        if request.behind is not None:
            return False
        for group in groups:
            if self.groups[group].take(request, found[group]):
                request.group = group
                request.row = heapq.heappop(self.rows)
                return True
        return False

    def of(self, request: Request) -> Pages:
        """The pages of the group that has a running request."""
        return self.groups[request.group]

    def release(self, request: Request) -> None:
        """Take row and pages back."""
        heapq.heappush(self.rows, request.row)
        self.of(request).release(request)
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
