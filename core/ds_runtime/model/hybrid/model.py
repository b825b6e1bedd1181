"""DeepSeek-V4: embedding, layers over several residual streams, their share, norm, head."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ds_runtime.description import tree
from ds_runtime.description.config import ModelConfig
from ds_runtime.model.base import LanguageModel, Moves
from ds_runtime.model.hybrid.attention import WindowAttention
from ds_runtime.model.hybrid.step import HybridStep
from ds_runtime.model.layers import RmsNormLayer
from ds_runtime.model.moe import MoeMlp
from ds_runtime.model.rope import cos_sin_table
from ds_runtime.ops.batch import Batch, DecodePart
from ds_runtime.ops.contracts.caches import Caches

if TYPE_CHECKING:
    from ds_runtime.weights.loader import Loader


class StreamLayer:
    """Each sublayer reads a mix of the streams, and its result goes to all of them."""

    def __init__(self, config: ModelConfig, load: Loader, node: tree.StreamBlockNode) -> None:
        assert config.hybrid is not None
        self.ops = load.ops(node.layer, "block")
        self.mix, self.mlp_mix = load.mix(node.mix), load.mix(node.mlp_mix)
        self.constants = config.eps, config.hybrid.stream_eps, config.hybrid.rounds
        self.norm = RmsNormLayer(self.ops, load.vector(node.norm), config.eps)
        self.attention = WindowAttention(config, load, node.attention)
        self.mlp_norm = RmsNormLayer(self.ops, load.vector(node.mlp_norm), config.eps)
        self.mlp = MoeMlp(config, load, node.mlp)

    def __call__(self, x: Tensor, step: HybridStep) -> Tensor:
        """[T, streams, hidden] → the same behind this layer."""
        read, post, mix = self.ops.hc_pre(x, *self.mix, *self.constants)
        x = self.ops.hc_post(self.attention(self.norm(read), step), x, post, mix)
        read, post, mix = self.ops.hc_pre(x, *self.mlp_mix, *self.constants)
        y = self.mlp(self.mlp_norm(read), step.batch, step.ids)
        return self.ops.hc_post(y, x, post, mix)


class HybridModel(LanguageModel):
    """One rank's part of the model.

    positions: how many the rotation tables cover, so the longest context.
    """

    def __init__(self, config: ModelConfig, load: Loader, positions: int) -> None:
        node, hybrid = load.tree, config.hybrid
        assert isinstance(node, tree.ModelTree) and node.streams is not None and hybrid is not None
        plain = cos_sin_table(config, positions, load.device)
        other = replace(config, rope_theta=hybrid.theta, yarn=hybrid.yarn)
        self.tables = plain, cos_sin_table(other, positions, load.device)
        self.blocks = [StreamLayer(config, load, block) for block in node.streams.blocks]
        assert node.streams.mix is not None
        self.mix, self.ops = load.mix(node.streams.mix), load.ops(-1, "norm")
        self.streams, self.stream_eps = hybrid.streams, hybrid.stream_eps
        size = sum(table.nbytes for table in self.tables)
        super().__init__(config, load, len(self.blocks), size)

    @torch.inference_mode()
    def forward(self, batch: Batch, caches: Caches, every: bool = False) -> Tensor:
        exchange, order = self.exchange, batch.order
        ids = exchange.enter(batch.input_ids, order)
        step = HybridStep.of(batch, caches, ids, self.tables, self.scores_all)
        x = self.embedded(batch.input_ids, batch).unsqueeze(1)
        x = x.expand(-1, self.streams, -1).contiguous()  # [T, streams, hidden]
        for layer in self.running:
            x = self.blocks[layer](x, step)
        if every:
            return self._collapsed(x)
        wanted = batch.logit_rows.shape[0]
        if not exchange.most(wanted, exchange.logits_alone(order)):
            return x.new_empty(0, self.config.hidden)
        if wanted != x.shape[0]:  # rows are distinct and rising
            x = x[batch.logit_rows]
        return exchange.collect(self._collapsed(x), order)

    def _collapsed(self, x: Tensor) -> Tensor:
        """[rows, streams, hidden] → final hidden states [rows, hidden]."""
        return self.norm(self.ops.hc_head(x, *self.mix, self.config.eps, self.stream_eps))

    def move(self, caches: Caches, batch: Batch, moves: Moves) -> None:
        raise AssertionError("steps with trees were not planned")

    def state_keys(self, part: DecodePart) -> frozenset[str]:
        return frozenset()
