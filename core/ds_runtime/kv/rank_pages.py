"""The pages of one group of ranks: who has which, and what the prefix cache keeps of them."""

from __future__ import annotations

from typing import Protocol

from ds_runtime.kv.holder import Holder
from ds_runtime.kv.pages import PagePool
from ds_runtime.kv.prefix import Match, PrefixCache
from ds_runtime.kv.snapshots import Snapshots
from ds_runtime.kv.tiers.host import HostTier


class Guests(Protocol):
    """Who holds pages for other engines."""

    def leave(self) -> bool:
        """Give some back; False if there are none."""
        ...


class Pages:
    """Every page of one group of ranks.

    A page is at any time exactly one of: free in `pool`, owned by one running request, lent, or in
    `prefix` once. `prefix` None turns the prefix cache off. `num_running`: requests that run here.
    Pages of prompts that running requests will bring into `prefix` are known by their beginnings.
    `snapshots`: where a request keeps more than pages, and there is a prefix cache. `guests` go
    before a running request is preempted, or one waits though none runs. `below`: the prefix
    cache's, where pages have a place in host memory.
    """

    def __init__(
        self,
        pool: PagePool,
        prefix: PrefixCache | None,
        page_size: int,
        snapshots: Snapshots | None = None,
        below: HostTier | None = None,
    ) -> None:
        self.pool = pool
        self.prefix = prefix
        self.snapshots = snapshots
        self.page_size = page_size
        self.num_running = 0
        self.guests: Guests | None = None
        self.below = below
        self._coming: dict[int, Holder] = {}

    @property
    def num_cached(self) -> int:
        """Pages that only the prefix cache holds."""
        return self.prefix.num_evictable if self.prefix else 0

    def match(self, request: Holder, reads_cache: bool) -> Match | None:
        """What the prefix cache knows of the request, nothing unless it reads that."""
        if self.prefix is None:
            return None
        if not reads_cache:
            return Match(self.prefix.root(request.realm), [])
        return self.prefix.match(request.tokens(0, request.total_len), request.realm, True)

    def by_tier(self, request: Holder) -> dict[str, int] | None:
        """Where the cached tokens of a request that begins to run were."""
        if self.below is None:
            return None
        loaded = request.num_loaded * self.page_size
        found = {"device": request.num_computed - loaded, "host": loaded}
        if self.below.disk is not None:
            read = 0 if request.fetch is None else len(request.fetch.come) * self.page_size
            found["storage"] = min(read, loaded)
            found["host"] -= found["storage"]
        return found

    def fetch(self, request: Holder, known: Match | None) -> bool:
        """Whether the disk has to be waited for, which is asked once for a request."""
        if self.below is None or self.below.disk is None or known is None:
            return False
        if request.fetch is None:
            tokens = request.tokens(0, request.total_len)
            request.fetch = self.below.fetch(known, tokens, self.page_size)
        return not request.fetch.done

    def ahead(
        self, request: Holder, known: Match | None, here: bool = True
    ) -> tuple[int, Holder | None]:
        """How many pages of its prompt the request need not compute here, and who computes the last
        of them, if `known`, what is cached, has it not. here: it is to run on this group, so that
        snapshots are due where prompts part.
        """
        size, count = self.page_size, known.num_pages if known else 0
        found: tuple[int, Holder | None] = count, None
        last: Holder | None = None
        while self._coming and (count + 1) * size < request.prompt_len:
            by = self._coming.get(request.beginning(count, size))
            if by is None or by.order > request.order:
                break
            count += 1
            last, kept = by, self.snapshots
            if kept is None or (kept.pool.num_pages and kept.is_due(by, count * size)):
                found = count, by
        kept = self.snapshots
        if kept is not None and kept.pool.num_pages and last is not None and count > found[0]:
            if kept.may_branch(last, count * size):
                if here:
                    kept.branch(last, count * size)
                return count, last
            if here:  # that one is past it: the next will go on from here
                request.branches.add(count * size)
        return found

    def _announce(self, request: Holder) -> None:
        """Others need not compute what it will share of its prompt. Up to where it leaves a
        snapshot for them it takes the place of whoever does not.
        """
        own = max(request.branches, default=0) // self.page_size
        for index in range(request.num_shared, self._last(request)):
            key = request.beginning(index, self.page_size)
            if index < own:
                self._coming[key] = request
            else:
                self._coming.setdefault(key, request)

    def _came(self, request: Holder, first: int, last: int) -> None:
        """These pages of it are shared, or never will be."""
        for index in range(first, min(last, self._last(request))):
            key = request.beginning(index, self.page_size)
            if self._coming.get(key) is request:
                del self._coming[key]

    def _last(self, request: Holder) -> int:
        """How many pages of its prompt it shares."""
        shared = request.prompt_len if request.max_shared is None else request.max_shared
        return min(shared, request.prompt_len) // self.page_size

    def take(self, request: Holder, known: Match | None, row: int) -> bool:
        """Pages for all that the request has to compute in a row; False if there are too few.

        known: what `match` found just now, which is not computed again. As many pages as requests
        run here must be left, if only by eviction: fewer preemptions right afterwards.
        """
        prefix, pages, slots = self.prefix, list[int](), list[int]()
        if prefix and known:
            pages = known.pages
            prefix.lock(known.node)
            if self.below is not None:
                slots = self.below.hold(known)
        needed = -(-request.total_len // self.page_size) - len(pages)
        if not self._make_room(needed, self.num_running):
            if prefix and known:
                prefix.unlock(known.node)
            return False
        request.row = row
        request.node, request.num_shared = known.node if known else None, len(pages)
        request.pages = pages + self.pool.alloc(needed)
        if self.below is not None and request.node is not None:
            self._load(request, slots)
            self.below.read(request.node)
        request.num_computed = request.num_shared * self.page_size
        self.num_running += 1
        if prefix:
            self._announce(request)
        if self.snapshots is not None:
            self.snapshots.start(request, known.num_known if known else 0)
        return True

    def _load(self, request: Holder, slots: list[int]) -> None:
        """Bring what lies below the device behind the request's path to its next pages."""
        assert self.prefix is not None and self.below is not None and request.node is not None
        first, size = request.num_shared, self.page_size
        last = first + len(slots)
        mine, tokens = request.pages[first:last], request.tokens(first * size, last * size)
        path, twins = self.prefix.extend(request.node, tokens, mine, proved=True)
        assert not twins, "what the tree has is matched there"
        request.node, request.num_shared = path.node, last
        self.below.load(slots, mine)
        request.num_loaded = len(slots)

    def grow(self, request: Holder) -> bool:
        """A page for the next token if it needs one; False if there is none."""
        if request.num_computed < len(request.pages) * self.page_size:
            return True
        if not self._make_room(1):
            return False
        request.pages += self.pool.alloc(1)
        return True

    def cover(self, request: Holder, count: int) -> int:
        """How many of the next `count` tokens have pages, once it has got what can be spared.

        For drafts, which may stay without: nobody is preempted for them. Reserves as `take` does.
        """
        missing = -(-(request.num_computed + count) // self.page_size) - len(request.pages)
        if missing > 0 and self._make_room(missing, self.num_running):
            request.pages += self.pool.alloc(missing)
        return min(count, len(request.pages) * self.page_size - request.num_computed)

    def _make_room(self, count: int, reserve: int = 0) -> bool:
        """Evict until `count` pages are free, if `reserve` more could follow."""
        while self.pool.num_free + self.num_cached < count + reserve:
            if reserve or self.guests is None or not self.guests.leave():
                return False
        missing = count - self.pool.num_free
        if self.prefix and missing > 0:
            self.pool.free(self.prefix.evict(missing))
        return True

    def lend(self, count: int) -> list[int] | None:
        """Pages for what comes from elsewhere; None where as many cannot be spared."""
        if count and not self._make_room(count, self.num_running + 1):
            return None
        pages = self.pool.alloc(count)
        if self.below is not None:
            self.below.cancel(pages)
        return pages

    def release(self, request: Holder) -> None:
        """Take its pages back."""
        self.num_running -= 1
        if self.snapshots is not None:
            self.snapshots.end(request)
        if request.node is not None and self.prefix is not None:
            self._came(request, request.num_shared, len(request.pages))
            self.prefix.unlock(request.node)
            if self.below is not None:
                self.below.used(request.node)
        self.pool.free(request.pages[request.num_shared :])
        request.node = None
        request.pages, request.num_shared, request.num_computed = [], 0, 0

    def share(self, request: Holder, computed: int, proved: bool = False) -> None:
        """Bring the request's full pages below token `computed` into the prefix cache.

        Not those with reasoning, where the request asks so: no later prompt begins with it.
        proved: logits that were computed from its pages are finite. Pages that others brought there
        meanwhile take the place of the request's own, and its next logits prove them.
        """
        if self.prefix is None or (node := request.node) is None:
            return
        if proved and not node.is_proved:
            self.prefix.prove(node)
        size, first = self.page_size, request.num_shared
        if request.max_shared is not None:
            computed = min(computed, request.max_shared)
        if (last := computed // size) <= first:
            return
        tokens = request.tokens(first * size, last * size)
        path, twins = self.prefix.extend(node, tokens, request.pages[first:last], proved)
        request.pages[first:last] = path.pages
        request.node, request.num_shared = path.node, last
        self._came(request, first, last)
        self.pool.free(twins)
        if self.snapshots is not None:
            self.snapshots.publish(request)

    def reach(self, request: Holder, length: int) -> int:
        """How many of its next `length` tokens one step may compute."""
        return length if self.snapshots is None else self.snapshots.reach(request, length)

    def advance(self, request: Holder) -> None:
        """A step is planned that begins where the request is."""
        if self.snapshots is not None:
            self.snapshots.advance(request)
            self.snapshots.publish(request)

    def discard(self, request: Holder) -> None:
        """Its logits are not finite, and it has left. No page that it computed stays in the prefix
        cache, nor one that it read before anybody's logits were computed from it.
        """
        if self.prefix is None:
            return
        known = (request.cached_tokens or 0) // self.page_size
        found = self.prefix.find(request.tokens(0, request.total_len), request.realm)
        self.pool.free(self.prefix.discard(found.node, known))

    def flush(self) -> int:
        """Empty the prefix cache; the number of pages freed."""
        if self.prefix is None:
            return 0
        pages = self.prefix.flush()
        self.pool.free(pages)
        return len(pages)
