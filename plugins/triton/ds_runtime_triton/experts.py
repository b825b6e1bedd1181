"""Routed experts: sort, gate and up with SiLU, down, sum. No step waits for the host."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ds_runtime.api import (
    DENSE_EXPERTS,
    FP8_EXPERTS,
    ExpertSource,
    Facts,
    Packed,
    Weight,
    fp8_blocks,
    torch_dtype,
)
from ds_runtime_triton.blocks import BLOCK, FP8, column_group, row_group
from ds_runtime_triton.config import chosen
from ds_runtime_triton.expert_launches import (
    Given,
    Layer,
    down_split,
    launch,
    part_of_config,
    quantised,
)
from ds_runtime_triton.launch import cdiv, counters
from ds_runtime_triton.pairs import sort_chunk, sort_rows
from ds_runtime_triton.quant import block_of
from ds_runtime_triton.stack import dense_stack, fill, scaled_stack


def some_absent(facts: Facts) -> bool:
    """Whether other ranks have experts, too."""
    return facts.ranks.get("ep", 1) > 1


def pairs_of(facts: Facts, tokens: int) -> int:
    """Of a call: every token takes the slots after the routed experts, too."""
    routed = facts.dims["experts"] // facts.ranks.get("ep", 1)
    return tokens * (facts.dims["top_k"] + facts.shape[0] - routed)


def variant(facts: Facts, op: str, tokens: int) -> Hashable:
    """What a call is compiled for, over weights of facts.shape in whole blocks or in others."""
    if not tokens:
        return None
    (experts, inter, hidden), pairs = facts.shape, pairs_of(facts, tokens)
    found = list[Hashable]()
    for key in (f"E={experts},N={inter},K={hidden}", "*"):
        sizes = chosen(facts, op, key)
        config = sizes.at(pairs)
        low = part_of_config(config, "DN_")
        direct = config.get("DIRECT") and not config.get("VECTOR")
        split = down_split(low, hidden, tokens) if direct else 0
        found.append((sizes.number(pairs), split))
    return *found, sort_chunk(pairs), sort_rows(tokens), block_of(tokens), block_of(pairs)


def dense_variant(facts: Facts, rows: int) -> Hashable:
    """`Compiles.variant` of ExpertsDense."""
    return variant(facts, "experts_dense", rows)


def fp8_variant(facts: Facts, rows: int) -> Hashable:
    """Of ExpertsFp8, which may have to keep weights dense."""
    return variant(facts, "experts_fp8", rows), dense_variant(facts, rows)


def int8_variant(facts: Facts, rows: int) -> Hashable:
    """Of ExpertsInt8."""
    return variant(facts, "experts_int8", rows), dense_variant(facts, rows)


class _Experts:
    """What the kernels share: packing in order, and the launches. keeps: formats that stay as they
    are."""

    tag = ""
    keeps: frozenset[str] = frozenset()
    packing = ""  # of what is dense, or in whole blocks

    def __init__(self, facts: Facts) -> None:
        self.dtype = torch_dtype(facts.dtype)
        self.facts = facts

    def pack(self, source: ExpertSource, facts: Facts) -> Packed:
        count, hidden, inter = source.num_experts, source.hidden, source.intermediate
        if self.keeps and source.format not in self.keeps:
            read = " and ".join(sorted(self.keeps))
            raise TypeError(f"{self.tag} reads {read}, not {source.format}")
        layer: Layer | None = None
        for e in range(count):
            weights = source.expert(e)
            if layer is None:
                layer = self._empty(count, hidden, inter, weights)
            gate, up, down = weights
            fill(layer.gate_up, (e, 0), gate)
            fill(layer.gate_up, (e, 1), up)
            fill(layer.down, (e,), down)
        assert layer is not None, "a layer without experts"
        if layer.scaled:
            scales = layer.gate_up.scale, layer.down.scale
            layer.ue8m0 = all(fp8_blocks.powers_of_two(scale) for scale in scales)
        layer.absent = some_absent(facts)
        nbytes = layer.gate_up.nbytes + layer.down.nbytes
        shared = _shared(layer, self.packing)
        tensors = {"layer": layer, **shared}
        tag = self.packing if shared else self.tag
        return Packed(tag, (count, hidden, inter), tensors, nbytes, _restore)

    def _empty(
        self, count: int, hidden: int, inter: int, weights: tuple[Weight, Weight, Weight]
    ) -> Layer:
        wide, low = (count, 2, inter, hidden), (count, hidden, inter)
        key = f"E={count},N={inter},K={hidden}"
        gate, up, down = weights
        values = gate.parts[0].tensors["weight"]
        device = values.device
        same = column_group(gate) == column_group(up) and row_group_or_0(gate) == row_group_or_0(up)
        if self.keeps and same and column_group(gate) and column_group(down):
            stacks = scaled_stack(wide, gate), scaled_stack(low, down)
            blocks = {size for stack in stacks for size in (stack.group_n, stack.group_k)}
            # entries of a shape are tuned for, and some kernels take, the usual blocks only
            name = key if blocks == {BLOCK} else "*"
            sizes = chosen(self.facts, self.tag.removeprefix("triton."), name)
            return Layer(*stacks, sizes, counters(values))
        return Layer(
            dense_stack(wide, self.dtype, device),
            dense_stack(low, self.dtype, device),
            chosen(self.facts, "experts_dense", key),
            counters(values),
        )

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag, self.packing)
        if x.shape[0] == 0 or ids.shape[1] == 0:
            return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        layer: Layer = packed.tensors["layer"]
        config = layer.sizes.at(ids.numel())
        given = Given(x if x.stride(1) == 1 else x.contiguous())
        return launch(given, weights.contiguous(), ids.contiguous(), layer, config)


def _shared(layer: Layer, packing: str) -> dict[str, Any]:
    """What a packing holds; nothing where the weights are not of its kind."""
    upper, lower = layer.gate_up, layer.down
    if packing == DENSE_EXPERTS and not layer.scaled:
        return {"gate_up": upper.values.flatten(1, 2), "down": lower.values}
    if packing != FP8_EXPERTS or not layer.scaled:
        return {}
    sizes = (*upper.values.shape[2:], *lower.values.shape[1:])
    blocks = {upper.group_n, upper.group_k, lower.group_n, lower.group_k}
    if blocks != {BLOCK} or any(n % BLOCK for n in sizes):
        return {}
    return {
        "gate_up": upper.values.flatten(1, 2),
        "gate_up_scale": upper.scale.flatten(1, 2),
        "down": lower.values,
        "down_scale": lower.scale,
        "ue8m0": layer.ue8m0,
    }


def row_group_or_0(weight: Weight) -> int:
    """row_group for weights in blocks, else 0."""
    return row_group(weight) if column_group(weight) else 0


def _no_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of no rows."""
    scale = torch.empty(0, cdiv(x.shape[1], BLOCK), dtype=torch.float32, device=x.device)
    return torch.empty(x.shape, dtype=FP8, device=x.device), scale


