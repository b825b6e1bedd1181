"""FP8 weights of routed experts in whole blocks of 128 × 128, stacked as kernels read them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ds_runtime.api import FP8_EXPERTS, ExpertSource, Facts, Packed, Weight, fp8_blocks
from ds_runtime_cuda import grouped
from ds_runtime_cuda.quant import quantise

_PARTS = ("gate_up", "gate_up_scale", "down", "down_scale")


def stack_blocks(
    source: ExpertSource, names: Sequence[str], up_first: bool = False
) -> tuple[dict[str, Any], int]:
    """(tensors, their bytes). names: of gate and up in one, their scales, down, its scales."""
    tensors: dict[str, Any] = {}
    for e in range(source.num_experts):
        gate, up, down = source.expert(e)
        both = (*up.parts, *gate.parts) if up_first else (*gate.parts, *up.parts)
        upper, lower = fp8_blocks.join(Weight(both)), fp8_blocks.join(down)
        assert upper is not None and lower is not None, "refuse() lets whole blocks pass alone"
        for name, part in zip(names, (*upper, *lower), strict=True):
            if e == 0:
                tensors[name] = part.new_empty(source.num_experts, *part.shape)
            tensors[name][e].copy_(part)
    return tensors, sum(t.nbytes for t in tensors.values())


class MakesCodes:
    """What experts over FP8_EXPERTS have of QuantizedExperts if quant.quantise gives the codes that
    they make themselves."""

    def quantize(self, rows: int, x: Tensor, packed: Packed) -> tuple[Tensor, Tensor] | None:
        """See QuantizedExperts."""
        packed.expect(FP8_EXPERTS)
        x = x if x.stride(1) == 1 else x.contiguous()
        return quantise(x, powers=bool(packed.tensors.get("ue8m0", False)))


def pack_blocks(source: ExpertSource) -> Packed:
    """FP8_EXPERTS."""
    tensors, nbytes = stack_blocks(source, _PARTS)
    scales = tensors["gate_up_scale"], tensors["down_scale"]
    tensors["ue8m0"] = all(fp8_blocks.powers_of_two(scale) for scale in scales)
    shape = (source.num_experts, source.hidden, source.intermediate)
    return Packed(FP8_EXPERTS, shape, tensors, nbytes, restore=_restore)


def _restore(packed: Packed) -> Tensor:
    """[experts, 2 · intermediate, hidden]: gate rows, then up rows."""
    return fp8_blocks.spread(packed.tensors["gate_up"], packed.tensors["gate_up_scale"])


class SortedExperts(MakesCodes, ABC):
    """Routed experts over FP8_EXPERTS as grouped matmuls over rows sorted by expert."""

    def pack(self, source: ExpertSource, facts: Facts) -> Packed:
        return pack_blocks(source)

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        packed.expect(FP8_EXPERTS)
        powers = bool(packed.tensors.get("ue8m0", False))
        return self._summed(lambda rows: grouped.scatter(x, rows, powers), weights, ids, packed)

    def apply_quantized(
        self, q: Tensor, scale: Tensor, weights: Tensor, ids: Tensor, packed: Packed
    ) -> Tensor:
        """See QuantizedExperts."""
        packed.expect(FP8_EXPERTS)
        arrange = partial(grouped.scatter_codes, q, scale)
        return self._summed(arrange, weights, ids, packed)

    @abstractmethod
    def _summed(
        self, arrange: grouped.Arrange, weights: Tensor, ids: Tensor, packed: Packed
    ) -> Tensor:
        """The sums [tokens, hidden] of rows as `arrange` brings them into their order."""
