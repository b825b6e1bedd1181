"""The feed-forward half of a block: a SwiGLU, or routed experts with a shared one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from ds_runtime.description import tree
from ds_runtime.description.config import ModelConfig
from ds_runtime.model.expert_counts import count_chosen
from ds_runtime.model.layers import Codes, ExpertsLayer
from ds_runtime.ops.batch import Batch, RowOrder
from ds_runtime.ops.binding.branch import branch
from ds_runtime.parallel.sums.normed import Summable

if TYPE_CHECKING:
    from ds_runtime.weights.loader import Loader

_Part: TypeAlias = tuple[Tensor, RowOrder | None, int, Tensor | None]
"""What the exchange takes: a partial result, the order, this group's rows, and their own."""


class SwiGlu:
    """down(silu(gate x) · up x) on one rank's width; the sum over ranks is the caller's. limit: of
    the activations, where they have one.
    """

    def __init__(self, load: Loader, node: tree.SwiGluNode, limit: float | None = None) -> None:
        self.limit = limit
        self.ops = load.ops(node.layer, node.module)
        self.gate_up = load.linear(node.gate_up)
        self.down = load.linear(node.down)
        self.fused = load.bound.has("silu_mul_quantize", node.layer, node.module)

    def __call__(self, x: Tensor, adapters: Tensor | None = None) -> Tensor:
        """[T, hidden] → [T, hidden]; adapters [T] as in Batch."""
        inner = self.gate_up(x, adapters)
        groups = self.down.quantizes(x.shape[0], adapters) if self.fused else None
        if groups is not None:
            return self.down(Codes(*self.ops.silu_mul_quantize(inner, *groups)))
        if self.limit is not None:
            return self.down(self.ops.silu_mul_limited(inner, self.limit), adapters)
        return self.down(self.ops.silu_mul(inner), adapters)


class DenseMlp:
    """The MLP of the first layers."""

    def __init__(self, load: Loader, node: tree.SwiGluNode) -> None:
        self.mlp, self.exchange = SwiGlu(load, node), load.exchange

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """This rank's rows of the step, [T, hidden] → [T, hidden], summed over ranks."""
        return self.exchange.leave(*self._part(x, batch))

    def later(self, x: Tensor, batch: Batch) -> Summable:
        """The same, whose add and norm come next."""
        return self.exchange.leave_later(*self._part(x, batch))

    def _part(self, x: Tensor, batch: Batch) -> tuple[Tensor, RowOrder | None, int]:
        """What the exchange takes."""
        every = self.exchange.enter(x, batch.order)
        return self.mlp(every, self.exchange.adapters(batch)), batch.order, x.shape[0]


class MoeMlp:
    """Routed experts plus the shared experts, which are added unscaled: one SwiGLU, or slots after
    the routed experts that every token takes. By scores, or by what the ids of tokens say.
    """

    def __init__(self, config: ModelConfig, load: Loader, node: tree.MoeNode) -> None:
        assert config.routing is not None
        self.ops = load.ops(node.layer, tree.MLP)
        self.exchange = load.exchange
        self.router = load.wide(node.router)
        self.bias = None if node.correction is None else load.wide(node.correction)
        self.experts = load.experts(node)
        self.slots = load.expert_slots(node)
        self.counts = None if load.counts is None else load.counts.of(node.layer)
        brings = self.slots is not None and load.exchange.brings
        self.coded = brings and load.agree_on_codes(self.experts)
        slots = load.shared_slots(node)
        self.routing = replace(config.routing, shared=slots)
        limit = None if config.hybrid is None else config.hybrid.limit
        self.softplus = config.routing.scoring == "sqrtsoftplus"
        self.table = None if node.table is None else load.ids(node.table)
        self.shared: SwiGlu | None = None
        if node.shared is not None and not slots:
            self.shared = SwiGlu(load, node.shared, limit)

    def __call__(self, x: Tensor, batch: Batch, ids: Tensor | None = None) -> Tensor:
        """This rank's rows of the step, [T, hidden] → [T, hidden], summed over ranks once. ids: of
        the tokens of all rows that `enter` gives, where these may say which experts.
        """
        return self.exchange.leave(*self._part(x, batch, ids))

    def later(self, x: Tensor, batch: Batch) -> Summable:
        """The same, whose add and norm come next."""
        return self.exchange.leave_later(*self._part(x, batch, None))

    def _part(self, x: Tensor, batch: Batch, ids: Tensor | None) -> _Part:
        count, adapters = x.shape[0], self.exchange.adapters(batch)
        if self.slots is not None:
            return self._by_number(x, batch, self.slots)
        x = self.exchange.enter(x, batch.order)
        shared = None if self.shared is None else branch(partial(self.shared, x, adapters))
        weights, chosen = self._chosen(x, ids)
        self._count(chosen[:count], batch)  # behind them are rows of other groups
        out = self.experts(x, weights, chosen, adapters)
        if shared is not None:
            out.add_(shared())  # `out` is new: nobody else holds it
        return out, batch.order, count, None

    def _chosen(self, x: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights and experts of each row, [T, top_k]. ids: of tokens, as in `__call__`."""
        return self.route(self.ops.router_logits(x, self.router), ids)

    def route(self, logits: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """(weights, experts) of each row, [rows, top_k]. logits: [rows, experts] float32."""
        if not self.softplus:
            return self.ops.route(logits, self.bias, self.routing)
        given = None
        if self.table is not None:
            assert ids is not None, "experts by token need the ids of tokens"
            given = self.table[ids]
        return self.ops.route_softplus(logits, self.bias, given, self.routing)

    def _count(self, chosen: Tensor, batch: Batch) -> None:
        """What this rank's rows chose, if somebody asked for that."""
        if self.counts is not None:
            count_chosen(self.counts, chosen[:, : self.routing.top_k], batch.slots)

    def _by_number(self, x: Tensor, batch: Batch, slots: Tensor) -> _Part:
        """Where this rank has some of the experts: router and shared experts see its own rows,
        and rows of all groups come with their choices: as the codes that their experts multiply,
        where these would be made of them anyway. slots: as Loader.expert_slots."""
        exchange, order = self.exchange, batch.order
        shared = None if self.shared is None else branch(partial(self.shared, x, batch.adapters))
        weights, ids = self._chosen(x, batch.input_ids)
        self._count(ids, batch)
        parts, codes = [x, weights, ids], None
        if self.coded:
            assert isinstance(self.experts, ExpertsLayer)
            codes = self.experts.quantized(exchange.entered(x.shape[0], order), x)
        if codes is not None:
            parts = [codes.q.view(torch.uint8), weights, ids, codes.scale]
        every, weights, ids, *scale = exchange.enter_together(parts, order)
        ids, k = slots[ids], self.routing.top_k
        if self.routing.shared:  # where the first choice of a token is, and nowhere else
            ids[:, k:].masked_fill_(ids[:, :1] < 0, -1)
        rows = every if codes is None else Codes(every.view(codes.q.dtype), *scale)
        out = self.experts(rows, weights.contiguous(), ids, exchange.adapters(batch))  # type: ignore[arg-type]
        return out, order, x.shape[0], None if shared is None else shared()
