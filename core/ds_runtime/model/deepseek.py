"""DeepSeek V2 to V3.2: embedding, pre-norm blocks, final norm, head. No device, no globals."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ds_runtime.description import tree
from ds_runtime.description.config import ModelConfig
from ds_runtime.model.attention import Attention, Projected
from ds_runtime.model.base import LanguageModel, Moves
from ds_runtime.model.expanded import ExpandedAttention
from ds_runtime.model.indexer import LayerStep, Selection
from ds_runtime.model.layers import Codes, RmsNormLayer
from ds_runtime.model.moe import DenseMlp, MoeMlp
from ds_runtime.model.rope import cos_sin_table
from ds_runtime.ops.batch import Batch, DecodePart, RowOrder
from ds_runtime.ops.contracts.caches import INDEX, KV, Caches
from ds_runtime.parallel.sums.normed import Summable

if TYPE_CHECKING:
    from ds_runtime.weights.loader import Loader


class DecoderLayer:
    """x += attention(norm(x)); x += mlp(norm(x)), with the sum carried as `residual`."""

    def __init__(self, config: ModelConfig, load: Loader, node: tree.BlockNode) -> None:
        layer = node.layer
        ops = load.ops(layer, "block")
        self.exchange = load.exchange
        self.input_norm = RmsNormLayer(ops, load.vector(node.norm), config.eps)
        attention = ExpandedAttention if config.expanded else Attention
        self.attention = attention(config, load, node.attention)
        self.quantises = load.bound.has("rms_norm_quantize", layer, "block")
        self.adds_and_quantises = load.bound.has("add_rms_norm_quantize", layer, "block")
        self.mlp_norm = RmsNormLayer(ops, load.vector(node.mlp_norm), config.eps)
        self.mlp: DenseMlp | MoeMlp = (
            MoeMlp(config, load, node.mlp)
            if isinstance(node.mlp, tree.MoeNode)
            else DenseMlp(load, node.mlp)
        )

    def __call__(
        self,
        x: Summable,
        residual: Tensor | None,
        step: LayerStep,
        rows: Tensor | None = None,
        tail: RowOrder | None = None,
    ) -> tuple[Summable, Tensor]:
        """(mlp output, residual before it), both [T, hidden]; the next norm adds them.

        rows: the only ones that are wanted; all are still written to the cache. tail: their order.
        """
        batch = step.batch
        normed, residual = self.enter(x, residual, batch)
        attended = self.attention(normed, step)
        if rows is not None:
            attended, residual = attended[rows], residual[rows]
            if not self.exchange.most(rows.shape[0], tail):
                return attended, residual
            batch = replace(batch, order=tail)
        return self.leave(attended, residual, batch)

    def state_keys(self, part: DecodePart) -> tuple[str, ...]:
        """Keys of the step states that attention of such rows reads: none where it is sparse."""
        return () if self.attention.sparse else (self.attention.kernel_for(part)[1],)

    def enter(
        self, x: Summable, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor | Codes, Tensor]:
        """(what attention takes, the residual), both [T, hidden]."""
        fused, groups = self.quantises if residual is None else self.adds_and_quantises, None
        if fused:
            groups = self.attention.quantizes(x.shape[0], batch)
        if residual is None:
            assert isinstance(x, Tensor), "what begins a model is summed"
            return self.input_norm(x) if groups is None else self.input_norm.quantized(x, groups), x
        if groups is not None:
            return self.input_norm.add_quantized(x, residual, groups)
        return self.input_norm.add(x, residual)

    def leave(self, attended: Summable, residual: Tensor, batch: Batch) -> tuple[Summable, Tensor]:
        """Of what attention gave: (mlp output, residual before it), both [T, hidden]."""
        normed, residual = self.mlp_norm.add(attended, residual)
        return self.mlp.later(normed, batch), residual


class Cut(NamedTuple):
    """One layer's attention between two pieces of a forward."""

    block: DecoderLayer
    projected: Projected
    residual: Tensor
    step: LayerStep

    def each(self, made: Callable[[Tensor], Tensor]) -> Cut:
        """The same of every tensor that the piece before it made."""
        return self._replace(projected=self.projected.each(made), residual=made(self.residual))


