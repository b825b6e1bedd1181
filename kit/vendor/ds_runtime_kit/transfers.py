"""What moves pages between engines, held against its contract, with two ends in one process."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from threading import Event

import torch
from torch import Tensor

from ds_runtime.ops.contract import DeviceInfo, Dims, Facts, load_attr
from ds_runtime.ops.contracts.caches import Caches, HistoryGroup, LaidGroup, StateGroup
from ds_runtime.ops.kernel import Layout
from ds_runtime.ops.reference.layouts import LATENT_PAGES
from ds_runtime.platform.kv_transfer import CacheBlocks, KvTransfer, Polled, Ticket, TransferError
from ds_runtime.platform.page_copies import PageCopies, TorchPageCopies

PAGES, STATES = 7, 4
SECONDS = 20.0  # in which whatever ends has ended
_DIMS = Dims({"kv_lora": 32, "qk_rope": 8})

Make = Callable[[bytes], KvTransfer]
"""A new end, from an origin: what the hook `ds_kv_transfer` returns."""

Late = Callable[[Callable[[], object]], object]
"""Does a thing on the device some time later, as if much were queued in front of it, in order."""


@dataclass(frozen=True)
class TransferResult:
    """What one question found; failure "" is what it should be."""

    check: str
    failure: str = ""


@dataclass
class _End:
    transfer: KvTransfer
    caches: list[Tensor]
    states: list[Tensor]


class _Ends:
    """Ends as a question needs them."""

    def __init__(
        self, make: Make, layout: Layout, device: DeviceInfo, copies: PageCopies, late: Late | None
    ) -> None:
        self.late: Late = late or self._behind_much
        self._make, self._copies, self._layout = make, copies, layout
        self._facts = Facts(device, _DIMS, page_size=16)
        self._device, self._made = torch.device(device.type), list[KvTransfer]()

    def __call__(self, origin: bytes = b"the same origin as the other's.") -> _End:
        groups = HistoryGroup("far", (0, 1)), StateGroup("near", (0,), rows=16)
        made = []
        for group in groups:
            facts = group.within(self._facts)
            count = group.blocks(PAGES, STATES)
            allocate = load_attr(self._layout.allocate)
            layers = {n: allocate(count, facts, self._device) for n in group.layers}
            made.append((LaidGroup(group, self._layout, facts), layers))
        caches = Caches(made)
        for cache in caches:
            cache.copy_(torch.rand(cache.shape, device=cache.device).to(cache.dtype))
        one = self._make(origin)
        self._made.append(one)
        one.register(caches, PAGES, STATES, self._copies)
        return _End(one, list(caches)[:2], list(caches)[2:])

    @contextmanager
    def pair(self) -> Iterator[tuple[_End, _End, str]]:
        """(reader, the one that is read, its name)."""
        here, there = self(), self()
        yield here, there, here.transfer.attach(there.transfer.describe())

    def _behind_much(self, do: Callable[[], object]) -> None:
        """A CPU queues nothing."""
        if self._device.type != "cpu":
            product = torch.ones(4096, 4096, device=self._device)
            for _ in range(100):
                product = product @ product
                product /= product.max()
        do()

    def close(self) -> None:
        for one in self._made:
            one.close()


def _polled(here: _End, *others: _End, until: Callable[[Polled], object]) -> Polled:
    """What `here` polls first that is meant, the others coming by."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        for other in others:
            other.transfer.poll()
        if until(found := here.transfer.poll()):
            return found
        time.sleep(0.0005)
    raise AssertionError(f"nothing came of it within {SECONDS:.0f} s")


def _any(found: Polled) -> bool:
    return bool(found.finished or found.failed or found.lost)


def _reads(ends: _Ends) -> str:
    with ends.pair() as (here, there, name):
        before = [cache.clone() for cache in (*here.caches, *here.states)]
        local, remote = CacheBlocks([1, 5, 2], [3]), CacheBlocks([4, 4, 0], [1])
        ticket = here.transfer.read(name, local, remote, "a")
        found = _polled(here, there, until=_any)
        if found != Polled([ticket], [], []):
            return f"a read of three pages and a state gives {found}"
        for kind, own, others in ((0, here.caches, there.caches), (1, here.states, there.states)):
            for cache, other in zip(own, others, strict=True):
                old = before.pop(0)
                for block, source in zip(local[kind], remote[kind], strict=True):
                    old[block] = other[source]
                if not torch.equal(cache, old):
                    return "blocks are not those that were read, or others have changed"
        found = _polled(here, there, until=lambda _: True)
        return "" if not _any(found) else f"a read ends twice: {found}"


def _orders(ends: _Ends) -> str:
    local, remote = CacheBlocks([1, 2], [3]), CacheBlocks([4, 0], [1])

    def filled(end: _End, value: int) -> None:
        for cache in (*end.caches, *end.states):
            cache.fill_(value)

    for reader in (False, True):
        with ends.pair() as (here, there, name):
            filled(here, 1)
            filled(there, 3 if reader else 1)
            if not reader:
                ends.late(partial(filled, there, 3))
            there.transfer.expose(remote)
            if reader:
                ends.late(partial(filled, here, 5))
            here.transfer.read(name, local, remote, "a")
            found = _polled(here, there, until=_any)
            ends.late((ran := Event()).set)
            ran.wait(SECONDS)
            come = [cache[[*local.pages]].clone() for cache in here.caches]
            come += [state[[*local.states]].clone() for state in here.states]
            if len(found.finished) != 1:
                return f"a read gives {found}"
            if not all(bool((block.float() == 3).all()) for block in come):
                return (
                    "what was queued before a read writes to its blocks after it"
                    if reader
                    else "blocks are read before they were written: what was queued had not run"
                )
    return ""


