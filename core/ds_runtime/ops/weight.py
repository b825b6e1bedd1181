"""Weights between checkpoint and kernel: `Weight` goes into `pack`, `Packed` comes out.

No file format in here: a `QuantLoader` has read the components, and the shard is already cut.
`dequantise` is the meaning of every weight format: references, conformance and kernels that convert
at pack time all use it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_runtime.errors import UnsupportedError
from ds_runtime.ops.contract import load_attr
from ds_runtime.ops.dtypes import E2M1, decode_scale, wide
from ds_runtime.ops.formats import BLOCKED

_SLAB_ELEMENTS = 1 << 22  # decoded at once, so that no second copy of a matrix is in float32
_FOUR_BIT_FLOATS = frozenset({"nvfp4", "mxfp4"})


@dataclass(frozen=True)
class WeightPart:
    """One checkpoint Linear, or this rank's shard of it, in one of the formats of docs/formats.md.

    * name: the Linear's path.
    * format: the weight format.
    * shape: (rows, cols) of the part.
    * tensors: component → tensor, all on one device, owned by the part. See below.
    * block: (rows, cols) covered by one scale, in numbers: (1, columns of the Linear) for a scale
      per row. None for "dense".
    * offset: position of the part's first element inside its first block, for shards that cut one.
    * dequantiser: lazy `(part, dtype) -> Tensor`, for formats of a plugin's own.

    Components:

    * "weight" [rows, cols]: the numbers ("dense"), or one code per element. Codes are e4m3, int8,
      or int4 in int8: −8 … 7, or 0 … 15 with "zero". E2m1 codes are 0 … 15 in uint8 (bit 3 the
      sign, then 0 ½ 1 1½ 2 3 4 6).
    * "scale": the rows and columns of the scale grid that cover the part, multiplied with codes.
      Any float dtype, or one byte (uint8, e8m0) that means 2^(byte − 127). Never NaN.
    * "zero": like "scale", int8: subtracted from the codes first. Integer formats only.
    * "global" [1] float32: multiplied with every scale. Only, and always, "nvfp4".
    * "group" [cols] int32: the column of the scale grid that each column belongs to. Only, and
      always, "int4_actorder", whose grid has all columns, however the part is cut.
    * "input_scale" [1] float32: the scale of activations that the checkpoint was calibrated for, x
      ≈ code · input_scale. A hint: a kernel may round activations otherwise, or not at all.
    """

    name: str
    format: str
    shape: tuple[int, int]
    tensors: Mapping[str, Tensor]
    block: tuple[int, int] | None = None
    offset: tuple[int, int] = (0, 0)
    dequantiser: str = ""

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the values that the part means, [rows, cols] in `dtype`, computed in fp32, or in
        float64 if that is asked.
        """
        return dequantise(self, dtype)


