"""Weights between checkpoint and kernel: `Weight` goes into `pack`, `Packed` comes out.

No file format in here: a `QuantLoader` has read the components, and the shard is already cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class WeightPart:
    """One checkpoint Linear, or this rank's shard of it.

    tensors: component name → tensor; "weight" is [rows, cols] (in the format's own encoding),
    "scale" the covering rows and columns of the scale grid. block: (rows, cols) covered by one
    scale; offset: position of this part's first element inside its first scale block, for
    shards that cut a block.
    """

    name: str
    format: str
    shape: tuple[int, int]
    tensors: Mapping[str, Tensor]
    block: tuple[int, int] | None = None
    offset: tuple[int, int] = (0, 0)
    dequantiser: str = ""

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The logical [rows, cols] values in `dtype`, computed in fp32 (float64 if asked)."""
        from ds_runtime.ops.reference.formats import dequantise_part

        return dequantise_part(self, dtype)


@dataclass(frozen=True)
class Weight:
    """A logical [out, in] matrix: one or several parts, concatenated along `out`."""

    parts: tuple[WeightPart, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return (sum(p.shape[0] for p in self.parts), self.parts[0].shape[1])

    @property
    def format(self) -> str:
        return self.parts[0].format

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[out, in] in `dtype`."""
        values = [p.dequantise(dtype) for p in self.parts]
        return values[0] if len(values) == 1 else torch.cat(values)


@dataclass
class Packed:
    """What a kernel made of a weight. `apply` refuses a Packed with another kernel's tag.

    tag: kernel and packed layout, e.g. "cpu.linear_prepacked". tensors: whatever the kernel
    needs. nbytes: bytes held. restore: gives the logical float32 values back.
    """

    tag: str
    shape: tuple[int, ...]
    tensors: dict[str, Any]
    nbytes: int
    restore: Any = field(default=None, repr=False)

    def dequantise(self) -> Tensor:
        """Logical values in float32: [out, in], or [experts, out, in] stacks where said."""
        if self.restore is None:
            raise TypeError(f"{self.tag} cannot give its values back")
        return self.restore(self)  # type: ignore[no-any-return]

    def expect(self, tag: str) -> None:
        """Raise if this was packed by another kernel."""
        if self.tag != tag:
            raise TypeError(f"packed as {self.tag!r}, but this kernel reads {tag!r}")


class ExpertSource(Protocol):
    """Routed experts of one layer, read one by one so that no second copy of them all exists."""

    num_experts: int
    hidden: int
    intermediate: int
    format: str

    def expert(self, index: int) -> tuple[Weight, Weight, Weight]:
        """(gate [I, H], up [I, H], down [H, I]) of one expert; call once per expert, in order."""
        ...
