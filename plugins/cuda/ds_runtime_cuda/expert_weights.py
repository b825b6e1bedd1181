"""Weights of routed experts in the forms that several kernels read: FP8_EXPERTS, DENSE_EXPERTS."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_runtime.api import (
    DENSE_EXPERTS,
    FP8_EXPERTS,
    ExpertSource,
    Packed,
    Weight,
    fp8_blocks,
)

_PARTS = ("gate_up", "gate_up_scale", "down", "down_scale")


def pack_blocks(source: ExpertSource) -> Packed:
    """FP8 in whole blocks of 128 × 128, as it is."""
    tensors: dict[str, Any] = {}
    for e in range(source.num_experts):
        gate, up, down = source.expert(e)
        upper, lower = fp8_blocks.join(Weight((*gate.parts, *up.parts))), fp8_blocks.join(down)
        assert upper is not None and lower is not None, "refuse() lets whole blocks pass alone"
        for name, part in zip(_PARTS, (*upper, *lower), strict=True):
            if e == 0:
                tensors[name] = part.new_empty(source.num_experts, *part.shape)
            tensors[name][e].copy_(part)
    tensors["ue8m0"] = all(_powers_of_two(tensors[f"{n}_scale"]) for n in ("gate_up", "down"))
    return _packed(FP8_EXPERTS, source, tensors)


def pack_dense(source: ExpertSource, dtype: torch.dtype) -> Packed:
    """In the compute dtype."""
    count, hidden, inter = source.num_experts, source.hidden, source.intermediate
    tensors: dict[str, Any] = {}
    for e in range(count):
        gate, up, down = source.expert(e)
        if e == 0:
            device = gate.parts[0].tensors["weight"].device
            for name, shape in (("gate_up", (2 * inter, hidden)), ("down", (hidden, inter))):
                tensors[name] = torch.empty(count, *shape, dtype=dtype, device=device)
        tensors["gate_up"][e, :inter] = gate.dequantise(dtype)
        tensors["gate_up"][e, inter:] = up.dequantise(dtype)
        tensors["down"][e] = down.dequantise(dtype)
    return _packed(DENSE_EXPERTS, source, tensors)


def _packed(tag: str, source: ExpertSource, tensors: dict[str, Any]) -> Packed:
    shape = (source.num_experts, source.hidden, source.intermediate)
    nbytes = sum(t.nbytes for t in tensors.values() if isinstance(t, Tensor))
    return Packed(tag, shape, tensors, nbytes, restore=_restore)


def _powers_of_two(scale: Tensor) -> bool:
    return bool((scale.view(torch.int32) & 0x7FFFFF == 0).all())


def _restore(packed: Packed) -> Tensor:
    """[experts, 2 · intermediate, hidden]: gate rows, then up rows."""
    values: Tensor = packed.tensors["gate_up"]
    if packed.tag == FP8_EXPERTS:
        return fp8_blocks.spread(values, packed.tensors["gate_up_scale"])
    return values.to(torch.float32)