def _restore(packed: Packed) -> Tensor:
    """[experts, 2 · intermediate, hidden]: gate rows, then up rows."""
    layer: Layer = packed.tensors["layer"]
    count, hidden, inter = packed.shape
    return layer.gate_up.wide().view(count, 2 * inter, hidden)


class ExpertsDense(_Experts):
    """Weights in the compute dtype."""

    tag = "triton.experts_dense"
    packing = DENSE_EXPERTS


class ExpertsFp8(_Experts):
    """FP8 weights as they are, activations quantised per token and group before each matmul."""

    tag = "triton.experts_fp8"
    keeps = frozenset({"fp8_block"})
    packing = FP8_EXPERTS

    def quantize(self, rows: int, x: Tensor, packed: Packed) -> tuple[Tensor, Tensor] | None:
        """See QuantizedExperts: but of calls so small that each program makes its own codes."""
        packed.expect(self.tag, self.packing)
        layer: Layer = packed.tensors["layer"]
        if layer.gate_up.group_k != BLOCK or layer.sizes.any_from(rows, "VECTOR"):
            return None
        if not x.shape[0]:
            return _no_codes(x)
        q, scale = quantised(x if x.stride(1) == 1 else x.contiguous(), layer)
        return q, scale.T

    def apply_quantized(
        self, q: Tensor, scale: Tensor, weights: Tensor, ids: Tensor, packed: Packed
    ) -> Tensor:
        """See QuantizedExperts."""
        packed.expect(self.tag, self.packing)
        if q.shape[0] == 0 or ids.shape[1] == 0:
            return torch.zeros(q.shape, dtype=self.dtype, device=q.device)
        layer: Layer = packed.tensors["layer"]
        like = torch.empty((), dtype=self.dtype, device=q.device).expand(q.shape)
        given = Given(like, (q, scale))
        config = layer.sizes.at(ids.numel())
        return launch(given, weights.contiguous(), ids.contiguous(), layer, config)


class ExpertsInt8(_Experts):
    """As ExpertsFp8, in int8: products are exact, scales by row or by block."""

    tag = "triton.experts_int8"
    keeps = frozenset({"int8_channel", "int8_block"})


# The names that the plan shows.
experts_dense = ExpertsDense
experts_fp8 = ExpertsFp8
experts_int8 = ExpertsInt8
