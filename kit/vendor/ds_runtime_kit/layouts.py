"""Cache layouts held against their contract, in the groups that a model may have."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_runtime.errors import UnsupportedError
from ds_runtime.ops.contract import FP8_GROUPS, DeviceInfo, Facts, Offers, load_attr
from ds_runtime.ops.contracts.caches import HistoryGroup, StateGroup
from ds_runtime.ops.kernel import Layout
from ds_runtime.platform.page_copies import LayerBlocks, PageCopies, TorchPageCopies
from ds_runtime_kit.checks.conformance import TRUE_DIMS, CaseResult, facts_for

LAYOUT = "layout"  # stands for an op's name
BLOCKS = 5
_FILLS = 6  # that two random bytes are alike in all of them does not happen
_PAGE = 32  # tokens
_GROUPS = {  # what a block may be: its label → group, tokens that a step may take back
    "pages": (HistoryGroup("kv", (0,)), 0),
    "pages of one entry per 4 tokens": (HistoryGroup("kv", (0,), ratio=4), 0),
    "pages of one entry": (HistoryGroup("kv", (0,), ratio=_PAGE), 0),
    "states of 16 rows, and 3 to take back": (StateGroup("kv", (0,), rows=16), 3),
}
_DTYPES = (("bfloat16", "bfloat16"), ("bfloat16", FP8_GROUPS))


@dataclass(frozen=True)
class Laid:
    """A layout in one group, under one set of facts."""

    layout: Layout
    facts: Facts
    copies: PageCopies

    def made(self, blocks: int = BLOCKS) -> Tensor:
        """One layer's cache."""
        where = torch.device(self.facts.device.type)
        cache: Tensor = load_attr(self.layout.allocate)(blocks, self.facts, where)
        return cache

    @property
    def block(self) -> int:
        """Bytes of one."""
        return self.facts.page_size * self.layout.bytes_per_token(self.facts)

    def copy(self, cache: Tensor, pairs: Mapping[int, int]) -> None:
        """Copy blocks: source → target."""
        numbers = torch.tensor([*pairs.items()], dtype=torch.int64, device=cache.device)
        load_attr(self.layout.copy)(cache, numbers[:, 0].contiguous(), numbers[:, 1].contiguous())


def _blocks(laid: Laid) -> str:
    for blocks in (BLOCKS, 2 * BLOCKS):
        if (shape := laid.made(blocks).shape)[:1] != (blocks,):
            return f"allocate gives {list(shape)} for {blocks} blocks: the first dim counts blocks"
    return ""


def _bytes(laid: Laid) -> str:
    held, said = laid.made().untyped_storage().nbytes(), BLOCKS * laid.block
    if said <= held <= said + laid.block:  # a spare one at most
        return ""
    return f"{BLOCKS} blocks of {laid.facts.page_size} entries hold {held} bytes, it says {said}"


def _held(cache: Tensor) -> Tensor:
    """All bytes that it has, wherever they lie."""
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())


def _filled(held: Tensor, seed: int) -> Tensor:
    """A copy of the bytes, once they are random."""
    made = torch.Generator().manual_seed(seed)
    return held.copy_(torch.randint(256, held.shape, generator=made, dtype=torch.uint8)).clone()


def _owned(laid: Laid, cache: Tensor, block: int) -> Tensor:
    """Where a block's bytes lie: what changes when another one is copied there."""
    held, other = _held(cache), (block + 1) % BLOCKS
    changed = torch.zeros(held.shape, dtype=torch.bool, device=held.device)
    for seed in range(_FILLS):
        before = _filled(held, seed)
        laid.copy(cache, {other: block})
        changed |= held != before
    return changed.nonzero().flatten()


def _copies(laid: Laid) -> str:
    cache = laid.made()
    held, owned = _held(cache), [_owned(laid, cache, block) for block in range(BLOCKS)]
    for block, places in enumerate(owned):
        if len(places) != laid.block:
            return f"copying to block {block} changes {len(places)} bytes, a block has {laid.block}"
    if len(set(torch.cat(owned).tolist())) != BLOCKS * laid.block:
        return "copying to one block changes another"
    wanted, pairs = _filled(held, _FILLS), {1: 3, 4: 0}
    before = wanted.clone()
    for source, target in pairs.items():
        wanted[owned[target]] = before[owned[source]]
    laid.copy(cache, pairs)
    wrong = [n for n, at in enumerate(owned) if not torch.equal(held[at], wanted[at])]
    return f"copying blocks 1 and 4 to 3 and 0 leaves {wrong} wrong" if wrong else ""


def _exports(laid: Laid) -> str:
    cache, other = laid.made(), laid.made()
    held, there = _held(cache), _held(other)
    owned = [_owned(laid, cache, block) for block in range(BLOCKS)]
    before, after = _filled(held, 1), _filled(there, 2)
    numbers = torch.tensor([3, 0], dtype=torch.int64, device=cache.device)
    found = load_attr(laid.layout.export)(cache, numbers)
    if found.dtype != torch.uint8 or found.shape != (2, laid.block):
        return f"export gives {found.dtype} {list(found.shape)} of 2 blocks of {laid.block} bytes"
    load_attr(laid.layout.restore)(other, numbers.new_tensor([1, 2]), found)
    for source, target in ((3, 1), (0, 2)):
        after[owned[target]] = before[owned[source]]
    if not torch.equal(held, before):
        return "export changes the cache"
    return "" if torch.equal(there, after) else "blocks 3 and 0, restored as 1 and 2, are others"


