"""The draft layer (MTP, NextN): from a token and the hidden state before it to the next one's.

x = join([norm(embedding) ; norm(hidden)]), one ordinary block, then a norm of its own. Its
result is what the model's head takes, and what it takes itself in place of the model's hidden
state when it drafts the token after. Source: DeepSeek-V3 technical report, arXiv 2412.19437, 2.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ds_runtime.description.tree import DraftTree
from ds_runtime.model.deepseek import DecoderLayer, DeepSeekModel
from ds_runtime.model.indexer import LayerStep
from ds_runtime.model.layers import RmsNormLayer
from ds_runtime.ops.batch import Batch, DecodePart, RowOrder
from ds_runtime.ops.contracts.caches import INDEX, KV, Caches

if TYPE_CHECKING:
    from ds_runtime.weights.loader import Loader


class DraftModel:
    """One rank's part of the draft layer; embedding, head and rotation are those of `model`."""

    def __init__(self, model: DeepSeekModel, load: Loader) -> None:
        config, node = model.config, load.tree
        assert isinstance(node, DraftTree)
        ops = load.ops(node.block.layer, "nextn")
        self.model = model
        self.embedding_norm = RmsNormLayer(ops, load.vector(node.embedding_norm), config.eps)
        self.hidden_norm = RmsNormLayer(ops, load.vector(node.hidden_norm), config.eps)
        self.join = load.linear(node.join)
        self.block = DecoderLayer(config, load, node.block)
        self.norm = RmsNormLayer(ops, load.vector(node.norm), config.eps)
        attention = self.block.attention
        # Of its steps of one token per sequence, and of several continuations. Sparse attention
        # has no state.
        self.state_key, self.tree_key = "", ""
        if attention.indexer is None:
            self.state_key, self.tree_key = attention.decode[1], attention.tree[1]
        self.packed_bytes = load.held_bytes

    def state_keys(self, part: DecodePart) -> frozenset[str]:
        """As of the model."""
        return frozenset(self.block.state_keys(part))

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        hidden: Tensor,
        ids: Tensor,
        caches: Caches,
        rows: Tensor | None,
        tail: RowOrder | None = None,
    ) -> Tensor:
        """[rows, hidden] for `exchange.collect`, which makes of them what `model.logits` takes;
        rows None: of every token.

        hidden: [T, hidden] at the batch's positions; ids: [T], the tokens that follow them. Every
        row's key is written to the draft layer's caches. tail: the order of `rows`.
        """
        model = self.model
        # Adapters change the model, and drafts need not be right.
        batch = model.exchange.plain(batch)
        embedded = model.embedded(ids, batch)
        both = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        selection, layer = model.selection(batch), model.config.layers
        own = caches.of(KV, layer), model.cos_sin, caches.get(INDEX, layer)
        step = LayerStep(batch, *own, selection)
        x, residual = self.block(self.join(both), None, step, rows, tail)
        normed, _ = self.norm.add(x, residual)
        return normed

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """As of the model, by the head that drafts are drawn by."""
        return self.model.draft_logits(hidden, out)
