"""Prefix cache: a tree over whole pages, so that equal prompt beginnings are computed once.

One node is one full page of tokens, below the node of the page before it. What may not be shared is
below another root, that of its realm. Other weights (a low-rank adapter's) give other KV of the
same tokens. Another salt is another client's. Running requests hold references on the path that
they read, its root included. A node without references may be evicted once it has no children,
least recently used first, and a root is forgotten then. Only page ids live here, the bytes are the
device's.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol


class Realm(NamedTuple):
    """Whose pages: computed with one set of weights (0: the model's own), under one salt."""

    weights: int = 0
    salt: str = ""


OWN = Realm()


class Node:
    """One cached page. A root holds none (−1); its key is its realm. name: as in `kv.keys`, where
    pages go below the device, and none once no later prompt is to match it.
    """

    __slots__ = (
        "children",
        "is_cut",
        "is_proved",
        "key",
        "name",
        "num_refs",
        "page",
        "parent",
        "stamp",
    )

    def __init__(self, parent: Node | None, key: tuple[Any, ...], page: int) -> None:
        self.is_cut = False  # its parent knows it no more: it is for those alone that read it
        self.is_proved = page < 0  # logits that were computed from it, and those above, are finite
        self.parent = parent
        self.key = key
        self.name = b""
        self.page = page
        self.children: dict[tuple[Any, ...], Node] = {}
        self.num_refs = 0
        self.stamp = 0


class Match(NamedTuple):
    """A path into the tree: its deepest node and its pages from the root down. behind: names of the
    pages that follow below the device. num_known: how many are known, of which a request may be
    able to continue from fewer.
    """

    node: Node
    pages: list[int]
    behind: tuple[bytes, ...] = ()
    num_known: int = 0

    @property
    def num_pages(self) -> int:
        return len(self.pages) + len(self.behind)


class Marks(Protocol):
    """What is kept at some nodes, where a request cannot continue from every one."""

    def resumable(self, found: Match, everywhere: bool) -> Match: ...
    def lose(self, node: Node) -> None: ...


class Below(Protocol):
    """Where pages lie that the device has no room for: see `kv.tiers.host.HostTier`."""

    def root(self, realm: Realm) -> bytes: ...
    def name(self, above: bytes, tokens: Sequence[int]) -> bytes: ...
    def behind(self, found: Match, tokens: Sequence[int], size: int) -> Match: ...
    def proved(self, nodes: Iterable[Node]) -> None: ...
    def used(self, node: Node) -> None: ...
    def leaving(self, node: Node) -> None: ...
    def discard(self, known: Iterable[Node], others: Iterable[Node]) -> None: ...
    def flush(self) -> None: ...


class PrefixCache:
    """The tree. Pages enter by `extend` and leave by `evict`, `flush` or `discard`. marks: of the
    nodes that a prompt may continue from; None: any. below: where pages go from here; None:
    nowhere.
    """

    def __init__(
        self, page_size: int, marks: Marks | None = None, below: Below | None = None
    ) -> None:
        self.page_size = page_size
        self.marks = marks
        self.below = below
        self.num_evictable = 0
        self._roots: dict[tuple[Any, ...], Node] = {}  # those that are read, or have pages
        self._nodes: dict[int, Node] = {}  # page → node
        self._clock = 0
        self._oldest: list[tuple[int, int, Node]] = []  # heap of leaves, some entries outdated

    @property
    def num_cached(self) -> int:
        """Pages in the tree, whether running requests read them or not."""
        return len(self._nodes)

    def root(self, realm: Realm = OWN) -> Node:
        """Above all pages of a realm. A new one stays only once it is locked, or has pages."""
        if (known := self._roots.get(realm)) is not None:
            return known
        made = Node(None, realm, -1)
        if self.below is not None:
            made.name = self.below.root(realm)
        return made

    def match(self, tokens: Sequence[int], realm: Realm = OWN, everywhere: bool = False) -> Match:
        """The longest cached beginning of `tokens` that leaves at least one token to compute, and
        that a request can continue from. everywhere: also of what lies below the device.

        Takes no reference: `lock` the node before anything is evicted.
        """
        found = self.find(tokens, realm)
        if everywhere and self.below is not None:
            found = self.below.behind(found, tokens, self.page_size)
        return found if self.marks is None else self.marks.resumable(found, everywhere)

    def find(self, tokens: Sequence[int], realm: Realm = OWN) -> Match:
        """As `match`, whether a request can continue from there or not."""
        node, pages, size = self.root(realm), [], self.page_size
        for start in range(0, (len(tokens) - 1) // size * size, size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            node = child
            pages.append(node.page)
        return Match(node, pages)

    def lock(self, node: Node) -> None:
        """Take a reference on `node` and all above it."""
        step: Node | None = node
        while step is not None:
            self._refer(step)
            step = step.parent

    def unlock(self, node: Node) -> None:
        """Give the reference on `node` and all above it back; they count as used just now."""
        self._clock += 1
        step: Node | None = node
        leaves = [node]
        while step is not None:
            assert step.num_refs > 0, f"page {step.page} is unlocked twice"
            step.num_refs -= 1
            step.stamp = self._clock
            if step.num_refs == 0 and step.page >= 0:
                self.num_evictable += 1
            if step.is_cut and step.parent is not None:
                leaves.append(step.parent)
            step = step.parent
        for leaf in leaves:
            self._push(leaf)

    def extend(
        self, node: Node, tokens: Sequence[int], pages: Sequence[int], proved: bool = False
    ) -> tuple[Match, list[int]]:
        """Hang full `pages` holding `tokens` below `node`, on which the caller has a reference.
        proved: logits that were computed from these pages, and those above, are finite.

        Returns the path below `node`, on which the reference now also lies, and the caller's
        pages that were cached already: those are not taken over, the path names their twins.
        """
        size = self.page_size
        assert len(tokens) == len(pages) * size, f"{len(tokens)} tokens in {len(pages)} full pages"
        path, duplicates, made = list[int](), list[int](), list[Node]()
        for i, page in enumerate(pages):
            key = tuple(tokens[i * size : (i + 1) * size])
            child = node.children.get(key)
            if child is None:
                assert page not in self._nodes, f"page {page} enters the prefix cache twice"
                child = node.children[key] = self._nodes[page] = Node(node, key, page)
                child.num_refs, child.is_proved = 1, proved and node.is_proved
                if self.below is not None and node.name:
                    child.name = self.below.name(node.name, key)
                    made.append(child)
            else:
                duplicates.append(page)
                self._refer(child)
            node = child
            path.append(node.page)
        if made and made[0].is_proved and self.below is not None:
            self.below.proved(made)
        return Match(node, path), duplicates

    def prove(self, node: Node) -> None:
        """Logits that were computed from `node` and all above it are finite."""
        step, found = node, list[Node]()
        while not step.is_proved and step.parent is not None:
            step.is_proved = True
            found.append(step)
            step = step.parent
        if found and self.below is not None:
            self.below.proved(reversed(found))

    def discard(self, node: Node, known: int) -> list[int]:
        """Logits that were computed from `node` and all above it are not finite: whoever did had
        read the first `known` of these pages here. No later prompt matches the others, nor any that
        nobody proved. Returns the pages that are free now; what runs reads the rest to its end.
        """
        path = [node]
        while (above := path[-1].parent) is not None:
            path.append(above)
        path = path[-2::-1]  # from below the root down
        if self.marks is not None:
            for one in path:
                self.marks.lose(one)
        first = next((i for i, n in enumerate(path) if i >= known or not n.is_proved), len(path))
        if self.below is not None:
            self.below.discard(path[:first], _nameless(path[first : first + 1]))
        if first == len(path):
            return []
        top, parent = path[first], path[first].parent
        assert parent is not None
        del parent.children[top.key]
        top.is_cut = True
        self._push(parent)
        dropped = []
        for loose in reversed(path[first:]):
            if not self._is_loose(loose):
                break
            dropped.append(loose.page)
            self._drop(loose)
        return dropped

    def evict(self, count: int) -> list[int]:
        """Drop up to `count` unreferenced pages, least recently used first; the dropped ids."""
        dropped: list[int] = []
        while len(dropped) < count and self._oldest:
            stamp, _, node = heapq.heappop(self._oldest)
            if not self._is_loose(node) or node.stamp != stamp:
                continue
            dropped.append(node.page)
            if self.below is not None:
                self.below.leaving(node)
            self._drop(node)
        return dropped

    def _drop(self, node: Node) -> None:
        """Take a loose node out."""
        parent = node.parent
        assert parent is not None
        if not node.is_cut:
            del parent.children[node.key]
        del self._nodes[node.page]
        if self.marks is not None:
            self.marks.lose(node)
        node.parent = None
        self.num_evictable -= 1
        self._push(parent)

    def flush(self) -> list[int]:
        """Forget everything: no later prompt matches. Returns the pages that are free now.

        Pages that running requests read stay until those end, out of reach of new ones.
        """
        dropped = self.evict(self.num_evictable)
        if self.below is not None:
            self.below.flush()
            for node in (*self._nodes.values(), *self._roots.values()):
                node.name = b""
        self._roots = {}
        return dropped

    def forget(self, weights: int) -> None:
        """No later prompt matches what these weights made; its pages leave as they grow old."""
        self._roots = {key: root for key, root in self._roots.items() if key[0] != weights}

    def _refer(self, node: Node) -> None:
        if node.page < 0:
            if not node.num_refs and not node.children:
                self._roots.setdefault(node.key, node)
        elif node.num_refs == 0:
            self.num_evictable -= 1
        node.num_refs += 1

    def _is_loose(self, node: Node) -> bool:
        """Whether `node` may be evicted now."""
        held = node.page >= 0 and self._nodes.get(node.page) is node
        return held and node.num_refs == 0 and not node.children

    def _push(self, node: Node) -> None:
        """It may be loose now: a page can be evicted then, and an empty root is forgotten."""
        if node.page < 0 and not node.num_refs and not node.children:
            if self._roots.get(node.key) is node:
                del self._roots[node.key]
            return
        if not self._is_loose(node):
            return
        if len(self._oldest) > 2 * len(self._nodes) + 64:
            leaves = [n for n in self._nodes.values() if self._is_loose(n) and n is not node]
            self._oldest = [(n.stamp, n.page, n) for n in leaves]
            heapq.heapify(self._oldest)
        heapq.heappush(self._oldest, (node.stamp, node.page, node))

    def check(self) -> frozenset[int]:
        """Assert every invariant; returns the pages in the tree."""
        loose = {n.page for s, _, n in self._oldest if self._is_loose(n) and n.stamp == s}
        evictable = 0
        for realm, root in self._roots.items():
            assert root.key == realm and root.page < 0
            assert root.num_refs or root.children, f"{realm} is never forgotten"
        for page, node in self._nodes.items():
            assert node.page == page and len(node.key) == self.page_size
            parent = node.parent
            assert parent is not None
            assert (parent.children.get(node.key) is node) != node.is_cut
            unread = node.is_cut and node.num_refs == 0  # then it may outlive its parent
            assert unread or parent.page < 0 or self._nodes[parent.page] is parent
            assert parent.num_refs >= node.num_refs
            assert parent.page < 0 or parent.stamp >= node.stamp
            assert parent.is_proved or not node.is_proved
            assert all(self._nodes[c.page] is c for c in node.children.values())
            assert not self._is_loose(node) or page in loose, f"page {page} can never be evicted"
            evictable += node.num_refs == 0
        assert evictable == self.num_evictable
        return frozenset(self._nodes)


def _nameless(nodes: Iterable[Node]) -> Iterator[Node]:
    """These and all below them, which lose their names behind it."""
    left = [*nodes]
    while left:
        node = left.pop()
        left += node.children.values()
        yield node
        node.name = b""
