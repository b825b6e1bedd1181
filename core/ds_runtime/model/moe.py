"""The feed-forward half of a block: a SwiGLU, or routed experts beside a shared one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from ds_runtime.description import structure
from ds_runtime.description.config import ModelConfig
from ds_runtime.model.layers import Codes
from ds_runtime.ops.batch import Batch
from ds_runtime.ops.binding.branch import branch

if TYPE_CHECKING:
    from ds_runtime.weights.loader import Loader


class SwiGlu:
    """down(silu(gate x) · up x) on one rank's width; the sum over ranks is the caller's."""

    def __init__(self, load: Loader, node: structure.SwiGluNode) -> None:
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
        return self.down(self.ops.silu_mul(inner), adapters)


class DenseMlp:
    """The MLP of the first layers."""

    def __init__(self, load: Loader, node: structure.SwiGluNode) -> None:
        self.mlp, self.exchange = SwiGlu(load, node), load.exchange

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """This rank's rows of the step, [T, hidden] → [T, hidden], summed over ranks."""
        every = self.exchange.enter(x, batch.order)
        out = self.mlp(every, self.exchange.adapters(batch))
        return self.exchange.leave(out, batch.order, x.shape[0])


class MoeMlp:
    """Routed experts plus the shared experts, which are added unscaled: one SwiGLU, or slots behind
    the routed experts that every token takes.
    """

    def __init__(self, config: ModelConfig, load: Loader, node: structure.MoeNode) -> None:
        assert config.routing is not None
        self.ops = load.ops(node.layer, structure.MLP)
        self.exchange = load.exchange
        self.router = load.wide(node.router)
        self.bias = None if node.correction is None else load.wide(node.correction)
        self.experts = load.experts(node)
        self.slots = load.expert_slots(node)
        slots = load.shared_slots(node)
        self.routing = replace(config.routing, shared=slots)
        self.shared: SwiGlu | None = None
        if node.shared is not None and not slots:
            self.shared = SwiGlu(load, node.shared)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """This rank's rows of the step, [T, hidden] → [T, hidden], summed over ranks once."""
        count, adapters = x.shape[0], self.exchange.adapters(batch)
        if self.slots is not None:
            return self._by_number(x, batch, self.slots)
        x = self.exchange.enter(x, batch.order)
        shared = None if self.shared is None else branch(partial(self.shared, x, adapters))
        out = self.experts(x, *self._chosen(x), adapters)
        if shared is not None:
            out.add_(shared())  # `out` is new: nobody else holds it
        return self.exchange.leave(out, batch.order, count)

    def _chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and ids of each row's experts: [T, top_k], as in Route."""
        logits = self.ops.router_logits(x, self.router)  # [T, experts] float32
        return self.ops.route(logits, self.bias, self.routing)

    def _by_number(self, x: Tensor, batch: Batch, slots: Tensor) -> Tensor:
        """Where this rank has some of the experts: router and shared experts see its own rows,
        and rows of all groups come with their choices. slots: as Loader.expert_slots."""
        exchange, order = self.exchange, batch.order
        shared = None if self.shared is None else branch(partial(self.shared, x, batch.adapters))
        weights, ids = exchange.enter_choices(*self._chosen(x), order)
        ids, k = slots[ids], self.routing.top_k
        if self.routing.shared:  # where the first choice of a token is, and nowhere else
            ids[:, k:].masked_fill_(ids[:, :1] < 0, -1)
        out = self.experts(exchange.enter(x, order), weights, ids, exchange.adapters(batch))
        return exchange.leave(out, order, x.shape[0], None if shared is None else shared())
