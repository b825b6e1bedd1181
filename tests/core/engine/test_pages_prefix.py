"""Page pool and prefix cache against naive models of themselves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from ds_runtime.kv.pages import PagePool
from ds_runtime.kv.prefix import PrefixCache, Realm
from examples import examples

SIZE = 2


def test_pool_hands_out_every_page_once():
    pool = PagePool(5)
    first, rest = pool.alloc(2), pool.alloc(3)
    assert sorted(first + rest) == [0, 1, 2, 3, 4] and pool.num_free == 0
    assert pool.num_free == 0 and pool.alloc(0) == []
    pool.free(first)
    assert pool.num_free == 2 and pool.free_pages() == frozenset(first)
    assert sorted(pool.alloc(2)) == sorted(first)


def test_pool_notices_what_must_not_happen():
    pool = PagePool(3)
    pages = pool.alloc(3)
    with pytest.raises(AssertionError):
        pool.alloc(1)
    pool.free(pages[:1])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(pages[:1])


def test_match_stops_at_the_first_difference_and_leaves_a_token():
    cache = PrefixCache(3)
    cache.lock(root := cache.root())
    match, twins = cache.extend(root, [1, 2, 3, 4, 5, 6], [10, 11])
    assert (match.pages, twins) == ([10, 11], [])
    assert cache.match([]).pages == []
    assert cache.match([1, 2, 3]).pages == []
    assert cache.match([1, 2, 3, 4]).pages == [10]
    assert cache.match([1, 2, 3, 4, 5, 6]).pages == [10]
    assert cache.match([1, 2, 3, 4, 5, 6, 7]).pages == [10, 11]
    assert cache.match([1, 2, 3, 4, 5, 7, 7]).pages == [10]
    assert cache.match([4, 5, 6, 1, 2, 3, 7]).pages == []
    assert cache.evict(5) == [] and cache.num_evictable == 0
    cache.unlock(match.node)
    assert cache.evict(5) == [11, 10]


def test_bookkeeping_does_not_grow_with_use():
    cache = PrefixCache(1)
    cache.lock(root := cache.root())
    node = cache.extend(root, [1, 2, 3], [0, 1, 2])[0].node
    cache.unlock(node)
    for _ in range(5000):
        cache.lock(node)
        cache.unlock(node)
    cache.check()
    assert len(cache._oldest) < 200
    assert cache.evict(3) == [2, 1, 0]


def test_realms_that_hold_nothing_are_forgotten():
    """A client that draws a salt for every request leaves nothing behind but its pages."""
    cache = PrefixCache(1)
    for i in range(1000):
        realm = Realm(i % 3, f"salt {i}")
        cache.lock(node := cache.match([1, 2], realm).node)  # too short to leave a page
        assert cache.match([1, 2], Realm()).pages == []
        if i % 100 == 0:
            node = cache.extend(node, [1], [i])[0].node
        cache.unlock(node)
        cache.check()
        cache.match([1, 2, 3], Realm(0, f"only looked for {i}"))
    assert len(cache._roots) == 10
    assert cache.match([1, 2], Realm(300 % 3, "salt 300")).pages == [300]
    cache.forget(300 % 3)
    assert cache.match([1, 2], Realm(300 % 3, "salt 300")).pages == []
    assert len(cache.evict(1000)) == 10 and not cache._roots


class Naive:
    """Every cached page under the whole sequence that it ends, with counts kept the slow way. Each
    token stands with its realm, so that nothing is shared between two.
    """

    def __init__(self) -> None:
        self.pages: dict[tuple[int, ...], int] = {}
        self.used: dict[tuple[int, ...], int] = {}
        self.held: list[tuple[int, ...]] = []  # one entry per reader: the sequence it is on
        self.hidden: list[dict] = []

    def match(self, tokens) -> list[int]:
        found, size = [], SIZE
        while size < len(tokens) and tuple(tokens[:size]) in self.pages:
            found.append(self.pages[tuple(tokens[:size])])
            size += SIZE
        return found

    def is_held(self, key) -> bool:
        return any(h[: len(key)] == key for h in self.held)

    def evict_one(self) -> int | None:
        loose = [
            key
            for key in self.pages
            if not self.is_held(key)
            and not any(k != key and k[: len(key)] == key for k in self.pages)
        ]
        if not loose:
            return None
        return self.pages.pop(min(loose, key=lambda k: self.used[k]))


class PrefixMachine(RuleBasedStateMachine):
    """Readers come, extend their path, leave; pages are evicted in between."""

    readers = Bundle("readers")

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(SIZE)
        self.naive = Naive()
        self.clock = 0
        self.next_page = 0

    tokens = st.lists(st.integers(0, 1), max_size=9)
    realms = st.sampled_from([Realm(), Realm(0, "a"), Realm(1, ""), Realm(1, "a")])

    def fresh(self, count: int) -> list[int]:
        self.next_page += count
        return list(range(self.next_page - count, self.next_page))

    @rule(target=readers, tokens=tokens, realm=realms)
    def arrive(self, tokens, realm):
        match = self.cache.match(tokens, realm)
        known = [(realm, token) for token in tokens]
        assert match.pages == self.naive.match(known)
        self.cache.lock(match.node)
        sequence = tuple(known[: len(match.pages) * SIZE])
        self.naive.held.append(sequence)
        return [match.node, sequence, realm]

    @rule(reader=readers, count=st.integers(1, 3), data=st.data())
    def extend(self, reader, count, data):
        node, sequence, realm = reader
        more = data.draw(st.lists(st.integers(0, 1), min_size=count * SIZE, max_size=count * SIZE))
        offered = self.fresh(count)
        path, twins = self.cache.extend(node, more, offered)
        expected, expected_twins, now = [], [], sequence
        for i, page in enumerate(offered):
            now += tuple((realm, token) for token in more[i * SIZE : (i + 1) * SIZE])
            if now in self.naive.pages:
                expected_twins.append(page)
            else:
                self.naive.pages[now] = page
                self.naive.used[now] = 0
            expected.append(self.naive.pages[now])
        assert (path.pages, twins) == (expected, expected_twins)
        self.naive.held.remove(sequence)
        self.naive.held.append(now)
        reader[:] = [path.node, now, realm]

    @rule(reader=consumes(readers))
    def leave(self, reader):
        node, sequence, _ = reader
        self.cache.unlock(node)
        self.naive.held.remove(sequence)
        self.clock += 1
        for size in range(SIZE, len(sequence) + 1, SIZE):
            self.naive.used[sequence[:size]] = self.clock

    @rule(count=st.integers(0, 4))
    def evict(self, count):
        expected = []
        while len(expected) < count and (page := self.naive.evict_one()) is not None:
            expected.append(page)
        assert self.cache.evict(count) == expected

    @rule(tokens=tokens, realm=realms)
    def look(self, tokens, realm):
        known = [(realm, token) for token in tokens]
        assert self.cache.match(tokens, realm).pages == self.naive.match(known)

    @invariant()
    def agrees(self):
        assert self.cache.check() == frozenset(self.naive.pages.values())
        assert self.cache.num_cached == len(self.naive.pages)
        loose = sum(not self.naive.is_held(key) for key in self.naive.pages)
        assert self.cache.num_evictable == loose

    def teardown(self):
        held = {self.naive.pages[k] for k in self.naive.pages if self.naive.is_held(k)}
        dropped = self.cache.flush()
        assert sorted(dropped) == sorted(set(self.naive.pages.values()) - held)
        assert self.cache.check() == held
        assert self.cache.match([0] * 9).pages == self.cache.match([1] * 9).pages == []


TestPrefix = PrefixMachine.TestCase
TestPrefix.settings = settings(max_examples=examples(150), stateful_step_count=30, deadline=None)


def test_finite_logits_prove_what_they_were_computed_from():
    """Not the pages of somebody else that take the place of one's own: those may still be NaN."""
    cache = PrefixCache(SIZE)
    for _ in range(3):  # requests
        cache.lock(root := cache.root())
    first, _ = cache.extend(root, [1, 2, 3, 4], [0, 1])
    cache.prove(first.node.parent)
    second, twins = cache.extend(root, [1, 2, 3, 4, 5, 6], [2, 3, 4], proved=True)
    assert (second.pages, twins) == ([0, 1, 4], [2, 3])
    third, twins = cache.extend(root, [7, 8], [5], proved=True)
    assert [n.is_proved for n in (first.node, second.node, third.node)] == [False, False, True]
    cache.check()
    for one in (second, first):
        cache.unlock(one.node)
    assert cache.discard(second.node, 3) == [4, 1]
    assert cache.match([1, 2, 3, 4, 5]).pages == [0]