def _host(laid: Laid) -> str:
    """Two layers, one of which is written just before it is saved, and read as soon as it is
    there: copies keep the order of what is queued."""
    caches, others = [laid.made(), laid.made()], [laid.made(), laid.made()]
    before = [_filled(_held(cache), seed) for seed, cache in enumerate(caches)]
    after = [_filled(_held(cache), seed + 2) for seed, cache in enumerate(others)]
    owned = [_owned(laid, laid.made(), block) for block in range(BLOCKS)]
    hosts = [laid.copies.buffer(3, laid.block).fill_(7) for _ in caches]
    if hosts[0].device.type != "cpu" or hosts[0].shape != (3, laid.block):
        return f"buffer gives {list(hosts[0].shape)} on {hosts[0].device}, not host memory"
    for cache, bytes_ in zip(caches, before, strict=True):
        _held(cache).zero_()
        _held(cache).copy_(bytes_)
    saved = laid.copies.save(_layers(laid, caches, (3, 0), hosts))
    saved.finish()
    if not all(saved.ended(layer) for layer in range(2)):
        return "save: a copy has not ended, though all have finished"
    if any(not torch.equal(host[2], torch.full_like(host[2], 7)) for host in hosts):
        return "save writes beyond the host memory that it was given"
    loaded = laid.copies.load(_layers(laid, others, (1, 2), hosts))
    for layer, (there, source) in enumerate(zip(after, before, strict=True)):
        for block, target in ((3, 1), (0, 2)):
            there[owned[target]] = source[owned[block]]
        loaded.wait(layer)
        if not torch.equal(_held(others[layer]), there):
            return f"layer {layer}: blocks 3 and 0, saved and loaded as 1 and 2, are others"
    laid.copies.load([LayerBlocks(others[0], laid.layout, (), hosts[0][:0])]).finish()
    loaded.finish()
    unchanged = zip(caches, before, strict=True)
    return "" if all(torch.equal(_held(c), b) for c, b in unchanged) else "save changes the cache"


def _layers(
    laid: Laid, caches: list[Tensor], blocks: tuple[int, ...], hosts: list[Tensor]
) -> list[LayerBlocks]:
    pairs = zip(caches, hosts, strict=True)
    return [LayerBlocks(c, laid.layout, blocks, host[: len(blocks)]) for c, host in pairs]


QUESTIONS: Mapping[str, Callable[[Laid], str]] = {
    "blocks": _blocks,
    "bytes": _bytes,
    "copies": _copies,
    "exports": _exports,
    "host": _host,
}


def check_layout(
    layout: Layout,
    device: DeviceInfo,
    questions: Collection[str] = (),
    copies: PageCopies | None = None,
) -> list[CaseResult]:
    """Returns what each question (default: all of `QUESTIONS`) found in every group whose blocks
    have as many entries as the layout takes. copies: the platform's; None: torch's."""
    found, copies = [], copies or TorchPageCopies(torch.device(device.type))
    for label, dtype, laid in _subjects(layout, device, copies):
        for name, ask in QUESTIONS.items():
            if questions and name not in questions:
                continue
            try:
                said = ask(laid)
            except Exception:
                said = "raised\n" + traceback.format_exc()
            found.append(CaseResult(layout.tag, LAYOUT, label, dtype, failure=said, check=name))
    return found


def _subjects(
    layout: Layout, device: DeviceInfo, copies: PageCopies
) -> Iterator[tuple[str, str, Laid]]:
    """In every group under the first facts that it takes, and in pages under the others."""
    sizes, some = layout.page_sizes, dict(_GROUPS)
    for dtype, kept in _DTYPES:
        facts = facts_for(device, dtype, TRUE_DIMS, _PAGE, kept)
        groups = {label: group.within(facts, undo) for label, (group, undo) in some.items()}
        groups |= {f"blocks of {n}": replace(facts, page_size=n) for n in sizes}
        if not _holds(Laid(layout, facts, copies)):
            continue
        some = {"pages": _GROUPS["pages"]}
        for label, own in groups.items():
            if not sizes or own.page_size in sizes:
                yield label, kept, Laid(layout, own, copies)


def _holds(laid: Laid) -> bool:
    """Whether it has entries of this dtype: one that has not knows no size of them, or refuses."""
    try:
        laid.made(1)
        return laid.layout.bytes_per_token(laid.facts) > 0
    except (KeyError, UnsupportedError):
        return False


def layouts_of(offers: Offers, providers: Collection[str]) -> list[Layout]:
    """Those that kernels of these providers read or write."""
    tags = {tag for k in offers.kernels if k.provider in providers for tag in k.layouts}
    return [layout for layout in offers.layouts if layout.tag in tags]