@dataclass(frozen=True)
class Weight:
    """A logical [out, in] matrix: `parts` of one format, concatenated along `out`."""

    parts: tuple[WeightPart, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return (sum(p.shape[0] for p in self.parts), self.parts[0].shape[1])

    @property
    def format(self) -> str:
        """The weight format of the parts."""
        return self.parts[0].format

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the values, [out, in] in `dtype`."""
        values = [p.dequantise(dtype) for p in self.parts]
        return values[0] if len(values) == 1 else torch.cat(values)

    def expect(self, formats: Collection[str], tag: str) -> None:
        """Raises TypeError if `formats`, which the kernel `tag` reads, lack this weight's."""
        if self.format not in formats:
            raise TypeError(f"{tag} reads {' and '.join(formats)}, not {self.format}")


@dataclass
class Packed:
    """A weight in the form that a kernel packed.

    * tag: kernel and packed form, such as "cpu.linear_prepacked", or the name of a shared packing.
    * shape: of the weight, (out, in), or (experts, width, hidden).
    * tensors: whatever the kernel needs.
    * nbytes: the bytes that it holds.
    * restore: `(packed) -> Tensor`, the logical values in float32, or None.
    """

    tag: str
    shape: tuple[int, ...]
    tensors: dict[str, Any]
    nbytes: int
    restore: Any = field(default=None, repr=False)

    def dequantise(self) -> Tensor:
        """Returns the logical values in float32: [out, in], or stacks [experts, out, in] if the
        contract says so. Raises TypeError without `restore`.
        """
        if self.restore is None:
            raise TypeError(f"{self.tag} cannot give its values back")
        return self.restore(self)  # type: ignore[no-any-return]

    def expect(self, *tags: str) -> None:
        """Raises TypeError if another kernel packed this: its tag is none of `tags`."""
        if self.tag not in tags:
            read = " or ".join(map(repr, tags))
            raise TypeError(f"packed as {self.tag!r}, but this kernel reads {read}")


@dataclass(frozen=True)
class MlaWeights:
    """The weights before attention in the latent space, of this rank's heads. Shapes are [out, in].

    * q_a: [q_lora, hidden]. q_b: [heads · (nope + rope), q_lora].
    * kv_a: [kv_lora + rope, hidden]. kv_b: [heads · (nope + v), kv_lora], as in MlaAbsorb.
    * q_norm: [q_lora] and kv_norm: [kv_lora], weights of the norms in the compute dtype.
    """

    q_a: Weight
    q_b: Weight
    kv_a: Weight
    kv_b: Weight
    q_norm: Tensor
    kv_norm: Tensor


class ExpertSource(Protocol):
    """Routed experts of one layer, read one by one, so that no second copy of all exists.

    num_experts: those of this rank, slots of shared experts included. hidden: H. intermediate: I,
    the width of this rank's part. format: the weight format of all.
    """

    num_experts: int
    hidden: int
    intermediate: int
    format: str

    def expert(self, index: int) -> tuple[Weight, Weight, Weight]:
        """Returns (gate [I, H], up [I, H], down [H, I]) of one expert. Call it once per expert, in
        order.
        """
        ...


def _decode_codes(part: WeightPart, dtype: torch.dtype, rows: slice) -> Tensor:
    """The codes of these rows as `dtype` numbers: [rows, cols]."""
    codes = part.tensors["weight"][rows]
    if part.format in _FOUR_BIT_FLOATS:
        table = torch.tensor((*E2M1, *(-v for v in E2M1)), dtype=dtype, device=codes.device)
        return table[codes.to(torch.int32)]
    return codes.to(dtype)


def scale_grid(part: WeightPart, dtype: torch.dtype) -> Tensor:
    """All that codes are multiplied with, per block: scales times the global one."""
    scale = decode_scale(part.tensors["scale"], dtype)
    whole = part.tensors.get("global")
    return scale if whole is None else scale * whole.to(dtype)


def _dequantise_block(part: WeightPart, dtype: torch.dtype) -> Tensor:
    """(code − zero) · scale, with one scale (and zero) per block."""
    weight, compute = part.tensors["weight"], wide(dtype)
    block, (row0, col0) = part.block, part.offset
    if block is None:
        raise UnsupportedError(f"{part.name}: format {part.format!r} needs a block size")
    rows, cols = part.shape
    scale = scale_grid(part, compute)
    zero, group = part.tensors.get("zero"), part.tensors.get("group")
    down, across = (
        -(-(n + o) // b) for n, o, b in zip(part.shape, part.offset, block, strict=True)
    )
    if group is not None:
        across = int(group.max()) + 1 if group.numel() else 0
    if scale.shape[0] < down or scale.shape[1] < across:
        raise UnsupportedError(
            f"{part.name}: scale grid {tuple(scale.shape)} does not cover {part.shape} with blocks "
            f"of {block} from offset {part.offset}; it must be at least {(down, across)}"
        )
    scale = _columns(scale, block[1], col0, cols, group)
    if zero is not None:
        zero = _columns(zero.to(compute), block[1], col0, cols, group)
    out = torch.empty(rows, cols, dtype=dtype, device=weight.device)
    step = max(1, _SLAB_ELEMENTS // max(1, cols))
    for r0 in range(0, rows, step):
        r1 = min(rows, r0 + step)
        first = (r0 + row0) // block[0]
        last = (r1 - 1 + row0) // block[0] + 1
        skip = r0 + row0 - first * block[0]
        inside = slice(skip, skip + r1 - r0)
        values = _decode_codes(part, compute, slice(r0, r1))
        if zero is not None:
            values = values - zero[first:last].repeat_interleave(block[0], dim=0)[inside]
        out[r0:r1] = values * scale[first:last].repeat_interleave(block[0], dim=0)[inside]
    return out


def _columns(
    grid: Tensor, width: int, start: int, count: int, group: Tensor | None = None
) -> Tensor:
    """[row blocks, column blocks] → [row blocks, count] columns, from column `start` on, or of
    the block that `group` names."""
    if group is not None:
        return grid[:, group.to(torch.int64)]
    if grid.shape[1] == 1:
        return grid.expand(-1, count)
    return grid.repeat_interleave(width, dim=1)[:, start : start + count]


def dequantise(part: WeightPart, dtype: torch.dtype = torch.float32) -> Tensor:
    """The logical [rows, cols] values of one part in `dtype`, a new or the stored tensor.

    Products are computed in float32, or in float64 when that is asked. A part with its own
    `dequantiser` ("module:attr") is decoded by that.
    """
    if part.dequantiser:
        values = load_attr(part.dequantiser)(part, dtype)
        assert isinstance(values, Tensor)
        return values
    if part.format == "dense":
        return part.tensors["weight"].to(dtype)
    if part.format in BLOCKED:
        return _dequantise_block(part, dtype)
    raise UnsupportedError(
        f"{part.name}: weight format {part.format!r} has no dequantiser; known are 'dense', "
        f"{', '.join(map(repr, BLOCKED))}; other formats name one in WeightPart.dequantiser"
    )
