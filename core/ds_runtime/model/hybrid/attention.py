"""Attention of DeepSeek-V4: over the last tokens, and over entries that stand for several each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ds_runtime.description import tree
from ds_runtime.description.caches import ENTRIES, OPEN, OPEN_INDEX, WINDOW
from ds_runtime.description.config import ModelConfig
from ds_runtime.model.hybrid.step import HybridStep, RowSpan
from ds_runtime.model.layers import RmsNormLayer
from ds_runtime.ops.contract import FP4_KEYS
from ds_runtime.ops.contracts.caches import INDEX

if TYPE_CHECKING:
    from ds_runtime.ops.table import Ops
    from ds_runtime.weights.loader import Loader


def group_of(load: Loader) -> int:
    """In groups of how many numbers latents are rounded to FP8, as they were in training; 0: they
    are not. Then index keys are in FP4, too."""
    return 64 if load.bound.base.index_dtype == FP4_KEYS else 0


class Compressor:
    """Rows of hidden states → an entry for every `ratio` tokens, where its window closes."""

    def __init__(
        self, config: ModelConfig, load: Loader, layer: int, node: tree.CompressorNode, state: str
    ) -> None:
        self.ops, self.layer = load.ops(layer, node.place), layer
        self.rows = load.linear(node.rows)
        self.ape, self.norm = load.wide(node.ape), load.wide(node.norm)
        self.eps, self.group = config.eps, group_of(load)
        self.state = state

    def __call__(self, x: Tensor, step: HybridStep) -> Tensor:
        """x [T, hidden] → entries [T, d], normed and rotated; 0 for rows that close no window."""
        return self.ops.compress_windows(
            self.rows(x),
            self.ape,
            self.norm,
            self.eps,
            step.batch.positions,
            step.tables[1],
            self.group,
            step.caches.of(self.state, self.layer),
            step.blocks,
        )


class EntryIndexer:
    """Which compressed entries the rows of a step attend. Every rank has the whole of it: equal
    inputs give equal choices.
    """

    def __init__(
        self, config: ModelConfig, load: Loader, layer: int, node: tree.CompressedIndexerNode
    ) -> None:
        assert config.indexing is not None and config.hybrid is not None
        self.ops, self.layer = load.ops(layer, tree.INDEXER), layer
        self.stride = config.hybrid.ratios[layer]
        self.query = load.linear(node.query)
        self.keys = Compressor(config, load, layer, node.compressor, OPEN_INDEX)
        self.keys.group = 0  # these are rounded once they are encoded
        self.heads, self.dim = config.indexing.heads, config.indexing.dim
        self.top_k = config.indexing.top_k
        self.weights = load.wide(node.weights) * (self.heads * self.dim) ** -0.5
        base = load.bound.base
        self.coded = base.index_dtype != base.dtype

    def __call__(self, x: Tensor, latent: Tensor, step: HybridStep) -> list[Tensor]:
        """Cache the keys of windows that close, and choose: slots [count, n] int32 of each part.

        x: [T, hidden]; latent: the normed query latent, [T, q_lora].
        """
        batch, cache = step.batch, step.caches.of(INDEX, self.layer)
        q, scale = self.ops.index_encode(
            self.query(latent).view(-1, self.heads, self.dim),
            self.keys(x, step),
            batch.positions,
            step.tables[1],
            self.coded,  # by the Hadamard matrix, which spreads what rounding would lose
            cache,
            step.closing(self.stride),
        )
        scored = [step.always or part.longest // self.stride > self.top_k for part in step.parts]
        weights = scale
        if any(scored):
            weights = self.ops.router_logits(x, self.weights)
            weights = weights * scale if self.coded else weights  # else it is 1
        return [
            self._best(q, weights, cache, part)
            if wanted
            else part.every(self.stride, cache.shape[1], self.top_k)
            for part, wanted in zip(step.parts, scored, strict=True)
        ]

    def _best(self, q: Tensor, weights: Tensor, cache: Tensor, part: RowSpan) -> Tensor:
        """[count, top_k] int32."""
        seen = part.seen(self.stride)
        own = part.of(q), part.of(weights), cache, part.page_table, part.owners
        slots = self.ops.index_select(*own, seen.clamp(min=1), self.top_k)
        return slots.masked_fill((seen == 0).unsqueeze(1), -1)  # ops score a token at least


class WindowAttention:
    """One layer's attention on one rank's heads; returns the sum over ranks that divide them."""

    def __init__(self, config: ModelConfig, load: Loader, node: tree.WindowNode) -> None:
        assert config.hybrid is not None
        self.layer, self.stride, self.window = node.layer, node.stride, config.hybrid.window
        self.ops, self.comm = load.ops(node.layer, tree.ATTENTION), load.head_comm
        self.query, self.up = load.linear(node.query), load.linear(node.up)
        self.norm = RmsNormLayer(self.ops, load.vector(node.norm), config.eps)
        self.latent, self.latent_norm = load.linear(node.latent), load.wide(node.latent_norm)
        self.sink = load.wide(node.sink)
        self.groups, self.output = load.grouped(node.groups), load.linear(node.output)
        ranks = load.shards.heads.size
        self.heads, self.num_groups = config.heads // ranks, config.hybrid.groups // ranks
        self.head, self.plain, self.eps = config.v_head, config.kv_lora, config.eps
        self.scale, self.group = config.softmax_scale, group_of(load)
        self.compressor: Compressor | None = None
        self.indexer: EntryIndexer | None = None
        if node.compressor is not None:
            own = OPEN[node.stride]
            self.compressor = Compressor(config, load, node.layer, node.compressor, own)
        if node.indexer is not None:
            self.indexer = EntryIndexer(config, load, node.layer, node.indexer)

    def __call__(self, x: Tensor, step: HybridStep) -> Tensor:
        """[T, hidden] → [T, hidden]. Every row's latent, and entries that close, are cached."""
        if x.shape[0] == 0:  # other ranks have sequences
            return x
        table = step.tables[self.stride > 0]
        at = step.batch.positions, table
        latent = self.norm(self.query(x))
        q = self.up(latent).view(-1, self.heads, self.head)
        q = self.ops.norm_rope(q, None, self.eps, *at, 0)
        kv = self.latent(x).unsqueeze(1)
        kv = self.ops.norm_rope(kv, self.latent_norm, self.eps, *at, self.group).squeeze(1)
        recent = step.caches.of(WINDOW, self.layer)
        compressed, slots = self._entries(x, latent, step, recent)
        out = [
            self._attend(part, part.of(q), part.of(kv), recent, compressed, own)
            for part, own in zip(step.parts, slots, strict=True)
        ]
        attended = out[0] if len(out) == 1 else torch.cat(out)
        turned = self.ops.rope_back(attended, step.batch.positions, table)
        inner = self.groups(turned.view(x.shape[0], self.num_groups, -1))
        return self.comm.all_reduce(self.output(inner))

    def _entries(
        self, x: Tensor, latent: Tensor, step: HybridStep, recent: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """(the cache of entries, of each part slots [count, n] int32), once those are written that
        close. Without compressed entries it is any cache, and no slots.
        """
        if self.compressor is None:
            none = recent.new_empty(x.shape[0], 0, dtype=torch.int32)
            return recent, [part.of(none) for part in step.parts]
        cache = step.caches.of(ENTRIES[self.stride], self.layer)
        made = self.compressor(x, step)
        self._write(self.compressor.ops, cache, made, step.closing(self.stride))
        if self.indexer is not None:
            return cache, self.indexer(x, latent, step)
        return cache, [step.every(part, self.stride, cache.shape[1]) for part in step.parts]

    def _write(self, ops: Ops, cache: Tensor, rows: Tensor, slots: Tensor) -> None:
        ops.cache_write(cache, rows[:, : self.plain], rows[:, self.plain :], slots)

    def _attend(
        self,
        part: RowSpan,
        q: Tensor,
        kv: Tensor,
        recent: Tensor,
        compressed: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """[count, heads, d]. Rows that decode find each other in the cache; those of a prompt may
        be more than a block has entries, and are written behind it.
        """
        ring = part.ring(recent.shape[1])
        if part.decodes:
            self._write(self.ops, recent, kv, ring)
        attend = self.ops.window_decode if part.decodes else self.ops.window_prefill
        out, _ = attend(
            q,
            self.sink,
            None if part.decodes else kv,
            recent,
            part.positions,
            part.blocks,
            self.window,
            compressed,
            slots,
            self.scale,
        )
        if not part.decodes:
            self._write(self.ops, recent, kv, ring)
        return out
