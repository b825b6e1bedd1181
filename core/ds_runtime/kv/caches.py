"""The paged caches of one rank."""

from __future__ import annotations

from torch import Tensor, device

from ds_runtime.assembly.result import Assembly
from ds_runtime.common.progress import Progress
from ds_runtime.ops.binding.bound import BoundOps
from ds_runtime.ops.contract import load_attr


def allocate(
    assembly: Assembly, bound: BoundOps, pages: int, total: int, where: device, shown: bool
) -> list[Tensor]:
    """One cache per layer, the draft layer's last; where attention is sparse, behind these one of
    index keys per layer with an indexer. total: bytes of all; shown: with their progress.
    """
    layouts = [bound.layout] * assembly.cached_layers
    if bound.index_layout is not None:
        layouts += [bound.index_layout] * assembly.indexers
    caches: list[Tensor] = []
    with Progress("allocating KV cache", total, enabled=shown) as progress:
        for layout in layouts:
            caches.append(load_attr(layout.allocate)(pages, bound.base, where))
            progress.advance(caches[-1].nbytes)
    return caches
