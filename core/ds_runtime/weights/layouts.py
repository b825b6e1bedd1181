"""How codes lie in checkpoint files: what tensors there are, and any part of them as a WeightPart.

| layout | codes of a [out, in] Linear |
|---|---|
| rows | one by one, [out, in] |
| nibbles | two to a byte along the columns, the low one first: [out, in / 2] |
| words | eight, or four of 8 bits, to an int32 along the columns, the lowest bits first |
| awq | [in, out / 8], each int32 in the order of rows 0, 2, 4, 6, 1, 3, 5, 7 |
| gptq, gptq_v2 | eight rows of [in, out] to an int32; zero points less one, except in v2 |

Nothing outside this file and `packing.py`, which writes some of them, knows them. A part may cut
through groups, blocks, bytes and words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ds_runtime.checkpoint.gguf.blocks import BLOCKS
from ds_runtime.checkpoint.staging import shares_memory
from ds_runtime.errors import CheckpointError
from ds_runtime.ops.contract import Encoding
from ds_runtime.ops.dtypes import decode_scale
from ds_runtime.ops.formats import FORMATS
from ds_runtime.ops.weight import WeightPart

if TYPE_CHECKING:
    from ds_runtime.weights.place import PartRequest

FLOATS = ("BF16", "F16", "F32", "F64")
_SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
WHOLE_NUMBERS = ("I32", "I64")
_CODES = {"float8_e4m3fn": ("F8_E4M3",), "int8": ("I8",), "": FLOATS}
_PACK = 8  # codes in an int32
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where rows 0 … 7 of a word are


@dataclass(frozen=True, slots=True)
class Expected:
    """One tensor as it should be: any of these shapes and safetensors dtypes."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


def expected(encoding: Encoding, shape: tuple[int, ...]) -> Mapping[str, Expected] | None:
    """Component → what its tensor must be; None for a layout that only its loader knows."""
    if encoding.layout == "blocks":
        return {"weight": Expected((shape,), tuple(BLOCKS))}
    if encoding.layout not in LAYOUTS:
        return None
    if encoding.format == "dense":
        return {"weight": Expected((shape,), FLOATS)}
    rows, cols = shape
    grid = _grid(encoding, rows, cols)
    found = _packed(encoding, rows, cols, grid)
    one = Expected(((), (1,)), ("F32", "BF16", "F16"))
    found |= {
        "global": Expected(((), (1,)), ("F32",)),
        "input_scale": one,
        "group": Expected(((cols,),), WHOLE_NUMBERS),
        "shape": Expected(((2,),), WHOLE_NUMBERS),
    }
    return {component: found[component] for component in encoding.tensors}


