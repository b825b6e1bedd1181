"""Which caches a model has, read off its tree. Torch-free."""

from __future__ import annotations

from ds_runtime.description.config import ModelConfig
from ds_runtime.description.nextn import NextN
from ds_runtime.description.structure import draft_of, model_of
from ds_runtime.ops.contracts.caches import INDEX, KV, CacheGroup, HistoryGroup


def cache_groups(config: ModelConfig, nextn: NextN | None = None) -> tuple[CacheGroup, ...]:
    """The groups of a model, and of its draft layer where there is one."""
    blocks = [*model_of(config, lambda module: "").blocks]
    if nextn is not None:
        blocks.append(draft_of(config, nextn.layer, lambda module: "").block)
    latents = HistoryGroup(KV, tuple(block.layer for block in blocks))
    keys = tuple(block.layer for block in blocks if block.attention.indexer is not None)
    return (latents, HistoryGroup(INDEX, keys, layout=INDEX)) if keys else (latents,)