class _Reader:
    """A sequence that runs: what it read from the cache, and where it is now."""

    def __init__(self, cache, tokens):
        self.tokens = tokens
        match = cache.match(tokens)
        self.read, self.node, self.pages = len(match.pages), match.node, list(match.pages)
        cache.lock(self.node)


@given(data=st.data())
@settings(deadline=None)
def test_what_is_discarded_is_never_matched_again(data):
    """Of random sequences some prove what they have read and hung, some leave it in doubt, and one
    discards: its own pages are out of reach, and so are those that nobody proved; all others stay,
    and every page is free again once nobody reads it.
    """
    cache, pool, running = PrefixCache(1), PagePool(200), []
    proved, owned = set(), {}  # pages
    tokens = st.lists(st.integers(0, 1), min_size=2, max_size=6)
    for _ in range(data.draw(st.integers(1, 12))):
        if running and data.draw(st.booleans()):
            one = running.pop(data.draw(st.integers(0, len(running) - 1)))
            cache.unlock(one.node)
            if data.draw(st.booleans()):
                found = cache.match([*one.tokens, 9])
                kept = found.pages[: one.read]
                while kept and kept[-1] not in proved:
                    kept.pop()
                pool.free(cache.discard(found.node, one.read))
                assert cache.match([*one.tokens, 9]).pages == kept
        else:
            one = _Reader(cache, data.draw(tokens))
            left = one.tokens[one.read :]
            path, twins = cache.extend(one.node, left, fresh := pool.alloc(len(left)))
            pool.free(twins)
            one.node, one.pages = path.node, [*one.pages, *path.pages]
            owned.update(dict.fromkeys(fresh))
            running.append(one)
            proved -= set(fresh)
            if data.draw(st.booleans()):
                cache.prove(one.node)
                proved |= set(one.pages)
        held = cache.check()
        assert len(held) + pool.num_free == 200, "a page is lost"
    for one in running:
        cache.unlock(one.node)
    pool.free(cache.evict(200))
    assert pool.num_free == 200