def _packed(encoding: Encoding, rows: int, cols: int, grid: tuple[int, int]) -> dict[str, Expected]:
    """Codes, scales and zero points."""
    words, layout = ("I32",), encoding.layout
    if layout == "words":
        pack = _pack(encoding)
        return {
            "weight": Expected(((rows, -(-cols // pack)),), words),
            "scale": Expected((grid,), _SCALES[:3]),
            "zero": Expected(((-(-rows // pack), grid[1]),), words),
        }
    if layout in ("awq", *_GPTQ):
        packed = (cols, -(-rows // _PACK)) if layout == "awq" else (-(-cols // _PACK), rows)
        return {
            "weight": Expected((packed,), words),
            "scale": Expected((grid[::-1],), _SCALES[:3]),
            "zero": Expected(((grid[1], -(-rows // _PACK)),), words),
        }
    scales = {"nvfp4": ("F8_E4M3",), "mxfp4": ("U8", "F8_E8M0"), "mxfp8": ("U8", "F8_E8M0")}
    shapes: list[tuple[int, ...]] = [grid]
    if grid[1] == 1 and encoding.format.endswith("_channel"):
        shapes += [(rows,), (1,), ()]
    elif encoding.format == "fp8_tensor":
        shapes += [(1,), ()]
    scale = Expected(tuple(shapes), scales.get(encoding.format, _SCALES))
    if layout == "nibbles":
        return {"weight": Expected(((rows, -(-cols // 2)),), ("U8", "I8")), "scale": scale}
    codes = _CODES[FORMATS[encoding.format].codes]
    zero = Expected((grid,), ("I8",))
    return {"weight": Expected(((rows, cols),), codes), "scale": scale, "zero": zero}


def _pack(encoding: Encoding) -> int:
    """Codes in an int32 of the layout "words"."""
    return 32 // FORMATS[encoding.format].bits


def _block(encoding: Encoding, rows: int, cols: int) -> tuple[int, int]:
    """(rows, columns) of one scale."""
    height, width = encoding.block or FORMATS[encoding.format].block
    return height or max(1, rows), width or max(1, cols)


def _grid(encoding: Encoding, rows: int, cols: int) -> tuple[int, int]:
    height, width = _block(encoding, rows, cols)
    return -(-rows // height), -(-cols // width)


class _Part:
    """One request on its way: which rows and columns, and its tensors on the device."""

    def __init__(self, request: PartRequest) -> None:
        place = request.place
        self.request, self.encoding = request, request.encoding
        self.rows = request.matrix_rows
        self.cols = request.cols
        self.shape = request.shape
        self.block = _block(self.encoding, *place.shape)
        pairs = zip((self.rows, self.cols), self.block, strict=True)
        self.down, self.across = (_covering(part, block) for part, block in pairs)
        self.offset = (
            self.rows.start - self.down.start * self.block[0],
            self.cols.start - self.across.start * self.block[1],
        )

    def __contains__(self, component: str) -> bool:
        return component in self.request

    def name(self, component: str) -> str:
        return self.request.place.tensors[component]

    def at(self, component: str) -> str:
        """For an error: the file and the tensor."""
        return f"{self.request.entry(component).file}: {self.name(component)}"

    def read(
        self,
        component: str,
        rows: slice | None = None,
        cols: slice | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """These rows and columns of a stored tensor, by default on the request's device."""
        shape = self.request.entry(component).shape
        whole = cols is not None and (cols.start, cols.stop) == (0, shape[-1] if shape else 0)
        looks = component in ("weight", "zero")  # `check` and `scalar` look at the others
        return self.request.read(component, rows, None if whole else cols, device, looks)

    def here(self, component: str, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        """As `read`, in the host's memory: looking at it waits for nothing."""
        return self.read(component, rows, cols, "cpu")

    def sent(self, tensor: Tensor) -> Tensor:
        """The same on the request's device."""
        return self.request.checkpoint.sent(tensor, self.request.device)

    def scalar(self, component: str) -> Tensor:
        """A stored number as [1] float32; CheckpointError unless it is positive and finite."""
        value = self.here(component).to(torch.float32).reshape(1)
        nan = self.request.checkpoint.nan
        if float(value) <= 0 or not bool(nan.is_good(value).all()):
            raise CheckpointError(
                f"{self.at(component)}: is {float(value)}, expected a positive number; {nan.remedy}"
            )
        return self.sent(1 / value if self.encoding.divides else value)

    def scales(self) -> Tensor:
        """The covering part of the scale grid, from any shape that it may be stored in."""
        stored = self.request.entry("scale").shape
        if len(stored) - (self.request.place.index is not None) == 2:
            here = self.here("scale", self.down, self.across)
            self.check(here)
            alone = shares_memory(self.request.device)
            return here if alone else self.read("scale", self.down, self.across)
        if stored in ((), (1,)):  # one for all
            scale = self.here("scale").reshape(1, 1)
            rows = self.shape[0] if self.encoding.format.endswith("_channel") else 1
            return self.checked(scale.expand(rows, 1).contiguous())
        return self.checked(self.here("scale", self.down).reshape(-1, 1))

    def checked(self, scale: Tensor) -> Tensor:
        """A scale grid of the host's on the request's device; CheckpointError as from `check`."""
        self.check(scale)
        return self.sent(scale)

    def check(self, scale: Tensor) -> None:
        """CheckpointError if one of a scale grid of the host's is no number."""
        nan = self.request.checkpoint.nan
        good = nan.is_good(decode_scale(scale, torch.float32))
        if not bool(good.all()):
            row, col = (~good).nonzero()[0].tolist()
            said = scale[row, col]
            one_byte = said.dtype in (torch.uint8, torch.float8_e8m0fnu)
            value = int(said.view(torch.uint8)) if one_byte else float(said.to(torch.float32))
            means = " (no number)" if one_byte else ""
            raise CheckpointError(
                f"{self.at('scale')}: scale [{row}, {col}] of the part read is {value}{means}, "
                f"expected a finite number; {nan.remedy}"
            )

    def made(self, tensors: dict[str, Tensor]) -> WeightPart:
        """The part of these tensors and of the scalars beside them."""
        tensors |= {c: self.scalar(c) for c in ("global", "input_scale") if c in self}
        block, offset = self.block, self.offset
        height, width = self.encoding.block or FORMATS[self.encoding.format].block
        if not height:
            block, offset = (max(1, self.shape[0]), block[1]), (0, offset[1])
        if not width:
            block, offset = (block[0], max(1, self.shape[1])), (offset[0], 0)
        return WeightPart(
            self.request.module, self.encoding.format, self.shape, tensors, block, offset
        )


def _covering(part: slice, block: int) -> slice:
    """The blocks that hold [start, stop)."""
    first = part.start // block
    return slice(first, max(first, -(-part.stop // block)))


def _inside(part: slice, pack: int) -> slice:
    """Where [start, stop) lies in the unpacked codes of the words that cover it."""
    skip = part.start % pack
    return slice(skip, skip + part.stop - part.start)


def unpack(packed: Tensor) -> Tensor:
    """[n, m] of bytes or int32 → [n, 2m or 8m] uint8 nibbles, the lowest bits first."""
    rows, width = packed.shape[0], packed.shape[1] * packed.itemsize
    data = packed.reshape(-1).view(torch.uint8)
    return torch.stack((data & 15, data >> 4), dim=-1).view(rows, 2 * width)


def _numbers(part: _Part, packed: Tensor) -> Tensor:
    """[n, m] int32 → [n, 8m] codes 0 … 15, or [n, 4m] codes −128 … 127 of 8 bits."""
    if _pack(part.encoding) == _PACK:
        return unpack(packed).to(torch.int8)
    data = packed.reshape(-1).view(torch.uint8).view(packed.shape[0], 4 * packed.shape[1])
    return (data ^ 128).view(torch.int8)


def _signed(nibbles: Tensor) -> Tensor:
    """Two's complement of four bits."""
    return ((nibbles ^ 8).to(torch.int8) - 8).contiguous()


def _rows(part: _Part) -> WeightPart:
    weight = part.read("weight", part.rows, part.cols)
    if part.encoding.format == "dense":
        return WeightPart(part.request.module, "dense", part.shape, {"weight": weight})
    tensors = {"weight": weight, "scale": part.scales()}
    if "zero" in part:
        tensors["zero"] = part.read("zero", part.down, part.across)
    return part.made(tensors)


def _nibbles(part: _Part) -> WeightPart:
    codes = unpack(part.read("weight", part.rows, _covering(part.cols, 2)))
    codes = codes[:, _inside(part.cols, 2)]
    floats = FORMATS[part.encoding.format].codes == "uint8"
    weight = codes.contiguous() if floats else _signed(codes)
    return part.made({"weight": weight, "scale": part.scales()})


def _words(part: _Part) -> WeightPart:
    if "shape" in part:
        stored, wanted = part.here("shape").tolist(), list(part.request.place.shape)
        if stored != wanted:
            raise CheckpointError(
                f"{part.name('shape')}: says {stored}, {wanted} expected from config.json"
            )
    pack = _pack(part.encoding)
    codes = _numbers(part, part.read("weight", part.rows, _covering(part.cols, pack)))
    codes = codes[:, _inside(part.cols, pack)]
    across = _columns(part)
    tensors = {"scale": part.checked(part.here("scale", part.rows, across))}
    if "zero" in part:
        zero = _numbers(part, part.read("zero", _covering(part.rows, pack), across).T)
        tensors["zero"] = zero.T[_inside(part.rows, pack)].contiguous()
    elif pack == _PACK:
        codes = codes - 8
    return part.made({"weight": codes.contiguous(), **tensors, **_group(part)})


def _awq(part: _Part) -> WeightPart:
    rows, inside = _covering(part.rows, _PACK), _inside(part.rows, _PACK)
    order = torch.tensor(_AWQ_ORDER, device=part.request.device)

    def codes(component: str, lines: slice) -> Tensor:
        nibbles = unpack(part.read(component, lines, rows))
        ordered = nibbles.view(nibbles.shape[0], -1, _PACK)[:, :, order]
        return ordered.reshape(nibbles.shape[0], -1)[:, inside].T.to(torch.int8).contiguous()

    scale = part.here("scale", part.across, part.rows).T.contiguous()
    weight, zero = codes("weight", part.cols), codes("zero", part.across)
    return part.made({"weight": weight, "scale": part.checked(scale), "zero": zero})


def _gptq(part: _Part) -> WeightPart:
    nibbles = unpack(part.read("weight", _covering(part.cols, _PACK), part.rows).T)
    weight = nibbles[:, _inside(part.cols, _PACK)].to(torch.int8).contiguous()
    _check_order(part)
    across = _columns(part)
    zero = unpack(part.read("zero", across, _covering(part.rows, _PACK)))
    less = 0 if part.encoding.layout == "gptq_v2" else 1
    zeros = zero[:, _inside(part.rows, _PACK)].T.to(torch.int8).contiguous() + less
    scale = part.checked(part.here("scale", across, part.rows).T.contiguous())
    return part.made({"weight": weight, "scale": scale, "zero": zeros, **_group(part)})


def _columns(part: _Part) -> slice:
    """Columns of the scale grid: those that cover the part, or all where columns name theirs."""
    if "group" not in part:
        return part.across
    return slice(0, _grid(part.encoding, *part.request.place.shape)[1])


def _check_order(part: _Part) -> None:
    """CheckpointError if columns name their groups, not in order, and the config denies it."""
    request = part.request
    name = f"{request.module}.g_idx"
    if "g_idx" not in part.encoding.unread or name not in request.checkpoint:
        return
    group = request.checkpoint.read(name).reshape(-1)
    other = group != torch.arange(group.shape[0]) // part.block[1]
    if bool(other.any()):
        column = int(other.nonzero()[0])
        raise CheckpointError(
            f"{name}: column {column} is of group {int(group[column])}, expected "
            f"{column // part.block[1]} as desc_act is false in config.json"
        )


def _group(part: _Part) -> dict[str, Tensor]:
    """The group that each column names; CheckpointError if there is none of that number."""
    if "group" not in part:
        return {}
    group = part.here("group", part.cols)
    groups = _grid(part.encoding, *part.request.place.shape)[1]
    if group.numel() and not 0 <= int(group.min()) <= int(group.max()) < groups:
        raise CheckpointError(
            f"{part.name('group')}: names groups {int(group.min())} to {int(group.max())}, "
            f"expected 0 to {groups - 1}"
        )
    part.offset = (part.offset[0], 0)
    return {"group": part.sent(group.to(torch.int32))}


_GPTQ = ("gptq", "gptq_v2")
LAYOUTS: Mapping[str, Callable[[_Part], WeightPart]] = {
    "rows": _rows,
    "nibbles": _nibbles,
    "words": _words,
    "awq": _awq,
    "gptq": _gptq,
    "gptq_v2": _gptq,
}


def read_layout(request: PartRequest) -> WeightPart:
    """The rows and columns of the request, in the canonical form of its format."""
    return LAYOUTS[request.encoding.layout](_Part(request))
