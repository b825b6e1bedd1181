"""AITER: fused routed experts, and the choice of experts.

Source of the calls: github.com/ROCm/aiter, aiter/fused_moe.py, aiter/ops/topk.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ds_runtime.api import (
    ExpertSource,
    Facts,
    Packed,
    Routing,
    Weight,
    fp8_blocks,
    torch_dtype,
    with_shared_slots,
)
from ds_runtime.api import route as reference_route
from ds_runtime_rocm import blocks
from ds_runtime_rocm.aiter_gemm import fp8_dtype, unshuffle_scale

_GROUPS = (1, 2, 4, 8)  # expert groups that the library chooses from


@cache
def _library(module: str = "aiter") -> Any:
    return import_module(module)


def _shuffle(values: Tensor) -> Tensor:
    out: Tensor = _library("aiter.ops.shuffle").shuffle_weight(values, (16, 16))
    return out


class _Experts:
    """What the three have in common: weights gate first, shuffled, one expert at a time."""

    tag = ""
    quant = "No"

    def __init__(self, facts: Facts) -> None:
        self._quant = getattr(_library().QuantType, self.quant)
        self._moe = _library("aiter.fused_moe").fused_moe

    def _parts(self, gate_up: Weight, down: Weight) -> Iterator[tuple[str, Tensor]]:
        raise NotImplementedError

    def pack(self, source: ExpertSource, facts: Facts) -> Packed:
        tensors: dict[str, Tensor] = {}
        for e in range(source.num_experts):
            gate, up, down = source.expert(e)
            for name, part in self._parts(Weight((*gate.parts, *up.parts)), down):
                if e == 0:
                    tensors[name] = part.new_empty(source.num_experts, *part.shape)
                tensors[name][e].copy_(part)
        self._finish(tensors)
        shape = (source.num_experts, source.hidden, source.intermediate)
        nbytes = sum(t.nbytes for t in tensors.values())
        return Packed(self.tag, shape, tensors, nbytes, restore=self._restore)

    def _finish(self, tensors: dict[str, Tensor]) -> None:
        """Mark what is shuffled as the library does: it looks at its tensors for that."""
        for name in ("gate_up", "down"):
            tensors[name].is_shuffled = True  # type: ignore[attr-defined]

    def _restore(self, packed: Packed) -> Tensor:
        return blocks.unshuffle(packed.tensors["gate_up"]).to(torch.float32)

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        if not x.shape[0]:
            return torch.empty_like(x, memory_format=torch.contiguous_format)
        held = packed.tensors
        out: Tensor = self._moe(
            x.contiguous(),
            held["gate_up"],
            held["down"],
            weights,
            ids,
            quant_type=self._quant,
            w1_scale=held.get("gate_up_scale"),
            w2_scale=held.get("down_scale"),
        )
        return out


class ExpertsDense(_Experts):
    """In the compute dtype."""

    tag = "rocm.aiter_experts"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._dtype = torch_dtype(facts.dtype)

    def _parts(self, gate_up: Weight, down: Weight) -> Iterator[tuple[str, Tensor]]:
        for name, weight in (("gate_up", gate_up), ("down", down)):
            yield name, _shuffle(weight.dequantise(self._dtype))


class ExpertsFp8(_Experts):
    """In FP8 with 128×128 weight blocks, in the flavour of the architecture."""

    tag = "rocm.aiter_experts_fp8"
    quant = "per_128x128"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._fp8 = fp8_dtype(facts.device.arch)

    def _parts(self, gate_up: Weight, down: Weight) -> Iterator[tuple[str, Tensor]]:
        for name, weight in (("gate_up", gate_up), ("down", down)):
            joined = blocks.join(weight, self._fp8)
            assert joined is not None, "refuse() lets whole blocks pass alone"
            yield name, _shuffle(joined[0])
            yield f"{name}_scale", joined[1]

    def _restore(self, packed: Packed) -> Tensor:
        held = packed.tensors
        return fp8_blocks.spread(blocks.unshuffle(held["gate_up"]), held["gate_up_scale"])


class ExpertsMxfp4(_Experts):
    """In microscaled FP4, activations too, on gfx950."""

    tag = "rocm.aiter_experts_mxfp4"
    quant = "per_1x32"

    def _parts(self, gate_up: Weight, down: Weight) -> Iterator[tuple[str, Tensor]]:
        for name, weight in (("gate_up", gate_up), ("down", down)):
            joined = blocks.join_mxfp4(weight)
            assert joined is not None, "refuse() lets whole groups pass alone"
            yield name, _shuffle(joined[0])
            yield f"{name}_scale", joined[1]

    def _finish(self, tensors: dict[str, Tensor]) -> None:
        """Exponents are shuffled over all experts at once; codes get the library's FP4 type."""
        shuffle = _library("aiter.utility.fp4_utils").e8m0_shuffle
        for name in ("gate_up", "down"):
            tensors[f"{name}_scale"] = shuffle(tensors[f"{name}_scale"].flatten(0, 1))
            tensors[name] = tensors[name].view(_library().dtypes.fp4x2)
        super()._finish(tensors)

    def _restore(self, packed: Packed) -> Tensor:
        experts, hidden, inter = packed.shape
        codes = blocks.unshuffle(packed.tensors["gate_up"].view(torch.uint8))
        exponents = unshuffle_scale(packed.tensors["gate_up_scale"])
        rows = exponents[: experts * 2 * inter, : hidden // blocks.GROUP]
        return blocks.spread_mxfp4(codes, rows.reshape(experts, 2 * inter, -1))


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Route with the library's grouped top-k; what it does not choose by is computed in torch."""
    tokens, experts = logits.shape
    weights = torch.empty(tokens, routing.top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, routing.top_k, dtype=torch.int32, device=logits.device)
    if not tokens:
        return with_shared_slots(weights, ids, routing)
    grouped = routing.n_group in _GROUPS and experts % routing.n_group == 0
    sizes = routing.n_group, routing.topk_group, routing.renormalize
    if routing.method == "noaux_tc" and routing.scoring == "sigmoid" and grouped:
        _biased(logits.contiguous(), bias, weights, ids, routing)
        return with_shared_slots(weights, ids, routing)
    if routing.method == "group_limited_greedy" and routing.scoring == "softmax" and grouped:
        _library().grouped_topk(
            logits.contiguous(), weights, ids, *sizes, is_softmax=True,
            routed_scaling_factor=routing.scale,
        )  # fmt: skip
        return with_shared_slots(weights, ids, routing)
    return reference_route(logits, bias, routing)


def _biased(
    logits: Tensor, bias: Tensor | None, weights: Tensor, ids: Tensor, routing: Routing
) -> None:
    """In parts that the library takes without renormalising: it may not leave that out for more."""
    if bias is None:
        bias = logits.new_zeros(logits.shape[1])
    tokens = logits.shape[0]
    step = tokens if routing.renormalize else _UNNORMALISED
    for i in range(0, tokens, step):
        part = slice(i, i + step)
        _library().biased_grouped_topk(
            logits[part], bias, weights[part], ids[part], routing.n_group, routing.topk_group,
            routing.renormalize, routing.scale,
        )  # fmt: skip


_UNNORMALISED = 8192  # tokens; the library's limit is 212 per compute unit
