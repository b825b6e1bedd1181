"""Weights between checkpoint and kernel: `Weight` goes into `pack`, `Packed` comes out.

No file format in here: a `QuantLoader` has read the components, and the shard is already cut.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class WeightPart:
    """One checkpoint Linear, or this rank's shard of it, in a format of `ops/formats.py`.

    tensors: component → tensor, all on one device, owned by the part:

    * "weight" [rows, cols]: the numbers ("dense"), or a code per element in the format's dtype,
      nothing packed: e4m3; int8; int4 codes in int8, −8 … 7, or 0 … 15 beside "zero"; e2m1 codes
      0 … 15 in uint8 (bit 3 the sign, then 0 ½ 1 1½ 2 3 4 6).
    * "scale": the rows and columns of the scale grid that cover the part, multiplied with codes.
      Any float dtype, or one byte (uint8, e8m0) that means 2^(byte − 127). Never NaN.
    * "zero": like "scale", int8: subtracted from the codes first. Integer formats only.
    * "global" [1] float32: multiplied with every scale. Only, and always, "nvfp4".
    * "group" [cols] int32: the column of the scale grid that each column belongs to. Only, and
      always, "int4_actorder", whose grid then has all columns, however the part is cut.
    * "input_scale" [1] float32: the scale of activations that the checkpoint was calibrated for:
      x ≈ code · input_scale. A hint: a kernel may round activations more finely, or not at all.

    block: (rows, cols) covered by one scale; offset: position of this part's first element
    inside its first scale block, for shards that cut a block. dequantiser: "module:attr" of a
    function (part, dtype) → values, for formats of a plugin's own.
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

    def expect(self, formats: Collection[str], tag: str) -> None:
        """Raise TypeError if the kernel `tag` does not read this format."""
        if self.format not in formats:
            raise TypeError(f"{tag} reads {' and '.join(formats)}, not {self.format}")


@dataclass
class Packed:
    """What a kernel made of a weight. `apply` refuses a Packed with another kernel's tag.

    tag: kernel and packed layout, e.g. "cpu.linear_prepacked", or the name of a shared packing.
    tensors: whatever the kernel needs. nbytes: bytes held. restore: gives the logical float32
    values back.
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

    def expect(self, *tags: str) -> None:
        """Raise if this was packed by another kernel."""
        if self.tag not in tags:
            read = " or ".join(map(repr, tags))
            raise TypeError(f"packed as {self.tag!r}, but this kernel reads {read}")


@dataclass(frozen=True)
class MlaWeights:
    """What stands before attention in the latent space; this rank's heads. Norm weights are in the
    compute dtype.

    q_a [q_lora, hidden], q_b [heads · (nope + rope), q_lora], kv_a [kv_lora + rope, hidden], kv_b
    [heads · (nope + v), kv_lora] as in MlaAbsorb; q_norm [q_lora], kv_norm [kv_lora].
    """

    q_a: Weight
    q_b: Weight
    kv_a: Weight
    kv_b: Weight
    q_norm: Tensor
    kv_norm: Tensor


class ExpertSource(Protocol):
    """Routed experts of one layer, read one by one so that no second copy of them all exists."""

    num_experts: int
    hidden: int
    intermediate: int
    format: str

    def expert(self, index: int) -> tuple[Weight, Weight, Weight]:
        """(gate [I, H], up [I, H], down [H, I]) of one expert; call once per expert, in order."""
        ...
