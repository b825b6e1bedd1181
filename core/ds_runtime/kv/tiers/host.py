"""What of one group's pages and states lies in host memory, found by names of pages.

A page's name is the end of a sha256 chain over the tokens of all pages up to it (`kv.chain`), so no
second tree is needed. A prompt that has left the device's tree continues by names alone. A path
lies on the device first, then on the host. Which pages are on both is the write policy's to say.

Copies are only noted here. A plan carries them to every rank, which queue them in front of its
step: pages to the host, then pages from there, then states, in effect in this order. So a slot may
change hands as soon as the plan is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from typing import NamedTuple

from ds_runtime.kv.chain import page_key
from ds_runtime.kv.prefix import Match, Node, Realm
from ds_runtime.kv.snapshots import Snapshots
from ds_runtime.kv.tiers.disk import Disk, Fetch, Wanted
from ds_runtime.kv.tiers.folder import Sought
from ds_runtime.kv.tiers.pace import BringPace
from ds_runtime.kv.tiers.slots import TierSlots

THROUGH, SELECTIVE, BACK = "write_through", "write_through_selective", "write_back"
POLICIES = (THROUGH, SELECTIVE, BACK)


def own_root(realm: Realm) -> bytes:
    """The name in front of all pages of a realm, which nobody outside this process reads."""
    return sha256(f"{realm.weights} {realm.salt}".encode()).digest()


class Noted(NamedTuple):
    """Copies of pages: (page, slot) to the host, (slot, page) from there. hurried: a page is
    written in the same step that saves it.
    """

    saves: list[tuple[int, int]]
    loads: list[tuple[int, int]]
    hurried: bool


class HostTier:
    """The host memory of one group of ranks. pages, states: slots for either. root: the name in
    front of all pages of a realm. snapshots: where a request keeps more than pages.

    write_through: what is proved is saved at once. write_through_selective: once a second prompt
    has read it. write_back: when it leaves the device. Nothing is saved that nobody has proved.
    """

    def __init__(
        self,
        pages: int,
        states: int,
        policy: str,
        root: Callable[[Realm], bytes],
        snapshots: Snapshots | None = None,
    ) -> None:
        self.pages, self.states, self.policy = TierSlots(pages), TierSlots(states), policy
        self._root, self._snapshots = root, snapshots
        if snapshots is not None:
            snapshots.below = self
        self._above: dict[bytes, bytes] = {}  # in front of each page that is here; b"": none is
        self._saves: dict[int, tuple[int, bytes]] = {}  # page → slot and name, noted
        self._loads: list[tuple[int, int]] = []
        self._hurried = False
        self._states_saved: list[tuple[int, bytes]] = []
        self._only_here: dict[Node, None] = {}  # write_back over a disk: that it does not have
        self.disk: Disk | None = None
        self.pace: BringPace | None = None  # None: nobody has measured, so all is brought
        self.num_loaded = 0

    # ---- the prefix cache's side ----

    def root(self, realm: Realm) -> bytes:
        """The name in front of all pages of a realm."""
        return self._root(realm)

    def name(self, above: bytes, tokens: Sequence[int]) -> bytes:
        """That of a page of `tokens` after another."""
        return page_key(above, tokens)

    def behind(self, found: Match, tokens: Sequence[int], size: int) -> Match:
        """A path with the names of what lies here after it; a token at least is left over."""
        names, name = list[bytes](), found.node.name
        if self.pace is not None and not self.pace.host_pays:
            return found
        for start in range(len(found.pages) * size, (len(tokens) - 1) // size * size, size):
            name = page_key(name, tokens[start : start + size])
            if name not in self.pages:
                break
            names.append(name)
        return found._replace(behind=tuple(names))

    def proved(self, nodes: Iterable[Node]) -> None:
        """Logits that were computed from these, and those above, are finite. From above down."""
        if self.policy == THROUGH:
            for node in reversed([*nodes]):  # the deepest is to leave first
                self._keep(node)
        elif self.policy == BACK and self.disk is not None:
            self._only_here.update(dict.fromkeys(nodes))

    def used(self, node: Node) -> None:
        """A prompt has read all pages up to `node`, or a request that had them ends."""
        step: Node | None = node
        while step is not None and step.page >= 0:
            self.pages.touch(step.name)
            self.states.touch(step.name)
            step = step.parent

    @property
    def unsettled(self) -> int:
        """How many nodes `settle` has yet to save."""
        return len(self._only_here)

    def settle(self) -> int:
        """Nothing runs, and the process may end: what only the device has is saved, as many pages
        as may be on their way to the disk. How many."""
        room = 0 if self.disk is None else max(0, self.disk.room(self.pages))
        some = [*self._only_here][: -(-room // 2)]  # there may be a state beside each
        for node in some:
            del self._only_here[node]
            self._keep(node)
        return len(some)

    def read(self, node: Node) -> None:
        """A prompt begins with all pages up to `node`."""
        step: Node | None = node
        while self.policy == SELECTIVE and step is not None and step.page >= 0:
            if step.is_proved:
                self._keep(step)
            step = step.parent
        self.used(node)

    def leaving(self, node: Node) -> None:
        """Its page is another's from now on."""
        if self.policy == BACK and node.is_proved:
            self._save(node)
        self._only_here.pop(node, None)
        self._hurried |= node.page in self._saves

    def discard(self, known: Iterable[Node], others: Iterable[Node]) -> None:
        """Somebody's logits are not finite: no prompt continues from what was kept at `known`, nor
        reads `others`, nor what lies after these.
        """
        for node in known:
            self.states.drop(node.name)
            self._unsave(node.name, "state")
        for node in others:
            self._drop(node.name)
            self._unsave(node.name, "page", "state")
            self.cancel([node.page])
        self._drop_loose()

    def _unsave(self, name: bytes, *kinds: str) -> None:
        """Nothing of it goes to the disk, or stays there."""
        self._states_saved = [one for one in self._states_saved if one[1] != name]
        if self.disk is not None and name:
            self.disk.forget(name, *kinds)

    def cancel(self, pages: Iterable[int]) -> None:
        """Somebody else writes to these before the next step: they are not saved."""
        for page in pages:
            if (noted := self._saves.pop(page, None)) is not None:
                self._drop(noted[1])

    def flush(self) -> None:
        """Forget all."""
        self.pages.clear()
        self.states.clear()
        self._above.clear()
        self._saves.clear()
        self._states_saved.clear()
        self._only_here.clear()
        self._hurried = False

    # ---- snapshots' side ----

    def has_state(self, name: bytes) -> bool:
        """Whether a request can continue from what lies here after this page."""
        return name in self.states

    def state(self, name: bytes) -> int:
        """Its slot, as a copy names it, until the next plan."""
        return -1 - self.states.pin(name)

    def adopted(self, node: Node) -> None:
        """It has a snapshot."""
        if self.policy == THROUGH and node.is_proved:
            self._save_state(node)
        elif self.policy == BACK and self.disk is not None and node.is_proved:
            self._only_here[node] = None

    def losing(self, node: Node) -> None:
        """Its snapshot's block is another's from now on."""
        if self.policy == BACK and node.is_proved:
            self._save_state(node)

    # ---- requests ----

    def hold(self, known: Match) -> list[int]:
        """Slots of the pages behind a path, in its order. They stay until the next plan, and so
        does a state that a request may continue from there."""
        slots = [self.pages.pin(name) for name in reversed(known.behind)]
        last = known.behind[-1] if known.behind else known.node.name
        if last in self.states:
            self.states.pin(last)
        return slots[::-1]

    def load(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Bring what is in slots that are held to pages, in front of the next step."""
        self._loads += zip(slots, pages, strict=True)
        self.num_loaded += len(slots)

    def drain(self) -> Noted:
        """What the next step begins with."""
        saves = [(page, slot) for page, (slot, _) in self._saves.items()]
        noted = Noted(saves, self._loads, self._hurried)
        if self.disk is not None:
            for slot, name in self._saves.values():
                self.disk.save(self.pages, "page", slot, name)
            for slot, name in self._states_saved:
                self.disk.save(self.states, "state", slot, name)
        self._saves, self._loads, self._hurried = {}, [], False
        self._states_saved = []
        self.pages.release()
        self.states.release()
        return noted

    # ---- both ----

    def _keep(self, node: Node) -> None:
        self._save(node)
        if self._snapshots is not None and node in self._snapshots:
            self._save_state(node)

    def _save(self, node: Node) -> None:
        if not node.name or self.pages.touch(node.name):
            return
        if (slot := self.pages.take(node.name)) >= 0:
            assert node.parent is not None
            self._above[node.name] = node.parent.name if node.parent.page >= 0 else b""
            self._saves[node.page] = slot, node.name
            if len(self._above) > 2 * self.pages.count + 64:
                self._above = {n: up for n, up in self._above.items() if n in self.pages}

    def _save_state(self, node: Node) -> None:
        assert self._snapshots is not None
        if not node.name:
            return
        if not self.states.touch(node.name) and (slot := self.states.take(node.name)) >= 0:
            self._snapshots.note(self._snapshots.block(node), -1 - slot)
            self._states_saved.append((slot, node.name))

    def fetch(self, known: Match, tokens: Sequence[int], size: int) -> Fetch:
        """Have what follows a path, all tiers' together, brought here from the disk, as far as a
        request can continue from it."""
        assert self.disk is not None
        first, end = known.num_pages, (len(tokens) - 1) // size
        end = min(end, first + self.pages.count // 2)
        if end <= first or not (self.pace is None or self.pace.disk_pays):
            return Fetch(0.0, done=True)
        last = known.behind[-1] if known.behind else known.node.name
        names = list[bytes]()

        def sought() -> Iterator[Sought]:  # by the thread that looks, up to where a page is missing
            name = last
            for start in range(first * size, end * size, size):
                name = page_key(name, tokens[start : start + size])
                names.append(name)
                kept = self._snapshots is None or name in self.states
                yield Sought(name, name in self.pages, kept)

        above = last if known.num_pages else b""
        return self.disk.fetch(sought(), lambda count: self._finding(names[:count], above))

    def _finding(self, names: Sequence[bytes], above: bytes) -> list[Wanted]:
        """What has to be read for a request to continue after these, which begin after `above`."""
        wanted = list[Wanted]()
        for name in names:
            if not self.pages.touch(name):
                wanted.append((self.pages, "page", name, partial(self._come, name, above)))
            above = name
        if names and self._snapshots is not None and not self.states.touch(names[-1]):
            keep = partial(self.states.adopt, names[-1])
            wanted.insert(0, (self.states, "state", names[-1], keep))
        return wanted

    def _come(self, name: bytes, above: bytes, slot: int) -> None:
        if self.pages.adopt(name, slot):
            self._above[name] = above

    def _drop(self, name: bytes) -> None:
        self.pages.drop(name)
        self.states.drop(name)
        self._above.pop(name, None)

    def _drop_loose(self) -> None:
        """Pages that hang on nothing here may be behind what was discarded: they leave."""
        good = {b""}
        for name in self.pages.names():
            path, step = list[bytes](), name
            while step not in good and step in self.pages:
                path.append(step)
                step = self._above[step]
            if step in good:
                good.update(path)
            else:
                for loose in path:
                    self._drop(loose)
                    self._unsave(loose, "page", "state")

    def check(self) -> None:
        """Assert what holds between steps."""
        self.pages.check()
        self.states.check()
        assert all(name in self._above for name in self.pages.names())