class DeepSeekModel(LanguageModel):
    """One rank's part of the model; `load` reads and packs its weights block by block.

    positions: how many the rotation table covers, so the longest context.
    """

    def __init__(self, config: ModelConfig, load: Loader, positions: int) -> None:
        self.cos_sin = cos_sin_table(config, positions, load.device)
        node = load.tree
        assert isinstance(node, tree.ModelTree)
        self.blocks = [DecoderLayer(config, load, block) for block in node.blocks]
        super().__init__(config, load, len(self.blocks), self.cos_sin.nbytes)

    @torch.inference_mode()
    def forward(self, batch: Batch, caches: Caches, every: bool = False) -> Tensor:
        """Final hidden states of the step's logit rows: [rows, hidden], the same on every rank.

        They are what `logits` takes. The batch's tokens are written to the caches. every: of all
        tokens of this rank, whose logits are wanted or not.
        """
        selection = self.selection(batch)
        x: Summable = self.embedded(batch.input_ids, batch)  # [T, hidden]
        residual: Tensor | None = None
        few, tail = None if every else self.few(batch), self.exchange.logits_alone(batch.order)
        for block, step in self._layers(caches, batch, selection):
            own = few if block is self.blocks[-1] else None
            x, residual = block(x, residual, step, own, tail)
        assert residual is not None, "a model has at least one layer"
        if every:
            return self.norm.add(x, residual)[0]
        wanted = batch.logit_rows.shape[0]
        if not self.exchange.most(wanted, tail):
            return residual.new_empty(0, self.config.hidden)
        if wanted != x.shape[0]:  # rows are distinct and rising
            x, residual = x[batch.logit_rows], residual[batch.logit_rows]
        return self.exchange.collect(self.norm.add(x, residual)[0], batch.order)

    def _layers(
        self, caches: Caches, batch: Batch, selection: Selection | None = None
    ) -> Iterator[tuple[DecoderLayer, LayerStep]]:
        """Each layer that runs, and what it sees of a step."""
        for layer in self.running:
            own = caches.of(KV, layer), self.cos_sin, caches.get(INDEX, layer)
            yield self.blocks[layer], LayerStep(batch, *own, selection)

    def few(self, batch: Batch) -> Tensor | None:
        """The logit rows, if these are all that the last layer has to compute after its attention:
        nobody reads the others' hidden states.
        """
        exchange, rows, order = self.exchange, batch.logit_rows, batch.order
        wanted = exchange.most(rows.shape[0], exchange.logits_alone(order))
        whole = wanted > exchange.most(batch.input_ids.shape[0], order) // 2
        return None if whole or exchange.adapters(batch) is not None else rows

    def selection(self, batch: Batch) -> Selection | None:
        """What a step's layers hand on, where attention is sparse."""
        if (indexing := self.config.indexing) is None:
            return None
        return Selection.of(batch, indexing.top_k, self.scores_all, self.page_size)

    def attended_width(self) -> int:
        """Values that attention gives per token, of this rank's heads."""
        attention = self.blocks[0].attention
        return attention.heads * attention.v_head

    def pieces(
        self, batch: Batch, caches: Caches, attended: Tensor
    ) -> Generator[Cut, None, Tensor]:
        """`forward` of every token, in pieces that depend on their number alone, not on whose they
        are. Between two of them the caller runs `attend`, which fills `attended` [T, heads · v].
        Returns the final hidden states [T, hidden].
        """
        x: Summable = self.embedded(batch.input_ids, batch)
        residual: Tensor | None = None
        for block, step in self._layers(caches, batch):
            normed, residual = block.enter(x, residual, batch)
            projected = block.attention.project(normed, step, ahead=True)
            yield Cut(block, projected, residual, step)
            out = block.attention.output(attended, batch.adapters)
            x, residual = block.leave(out, residual, batch)
        assert residual is not None, "a model has at least one layer"
        return self.norm.add(x, residual)[0]

    def attend(self, cut: Cut, batch: Batch, selection: Selection | None, out: Tensor) -> None:
        """The attention of a step between two pieces, for its first rows. out: [its rows, heads ·
        v].
        """
        n = batch.num_tokens
        projected = cut.projected.each(lambda t: t[:n])
        step = cut.step._replace(batch=batch, selection=selection)
        attended = cut.block.attention.attend(projected, step)
        out.copy_(attended.flatten(1))

    def finish(self, cut: Cut, attended: Tensor, rows: Tensor, batch: Batch) -> Tensor:
        """What follows the last layer's attention, of a step's logit rows, where these are few:
        the final hidden states of those of all ranks.
        """
        residual, tail = cut.residual[rows], self.exchange.logits_alone(batch.order)
        if not self.exchange.most(rows.shape[0], tail):
            return residual
        out: Summable = residual  # of no row, if other ranks have all
        if rows.shape[0]:
            out = cut.block.attention.output(attended[rows], None)
        out, residual = cut.block.leave(out, residual, replace(batch, order=tail))
        return self.exchange.collect(self.norm.add(out, residual)[0], batch.order)

    @torch.inference_mode()
    def move(self, caches: Caches, batch: Batch, moves: Moves) -> None:
        """Bring the kept nodes of trees to other places in every cache. batch: the step that
        computed them, with all its rows.
        """
        index_keys = iter(batch.index_keys)
        for block, step in self._layers(caches, batch):
            attention = block.attention
            assert attention.move is not None, "steps with trees were not planned"
            attention.move(step.cache, moves.sources, moves.targets)
            if step.index_cache is not None:
                assert attention.indexer is not None
                rows = moves.rows.flatten()
                attention.indexer.cache_keys(
                    next(index_keys)[rows],
                    batch.positions[rows],
                    torch.where(moves.sources < 0, -1, moves.targets).flatten(),
                    step.index_cache,
                    self.cos_sin,
                )

    def state_keys(self, part: DecodePart) -> frozenset[str]:
        """Keys of the step states that attention of such rows reads."""
        return frozenset(key for block in self.blocks for key in block.state_keys(part))
