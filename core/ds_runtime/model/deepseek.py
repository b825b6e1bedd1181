"""DeepSeek V2 to V3.2: embedding, pre-norm blocks, final norm, head. No device, no globals."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
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
from ds_runtime.parallel.sums.overlapped import Started, overlapping

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
        attended, residual = self.run_attention(x, residual, step, rows)
        return self.run_mlp(attended, residual, step.batch, rows, tail)

    def run_attention(
        self, x: Summable, residual: Tensor | None, step: LayerStep, rows: Tensor | None = None
    ) -> tuple[Summable, Tensor]:
        """(attention's output, residual before it) of the rows that are wanted."""
        normed, residual = self.enter(x, residual, step.batch)
        attended = self.attention(normed, step)
        return (attended, residual) if rows is None else (attended[rows], residual[rows])

    def run_mlp(
        self,
        attended: Summable,
        residual: Tensor,
        batch: Batch,
        rows: Tensor | None = None,
        tail: RowOrder | None = None,
    ) -> tuple[Summable, Tensor]:
        """(mlp output, residual before it) of what `run_attention` gave, with the same rows."""
        if rows is not None:
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


@dataclass(slots=True)
class Pass:
    """A batch on its way through the layers. few: the rows of the last layer that are wanted, if
    not all; tail: their order."""

    batch: Batch
    x: Summable
    selection: Selection | None
    few: Tensor | None
    tail: RowOrder | None
    residual: Tensor | None = None


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
        return self._hidden((batch,), caches, every)[0]

    @torch.inference_mode()
    def forward_halves(self, halves: Sequence[Batch], caches: Caches, every: bool) -> Tensor:
        """`forward` of a step whose rows are those of several batches, one after the other: while
        sums of one travel between ranks, another one computes."""
        with overlapping():
            return torch.cat(self._hidden(halves, caches, every))

    def _hidden(self, batches: Sequence[Batch], caches: Caches, every: bool) -> list[Tensor]:
        """Of each batch what `forward` returns. All take a layer's attention, then its FFN."""
        passes = [self._begin(batch, every) for batch in batches]
        for layer in self.running:
            block, last = self.blocks[layer], layer == len(self.blocks) - 1
            for one in passes:
                step = self._step(layer, caches, one.batch, one.selection)
                rows = one.few if last else None
                one.x, one.residual = block.run_attention(one.x, one.residual, step, rows)
            for one in passes:
                assert one.residual is not None
                own = (one.few, one.tail) if last else ()
                one.x, one.residual = block.run_mlp(one.x, one.residual, one.batch, *own)
        return [self._end(one, every) for one in passes]

    def _begin(self, batch: Batch, every: bool) -> Pass:
        x = self.embedded(batch.input_ids, batch)  # [T, hidden]
        few, tail = None if every else self.few(batch), self.exchange.logits_alone(batch.order)
        return Pass(batch, x, self.selection(batch), few, tail)

    def _end(self, one: Pass, every: bool) -> Tensor:
        """Of what the last layer gave."""
        x, residual, batch = one.x, one.residual, one.batch
        assert residual is not None, "a model has at least one layer"
        if every:
            return self.norm.add(x, residual)[0]
        wanted = batch.logit_rows.shape[0]
        if not self.exchange.most(wanted, one.tail):
            if isinstance(x, Started):
                x.summed()  # other ranks wait for it, too
            return residual.new_empty(0, self.config.hidden)
        if wanted != x.shape[0]:  # rows are distinct and rising
            x, residual = x[batch.logit_rows], residual[batch.logit_rows]
        return self.exchange.collect(self.norm.add(x, residual)[0], batch.order)

    def _layers(
        self, caches: Caches, batch: Batch, selection: Selection | None = None
    ) -> Iterator[tuple[DecoderLayer, LayerStep]]:
        """Each layer that runs, and what it sees of a step."""
        for layer in self.running:
            yield self.blocks[layer], self._step(layer, caches, batch, selection)

    def _step(
        self, layer: int, caches: Caches, batch: Batch, selection: Selection | None
    ) -> LayerStep:
        own = caches.of(KV, layer), self.cos_sin, caches.get(INDEX, layer)
        return LayerStep(batch, *own, selection)

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
