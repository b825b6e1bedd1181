"""Which caches a model has, read off its config and its tree. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from ds_runtime.description.config import Hybrid, ModelConfig
from ds_runtime.description.hybrid.config import DENSE, SPARSE
from ds_runtime.description.nextn import NextN
from ds_runtime.description.structure import draft_of, model_of
from ds_runtime.ops.contracts.caches import (
    INDEX,
    KV,
    ROWS,
    CacheGroup,
    HistoryGroup,
    StateGroup,
)

# Of DeepSeek-V4: the last tokens of every layer; by ratio, entries, and rows of open windows.
WINDOW, OPEN_INDEX = "window", "open_index"
ENTRIES = {ratio: f"entries_{ratio}" for ratio in (SPARSE, DENSE)}
OPEN = {ratio: f"open_{ratio}" for ratio in (SPARSE, DENSE)}


def cache_groups(config: ModelConfig, nextn: NextN | None = None) -> tuple[CacheGroup, ...]:
    """The groups of a model, and of its draft layer where there is one."""
    if config.hybrid is not None:
        return tuple(_hybrid(config, config.hybrid))
    blocks = [*model_of(config, lambda module: "").blocks]
    if nextn is not None:
        blocks.append(draft_of(config, nextn.layer, lambda module: "").block)
    latents = HistoryGroup(KV, tuple(block.layer for block in blocks))
    keys = tuple(block.layer for block in blocks if block.attention.indexer is not None)
    return (latents, HistoryGroup(INDEX, keys, layout=INDEX)) if keys else (latents,)


def _hybrid(config: ModelConfig, hybrid: Hybrid) -> Iterator[CacheGroup]:
    """A window in every layer; where windows of the compressor overlap, rows of two are open."""
    yield StateGroup(WINDOW, tuple(range(config.layers)), rows=hybrid.window)
    for ratio in (SPARSE, DENSE):
        if not (layers := tuple(n for n, r in enumerate(hybrid.ratios) if r == ratio)):
            continue
        yield HistoryGroup(ENTRIES[ratio], layers, ratio=ratio)
        overlap = 1 + config.has_indexer(layers[0])
        rows, width = overlap * ratio - 1, 2 * overlap
        yield StateGroup(OPEN[ratio], layers, layout=ROWS, rows=rows, width=width * config.latent)
        if config.has_indexer(layers[0]) and config.indexing is not None:
            yield HistoryGroup(INDEX, layers, layout=INDEX, ratio=ratio)
            width *= config.indexing.dim
            yield StateGroup(OPEN_INDEX, layers, layout=ROWS, rows=rows, width=width)