def _many(ends: _Ends) -> str:
    with ends.pair() as (here, there, name):
        tickets = [
            here.transfer.read(name, CacheBlocks([n]), CacheBlocks([n]), "a") for n in range(PAGES)
        ]
        found = list[Ticket]()
        while len(found) < len(tickets):
            found += _polled(here, there, until=_any).finished
        return "" if sorted(tickets) == sorted(found) else f"{tickets} end as {found}"


def _refuses(ends: _Ends) -> str:
    with ends.pair() as (here, _, name):
        for local, remote in (
            (CacheBlocks([0]), CacheBlocks([PAGES])),
            (CacheBlocks([PAGES]), CacheBlocks([0])),
            (CacheBlocks([-1]), CacheBlocks([0])),
            (CacheBlocks([0, 0]), CacheBlocks([0, 1])),
            (CacheBlocks([0]), CacheBlocks([0, 1])),
            (CacheBlocks((), [0]), CacheBlocks((), [STATES])),
        ):
            try:
                here.transfer.read(name, local, remote, "a")
            except TransferError:
                continue
            return f"a read of {remote} to {local} is begun"
        for wrong in (b"", b"\xc1", bytes(300_000), ends(b"another").transfer.describe()):
            try:
                here.transfer.attach(wrong)
            except TransferError:
                continue
            return "a description that is none, or of another origin, is taken"
    return ""


def _releases(ends: _Ends) -> str:
    with ends.pair() as (here, there, name):
        given_up = here.transfer.read(
            name, CacheBlocks(range(PAGES)), CacheBlocks(range(PAGES)), "a"
        )
        here.transfer.release(given_up)
        before = [cache.clone() for cache in here.caches]
        kept = here.transfer.read(name, CacheBlocks((), [0]), CacheBlocks((), [1]), "b")
        found = _polled(here, there, until=lambda found: kept in found.finished)
        if given_up in found.finished:
            return "a read that was given up is told of as finished"
        same = all(map(torch.equal, before, here.caches))
        return "" if same else "a read that was given up still writes"


def _heard(end: _End, found: list[tuple[str, bytes]]) -> Callable[[Polled], object]:
    """Whether two notices have come, which are added to `found`."""

    def both(_: Polled) -> bool:
        found.extend(end.transfer.notices())
        return len(found) > 1

    return both


def _notices(ends: _Ends) -> str:
    with ends.pair() as (here, there, name):
        for word in (b"1", b"2"):
            here.transfer.notify(name, word)
        come = list[tuple[str, bytes]]()

        _polled(there, here, until=_heard(there, come))
        if [word for _, word in come] != [b"1", b"2"]:
            return f"notices come as {come}"
        reader, come = come[0][0], []
        there.transfer.notify(reader, b"3")
        there.transfer.notify(reader, b"4")
        _polled(here, there, until=_heard(here, come))
        return "" if come == [(name, b"3"), (name, b"4")] else f"answers come as {come}"


def _ends(ends: _Ends) -> str:
    with ends.pair() as (here, there, name):
        first = here.transfer.read(name, CacheBlocks([0]), CacheBlocks([0]), "a")
        _polled(here, there, until=lambda found: first in found.finished)
        for _ in range(2):
            here.transfer.notify(name, b"hello")
        come = list[tuple[str, bytes]]()
        _polled(there, here, until=_heard(there, come))
        there.transfer.notify(come[0][0], b"before it left")
        there.transfer.close()
        failed, lost, begin = list[Ticket](), list[str](), time.monotonic()
        ticket: Ticket | None = None
        with suppress(TransferError):  # where its end is known already
            ticket = here.transfer.read(name, CacheBlocks([1]), CacheBlocks([1]), "b")
        while time.monotonic() < begin + SECONDS and ((ticket and not failed) or not lost):
            found = here.transfer.poll()
            failed += [t for t, _ in found.failed]
            lost += found.lost
            if ticket in found.finished:
                return "a read of a peer that is gone has finished"
            time.sleep(0.001)
        if lost != [name]:
            return f"a peer is gone, and {SECONDS:.0f} s later poll tells of {lost} as lost"
        if said := here.transfer.notices():
            return f"a peer is gone, and after that it says {said}"
        again = ends()
        other = here.transfer.attach(again.transfer.describe())
        return "" if other != name else f"one that was restarted has the name {name!r} again"


QUESTIONS: Mapping[str, Callable[[_Ends], str]] = {
    "reads": _reads,
    "orders": _orders,
    "many": _many,
    "refuses": _refuses,
    "releases": _releases,
    "notices": _notices,
    "ends": _ends,
}


def check_transfer(
    make: Make,
    device: DeviceInfo,
    questions: Collection[str] = (),
    layout: Layout = LATENT_PAGES,
    copies: PageCopies | None = None,
    late: Late | None = None,
) -> list[TransferResult]:
    """Returns what each question (default: all of `QUESTIONS`) found of the ends that `make` gives,
    over caches in one layout. copies: the platform's; None: torch's. late: what the device does
    later; None: it is kept busy with products of matrices, unless it is a CPU."""
    found, copies = [], copies or TorchPageCopies(torch.device(device.type))
    for name in questions or QUESTIONS:
        ends = _Ends(make, layout, device, copies, late)
        try:
            said = QUESTIONS[name](ends)
        except Exception:
            said = "raised\n" + traceback.format_exc()
        finally:
            ends.close()
        found.append(TransferResult(name, said))
    return found
