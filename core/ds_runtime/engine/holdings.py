"""Who holds which row and which pages, and what the prefix cache keeps of them.

Rows and pages change hands at once, also while a launched step still uses them: devices run steps
in the order of their plans, so the new holder always writes after the old one.
"""

from __future__ import annotations

import heapq

from ds_runtime.engine.pages import PagePool
from ds_runtime.engine.prefix import PrefixCache
from ds_runtime.engine.request import Request


class Holdings:
    """Every page and every row.

    A page is at any time exactly one of: free in `pool`, owned by one running request, or in
    `prefix` once. `prefix` None turns the prefix cache off.
    """

    def __init__(
        self, pool: PagePool, prefix: PrefixCache | None, num_rows: int, page_size: int
    ) -> None:
        self.pool = pool
        self.prefix = prefix
        self.page_size = page_size
        self.rows = list(range(num_rows))  # free ones, a heap: low rows first

    @property
    def num_cached(self) -> int:
        """Pages that only the prefix cache holds."""
        return self.prefix.num_evictable if self.prefix else 0

    def take(self, request: Request, reads_cache: bool, reserve: int) -> bool:
        """A row and pages for all that the request has to compute; False if there are too few.

        Of what the prefix cache knows nothing is computed again. `reserve`: pages that must be
        left, if only by eviction.
        """
        prefix, pages = self.prefix, list[int]()
        node = prefix.root(request.weights) if prefix else None
        if prefix and reads_cache:
            node, pages = prefix.match(request.tokens(0, request.total_len), request.weights)
            prefix.lock(node)
        needed = -(-request.total_len // self.page_size) - len(pages)
        if not self._make_room(needed, reserve):
            if prefix and node:
                prefix.unlock(node)
            return False
        request.node, request.num_shared = node, len(pages)
        request.pages = pages + self.pool.alloc(needed)
        request.num_computed = len(pages) * self.page_size
        request.row = heapq.heappop(self.rows)
        return True

    def grow(self, request: Request) -> bool:
        """A page for the next token if it needs one; False if there is none."""
        if request.num_computed < len(request.pages) * self.page_size:
            return True
        if not self._make_room(1):
            return False
        request.pages += self.pool.alloc(1)
        return True

    def cover(self, request: Request, count: int, reserve: int) -> int:
        """How many of the next `count` tokens have pages, once it has got what can be spared.

        For drafts, which may stay without: nobody is preempted for them. `reserve` as in `take`.
        """
        missing = -(-(request.num_computed + count) // self.page_size) - len(request.pages)
        if missing > 0 and self._make_room(missing, reserve):
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
        """Take row and pages back."""
        heapq.heappush(self.rows, request.row)
        if request.node is not None and self.prefix is not None:
            self.prefix.unlock(request.node)
        self.pool.free(request.pages[request.num_shared :])
        request.row, request.node, request.on_device = -1, None, False
        request.num_drafts, request.drafts, request.draft_parents = 0, [], []
        request.is_verifying = False
        request.pages, request.num_shared, request.num_computed = [], 0, 0

    def share(self, request: Request, computed: int) -> None:
        """Bring the request's full pages below token `computed` into the prefix cache.

        Not those with reasoning, where the request asks so: no later prompt begins with it.
        """
        size, first = self.page_size, request.num_shared
        if request.max_shared is not None:
            computed = min(computed, request.max_shared)
        last = computed // size
        if self.prefix is None or last <= first:
            return
        assert request.node is not None
        tokens = request.tokens(first * size, last * size)
        path, twins = self.prefix.extend(request.node, tokens, request.pages[first:last])
        request.pages[first:last] = path.pages
        request.node, request.num_shared = path.node, last
        self.pool.free(twins)

    def forget(self, weights: int) -> None:
        """Nothing that these weights made is read again."""
        if self.prefix is not None:
            self.prefix.forget(weights)

    def flush(self) -> int:
        """Empty the prefix cache; the number of pages freed."""
        if self.prefix is None:
            return 0
        pages = self.prefix.flush()
        self.pool.free(pages)
        return len(pages)
