"""Where the front end of an engine asks for pages to be handed over.

Nothing of it is there before somebody asks: no socket, no memory, and no digest of the weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ds_runtime.assembly.result import Assembly
from ds_runtime.checkpoint.files import Stamps
from ds_runtime.errors import DsRuntimeError, PluginError, named
from ds_runtime.kv.budget import KvMemory
from ds_runtime.kv.digest import weights_digest
from ds_runtime.kv.keys import Origin
from ds_runtime.kv.prefix import Realm
from ds_runtime.kv.rank_pages import Pages
from ds_runtime.kv.transfer.asked import HoldPages, PagesHeld, PagesPulled, PullPages
from ds_runtime.kv.transfer.handover import Handover
from ds_runtime.kv.transfer.leases import Leases
from ds_runtime.kv.transfer.sockets import SocketTransfer
from ds_runtime.ops.contracts.caches import Caches
from ds_runtime.platform.kv_transfer import KvTransfer, TransferError

_BUSY, _OPEN = 1, 50  # milliseconds between looks: at what is under way, and whether a peer speaks


class LoadedAdapter(Protocol):
    """An adapter that an engine holds. key: as of its realm; folder, stamps: its files, before they
    were read."""

    @property
    def key(self) -> int: ...
    @property
    def folder(self) -> Path: ...
    @property
    def stamps(self) -> Stamps: ...


class HasCaches(Protocol):
    """A rank's caches, with this many pages. memory: how many blocks of states they have."""

    caches: Caches
    num_pages: int
    memory: KvMemory

    def move_states(self, copies: Sequence[tuple[int, int]]) -> None: ...


class Desk:
    """That of one engine. rank: its caches; groups: the pages of each group of ranks; adapter:
    finds one by its name, or raises RequestError; address: where peers reach it, unless a plugin
    moves the pages.
    """

    def __init__(
        self,
        assembly: Assembly,
        rank: HasCaches,
        groups: Sequence[Pages],
        adapter: Callable[[str], LoadedAdapter],
        address: str,
    ) -> None:
        self._assembly, self._rank, self._groups = assembly, rank, groups
        self._adapter, self._address = adapter, address
        self._asked: list[HoldPages | PullPages] = []
        self._origin: Future[Origin] | None = None
        self._digests: dict[int, str] = {}  # of adapters, by their keys
        self._handover: Handover | None = None
        self._dropped = ""

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._asked) or (self._handover is not None and self._handover.busy)

    @property
    def moves(self) -> bool:
        """Whether `poll` is due at once: a lease that waits for its reader is no haste."""
        return bool(self._asked) or (self._handover is not None and self._handover.moves)

    @property
    def turn(self) -> int | None:
        """Milliseconds until `poll` is due; None: not before somebody asks. Peers speak when they
        like, and a plugin's transfer has nothing that one could wait for."""
        if self.moves:
            return _BUSY
        return None if self._handover is None else _OPEN

    @property
    def counts(self) -> dict[str, int]:
        """As Stats names them."""
        if (made := self._handover) is None:
            return {}
        return {
            "pages_held": made.leases.num_held,
            "pages_coming": made.num_coming,
            "pages_given": made.leases.num_given,
            "pages_pulled": made.num_read,
        }

    def take(self, message: HoldPages | PullPages) -> None:
        """Have it done; `poll` gives the answer."""
        self._asked.append(message)

    def poll(self) -> list[PagesHeld | PagesPulled]:
        """Continue with all that is under way; the answers since."""
        answers = list[PagesHeld | PagesPulled]()
        if self._asked and self._is_settled():
            asked, self._asked = self._asked, []
            for message in asked:
                try:
                    answers += self._do(message)
                except Exception as e:  # a plugin's, too: requests go on
                    refused = PagesHeld if isinstance(message, HoldPages) else PagesPulled
                    said = str(e) if isinstance(e, DsRuntimeError) else named(e)
                    answers.append(refused(message.token, refused=said))
        if self._handover is not None:
            answers += self._polled(self._handover)
        return answers

    def _polled(self, handover: Handover) -> list[PagesPulled]:
        """A transfer that raises is dropped with a line on standard error: nobody reads by it any
        more, and requests go on."""
        try:
            return handover.poll()
        except Exception as e:
            self._dropped = f"the transfer of pages is dropped: it raised {named(e)}"
            print(self._dropped, file=sys.stderr, flush=True)
            self._handover = None
            return handover.drop(self._dropped)

    def _is_settled(self) -> bool:
        """Whether it is known of what the pages are, or that nothing can be done."""
        if self._why_not():
            return True
        if self._origin is None:
            with_one = ThreadPoolExecutor(1, "digest of weights")
            self._origin = with_one.submit(Origin.of, self._assembly)
            with_one.shutdown(wait=False)
        return self._origin.done()

    def _why_not(self) -> str:
        config = self._assembly.config
        if config.tp > 1:
            return f"--tp {config.tp}: engines of one rank alone hand pages over in this version"
        if config.disable_radix_cache:
            return "--disable-radix-cache keeps no pages that could be handed over"
        return self._dropped

    def _do(self, message: HoldPages | PullPages) -> list[PagesHeld]:
        if why := self._why_not():
            raise TransferError(why)
        assert self._origin is not None
        origin, realm = self._origin.result(), Realm(0, message.salt)
        if self._handover is None:
            self._handover = self._open(origin)
        if message.adapter:
            adapter = self._adapter(message.adapter)
            realm = Realm(adapter.key, message.salt)
            if adapter.key not in self._digests:
                self._digests[adapter.key] = weights_digest(adapter.folder, adapter.stamps)
            origin = replace(origin, adapter=self._digests[adapter.key])
        root = replace(origin, salt=message.salt).root()
        if isinstance(message, HoldPages):
            made = self._handover.leases.hold(message.prompt, realm, root, message.seconds)
            return [PagesHeld(message.token, made)]
        self._handover.pull(message.token, message.prompt, realm, root, message.offer)
        return []

    def _open(self, origin: Origin) -> Handover:
        (pages,), transfer = self._groups, self._transfer(origin.root())
        copies = self._assembly.platform.page_copies(self._assembly.platform.local_rank or 0)
        rank, snapshots = self._rank, pages.snapshots
        transfer.register(rank.caches, rank.num_pages, rank.memory.states, copies)

        def settle() -> None:
            if snapshots is not None and (noted := snapshots.drain()):
                rank.move_states(noted)

        return Handover(Leases(pages, transfer, settle))

    def _transfer(self, root: bytes) -> KvTransfer:
        """A plugin's, or sockets."""
        asked = self._assembly.plugins.call
        made = asked("ds_kv_transfer", config=self._assembly.config, origin=root)
        found = [(name, one) for name, one in made if one is not None]
        if len(found) > 1:
            names = ", ".join(name for name, _ in found)
            raise PluginError(f"plugins {names} each move pages: leave all but one out (--plugins)")
        transfer: KvTransfer = found[0][1] if found else SocketTransfer(root, self._address)
        return transfer

    def close(self) -> None:
        """Leave."""
        if self._handover is not None:
            self._handover.close()
