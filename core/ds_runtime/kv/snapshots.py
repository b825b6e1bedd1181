"""Snapshots of what requests keep besides their pages: when they are made, and who has them.

Of each state group a request that runs has the block of its row. After the blocks of all rows, and
a spare one, lie those of snapshots: copies from where a page ended, which a prompt that begins
alike continues from. The prefix cache keeps them at the nodes of such pages until others need their
blocks; a request has one at most that is not there yet.

A quarter of the blocks at most is for snapshots that prompts have gone on from, those used last:
they stay. Of the others the one used least recently goes where no block is free. Answers under way
have half of the blocks at most: however many requests run, what they began with stays.

Copies are only noted here. They run in front of the next step, in their order: a block changes
hands at once, as pages do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ds_runtime.kv.holder import Holder
from ds_runtime.kv.pages import PagePool
from ds_runtime.kv.prefix import Match, Node

TOKENS = 4096  # of a prompt between two snapshots


@dataclass(slots=True, eq=False)
class PinnedBlock:
    """Somebody outside reads the block of a node. stands: it is the node's yet. A block that was
    the node's, then another's, and is the node's again, does not count."""

    node: Node
    block: int
    stands: bool = True


class StatesBelow(Protocol):
    """Where snapshots lie that the device has no room for: see `kv.tiers.host.HostTier`."""

    def has_state(self, name: bytes) -> bool: ...
    def state(self, name: bytes) -> int: ...
    def adopted(self, node: Node) -> None: ...
    def losing(self, node: Node) -> None: ...


