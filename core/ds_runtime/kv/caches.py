"""The caches of one rank: allocated, and blocks of them copied."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, device

from ds_runtime.common.progress import Progress
from ds_runtime.ops.caches import Caches, LaidGroup
from ds_runtime.ops.contract import load_attr


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
