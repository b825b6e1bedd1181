"""zentorch's fused experts, where that library is installed: AMD's kernels behind one torch op.

Only its binary is loaded: importing the package also registers passes of torch.compile, which take
seconds and packages of their own. What the binary asks for (seen with 2.13.0.2): weights that
nobody else reads, because bfloat16 is reordered in place at the first call. Weights that stay where
they are, because it knows them by address. And a result of zeros to add to. No tokens are an error.
"""

from __future__ import annotations

import weakref
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_runtime.api import ExpertSource, Facts, Packed, UnsupportedError, Weight


@cache
def library() -> Any:
    """Its torch ops."""
    spec = find_spec("zentorch")
    if spec is None or spec.origin is None:
        raise UnsupportedError("zentorch: is not installed")
    path = Path(spec.origin).parent / "libzentorch.so"
    try:
        load: Any = torch.ops.load_library  # has no types
        load(str(path))
    except OSError as e:
        raise UnsupportedError(f"zentorch: {path} cannot be loaded: {e}") from e
    return torch.ops.zentorch


class _Kept:
    """Weights of every layer, until none is in use: another at an address that it knows is not
    told apart from the first, and forgetting all would lose what was reordered in place."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._layers = 0

    def keep(self, packed: Packed) -> None:
        self.tensors += packed.tensors.values()
        self._layers += 1
        weakref.finalize(packed, self._drop).atexit = False

    def _drop(self) -> None:
        self._layers -= 1
        if not self._layers:
            library().zentorch_flush_moe_weight_cache()
            library().zentorch_clear_weight_cache()
            self.tensors.clear()


kept = _Kept()


class ExpertsZen:
    """w13 [experts, 2 · inter, hidden] and w2 [experts, hidden, inter], in bfloat16 or in int8 with
    a scale for every row; activations are then rounded to int8 by token."""

    tag = "cpu.experts_zentorch"

    def __init__(self, facts: Facts) -> None:
        self._library = library()

    def pack(self, source: ExpertSource, facts: Facts) -> Packed:
        count, hidden, inter = source.num_experts, source.hidden, source.intermediate
        integers = source.format == "int8_channel"
        dtype = torch.int8 if integers else torch.bfloat16
        w13 = torch.empty(count, 2 * inter, hidden, dtype=dtype)
        w2 = torch.empty(count, hidden, inter, dtype=dtype)
        tensors = {"w13": w13, "w2": w2}
        if integers:
            tensors |= {"s13": torch.empty(count, 2 * inter), "s2": torch.empty(count, hidden)}
        for e in range(count):
            gate, up, down = source.expert(e)
            for name, rows, weight in (
                ("13", slice(0, inter), gate),
                ("13", slice(inter, 2 * inter), up),
                ("2", slice(0, hidden), down),
            ):
                if integers:
                    values, scales = _codes(weight)
                    tensors["s" + name][e, rows] = scales
                else:
                    values = weight.dequantise(dtype)
                tensors["w" + name][e, rows] = values
        nbytes = sum(t.nbytes for t in tensors.values())
        packed = Packed(self.tag, (count, hidden, inter), dict(tensors), nbytes)
        kept.keep(packed)
        return packed

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        out = torch.zeros(x.shape, dtype=x.dtype)
        if x.shape[0]:
            t = packed.tensors
            self._library.zentorch_fused_moe(
                out,
                x.contiguous(),
                t["w13"],
                t["w2"],
                None,
                None,
                weights.contiguous(),
                ids.contiguous(),
                False,
                "silu",
                t.get("s13"),
                t.get("s2"),
            )
        return out


def _codes(weight: Weight) -> tuple[Tensor, Tensor]:
    """int8 [rows, cols] and float32 [rows]."""
    tensors = [part.tensors for part in weight.parts]
    scales = [t["scale"].to(torch.float32).reshape(-1) for t in tensors]
    return torch.cat([t["weight"] for t in tensors]), torch.cat(scales)


# The names that the plan shows.
experts_zentorch = experts_zentorch_int8 = ExpertsZen