class Snapshots:
    """The snapshots of one rank: `count` at most, after `rows` requests' blocks and a spare one.

    A prompt has snapshots at every `TOKENS` tokens, at its last page that it does not fill, and
    where another prompt was seen to leave it. After the prompt a request renews one with every
    page, which is the last one's when it ends. below: where they go from here; None: nowhere. In
    copies −1 − n is slot n there.
    """

    def __init__(self, page_size: int, rows: int, count: int) -> None:
        self.page_size = page_size
        self.below: StatesBelow | None = None
        self.pool = PagePool(count)
        self._first = rows + 1
        self._every = -(-TOKENS // page_size) * page_size
        self.num_hits = self.num_evicted = 0  # gone on from; lost, that others had their blocks
        self._new: dict[Node, int] = {}  # of both kinds those used last come last
        self._read: dict[Node, int] = {}  # these stay: prompts have gone on from them
        self._copies: list[tuple[int, int]] = []
        self._pinned: dict[Node, list[PinnedBlock]] = {}

    # ---- the prefix cache's side ----

    @property
    def num_kept(self) -> int:
        """How many nodes have one."""
        return len(self._new) + len(self._read)

    def resumable(self, found: Match, everywhere: bool) -> Match:
        """The part of a path that a request can continue from: up to its last node with a snapshot.
        everywhere: or up to a page with one below the device.
        """
        below, known = self.below if everywhere else None, found.num_pages
        behind = found.behind
        while behind and (below is None or not below.has_state(behind[-1])):
            behind = behind[:-1]
        if behind:
            return found._replace(behind=behind, num_known=known)
        node, pages = found.node, found.pages
        while node.parent is not None and node not in self:
            if below is not None and below.has_state(node.name):
                break
            node = node.parent
            pages = pages[:-1]
        return Match(node, pages, num_known=known)

    def lose(self, node: Node) -> None:
        """The node leaves, or nothing continues from it."""
        if self.below is not None and node in self:
            self.below.losing(node)
        if (block := self._forget(node)) >= 0:
            self.give(block)
        for pin in self._pinned.pop(node, []):
            pin.stands = False

    # ---- those outside, which read or bring a node's ----

    def __contains__(self, node: Node) -> bool:
        return node in self._new or node in self._read

    def block(self, node: Node) -> int:
        """That of a node, −1 if it has none."""
        return self._read.get(node, self._new.get(node, -1))

    @property
    def num_pinned(self) -> int:
        """How many nodes are pinned."""
        return len(self._pinned)

    def is_pinned(self, node: Node) -> bool:
        """Whether somebody outside reads its block."""
        return node in self._pinned

    def pin(self, node: Node) -> PinnedBlock:
        """Its block, which no other gets until `unpin`, unless the node loses it."""
        made = PinnedBlock(node, self._use(node))
        self._pinned.setdefault(node, []).append(made)
        return made

    def unpin(self, pin: PinnedBlock) -> None:
        """One reader less."""
        if pin.stands:
            (pins := self._pinned[pin.node]).remove(pin)
            if not pins:
                del self._pinned[pin.node]

    def reserve(self) -> int:
        """A block for one that comes, −1 if others have all: then `adopt` it, or `give` it."""
        return self._take(answers=False)

    def adopt(self, node: Node, block: int) -> None:
        """It has what stands for this node. One that the node has already stays: it may be read."""
        if node in self:
            self.give(block)
        if node not in self._read:
            self._new[node] = self._new.pop(node, block)
        if self.below is not None:
            self.below.adopted(node)

    def give(self, block: int) -> None:
        """It is free."""
        self.pool.free([block - self._first])

    # ---- the requests' side ----

    def reach(self, request: Holder, length: int) -> int:
        """How many of the next `length` tokens a step may compute, so that it ends where a snapshot
        is to be made.
        """
        start = request.num_computed
        each = self.page_size if request.on_device else self._every
        stops = [(start // each + 1) * each]
        if not request.on_device:
            stops += [at for at in (*self._ends(request), *request.branches) if at > start]
        return min(length, min(stops) - start)

    def start(self, request: Holder, num_known: int = 0) -> None:
        """It takes its row: what it has read of the prefix cache continues from a snapshot. Where
        it leaves the pages that are known others may, too: it makes one there.
        """
        node = request.node
        if num_known > request.num_shared:
            request.branches.add(num_known * self.page_size)
        if request.num_shared and node is not None:
            self.num_hits += 1
            self._copies.append((self._source(node), request.row))
            request.snapshot_at = request.num_computed

    def advance(self, request: Holder) -> None:
        """A step is planned from where it is now: make the snapshot that is due there."""
        at = request.num_computed
        if at % self.page_size or at in (0, request.snapshot_at):
            return
        if request.max_shared is not None and at > request.max_shared:
            return  # no page up to there will be in the prefix cache
        if not (request.on_device or self.is_due(request, at)):
            return
        if request.snapshot < 0:
            request.snapshot = self._take(request.on_device)
        if request.snapshot >= 0:
            request.snapshot_at = at
            self._copies.append((request.row, request.snapshot))

    def is_due(self, request: Holder, at: int) -> bool:
        """Whether a request that computes known tokens makes one there."""
        if at % self._every == 0 or at in request.branches:
            return True
        return at in self._ends(request)

    def branch(self, request: Holder, at: int) -> bool:
        """Another prompt leaves this one there, which has yet to be computed up to it: a snapshot
        is due there. False where it is past it.
        """
        if not self.may_branch(request, at):
            return False
        request.branches.add(at)
        return True

    @staticmethod
    def may_branch(request: Holder, at: int) -> bool:
        """Whether a request has yet to be computed up to there."""
        return not request.on_device and request.num_computed < at

    def publish(self, request: Holder, ended: bool = False) -> None:
        """Its pages are in the prefix cache, and so may be its snapshot: one in the prompt, or the
        last one of a request that has ended.
        """
        if ended and request.num_computed == request.num_shared * self.page_size:
            self.advance(request)
        at, node = request.snapshot_at, request.node
        if request.snapshot < 0 or not (ended or at <= request.prompt_len):
            return
        if node is not None and at == request.num_shared * self.page_size:
            block, request.snapshot = request.snapshot, -1
            self.adopt(node, block)

    def end(self, request: Holder) -> None:
        """It gives its row back."""
        self.publish(request, ended=True)
        if request.snapshot >= 0:
            self.give(request.snapshot)
        request.snapshot, request.snapshot_at = -1, 0
        request.branches.clear()

    def drain(self) -> list[tuple[int, int]]:
        """(source, target) of copies that are to run in front of the next step, in this order."""
        due, self._copies = self._copies, []
        return due

    def _ends(self, request: Holder) -> tuple[int, int]:
        """The ends of the last pages in front of the last token of the prompt, and of all."""
        size = self.page_size
        return (request.prompt_len - 1) // size * size, (request.total_len - 1) // size * size

    def _forget(self, node: Node) -> int:
        """Its block, −1 if it has none."""
        return self._read.pop(node, self._new.pop(node, -1))

    def note(self, source: int, target: int) -> None:
        """A copy of a block, after those noted so far."""
        self._copies.append((source, target))

    def _source(self, node: Node) -> int:
        """What a prompt goes on from there."""
        if node in self or self.below is None:
            return self._use(node)
        return self.below.state(node.name)

    def _use(self, node: Node) -> int:
        """Its block. A prompt goes on from there."""
        assert node in self, "nobody has a snapshot there"
        block = self._read[node] = self._forget(node)
        if len(self._read) > self.pool.num_pages // 4:
            oldest = next(iter(self._read))
            self._new[oldest] = self._read.pop(oldest)
        return block

    def _take(self, answers: bool) -> int:
        """A block for a request that answers, or for what others go on from; −1 if none is left."""
        count, free = self.pool.num_pages, self.pool.num_free
        if answers and count - free - self.num_kept >= count // 2:
            return -1
        if not free:
            if (oldest := next((n for n in self._new if n not in self._pinned), None)) is None:
                return -1
            self.lose(oldest)
            self.num_evicted += 1
        return self.pool.alloc(1)[0] + self._first

    def check(self, holders: Sequence[Holder]) -> None:
        """Assert that each block is free, a request's, or a node's, and never two of these."""
        held = [h.snapshot - self._first for h in holders if h.snapshot >= 0]
        held += [block - self._first for block in (*self._new.values(), *self._read.values())]
        assert not self._new.keys() & self._read.keys()
        for node, pins in self._pinned.items():
            assert pins and {(p.node, p.block, p.stands) for p in pins} == {
                (node, self._new.get(node, self._read.get(node)), True)
            }
        assert len(self._read) <= self.pool.num_pages // 4
        assert sorted([*held, *self.pool.free_pages()]) == list(range(self.pool.num_pages))
