"""The caches of one rank: allocated, and blocks of them copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, device

from ds_runtime.common.progress import Progress
from ds_runtime.ops.contract import load_attr
from ds_runtime.ops.contracts.caches import Caches, LaidGroup


def allocate(
    groups: Sequence[LaidGroup], pages: int, states: int, where: device, shown: bool = False
) -> Caches:
    """One cache for each layer of each group, zeroed or not, as its layout has it. pages, states:
    how many there are of either; shown: with the progress."""
    counts = [group.group.blocks(pages, states) for group in groups]
    total = sum(n * group.block_bytes for n, group in zip(counts, groups, strict=True))
    made = list[tuple[LaidGroup, dict[int, Tensor]]]()
    with Progress("allocating KV cache", total, enabled=shown) as progress:
        for blocks, laid in zip(counts, groups, strict=True):
            make, layers = load_attr(laid.layout.allocate), dict[int, Tensor]()
            for layer in laid.group.layers:
                layers[layer] = make(blocks, laid.facts, where)
                progress.advance(layers[layer].nbytes)
            made.append((laid, layers))
    return Caches(made)


def with_pages(caches: Caches, pages: int, where: device) -> Caches:
    """This many pages of their own, besides the states that are there."""
    own = [laid for laid, _ in caches.groups if not laid.group.per_request]
    return Caches([*allocate(own, pages, 0, where).groups, *caches.states])


def copy_states(caches: Caches, copies: Sequence[tuple[int, int]]) -> None:
    """Make (source, target) of blocks of every state group, one copy after the other."""
    for some in apart(copies):
        numbers: Tensor | None = None
        for laid, made in caches.states:
            copy = load_attr(laid.layout.copy)
            for cache in made.values():
                if numbers is None:
                    numbers = torch.tensor(some, dtype=torch.int64).to(cache.device)
                copy(cache, numbers[:, 0].contiguous(), numbers[:, 1].contiguous())


def apart(copies: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """The copies in runs of which none names a block that another one writes."""
    run, read, written = list[tuple[int, int]](), set[int](), set[int]()
    for source, target in copies:
        if source in written or target in read | written:
            yield run
            run, read, written = [], set(), set()
        run.append((source, target))
        read.add(source)
        written.add(target)
    if run:
        yield run
