"""Dense weights for few tokens, as fast as they can be read in 12 bits.

csrc/packed12_linear.cu multiplies large ones, csrc/packed12_linear_few.cu others.

They lie in bfloat16 as DENSE_ROWS says, too, for kernels of more tokens.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.api import (
    DENSE_ROWS,
    Facts,
    Packed,
    Weight,
    float32_product,
    sums_in_float32,
    torch_dtype,
)
from ds_runtime_cuda import nvrtc
from ds_runtime_cuda.gates import ROWS
from ds_runtime_cuda.packed12.format import CodedDense, encode, readable

_SOURCE, _FEW_SOURCE, _PIN = "packed12_linear.cu", "packed12_linear_few.cu", "linear=triton"
MOST_FEW, _ON_CHIP_FEW = 8, 98_304  # tokens, bytes for each block
_HELD = "tiles of 12 bits"  # in Packed.tensors
_ON_CHIP = {1: 232_448, 2: 115_712}  # bytes for each block, by the blocks of a multiprocessor


@dataclass(frozen=True, slots=True)
class Tile:
    """Tokens that are multiplied together, tiles of weights that meet one read of them, and blocks
    of a multiprocessor."""

    tokens: int
    weights: int
    blocks: int


# By measurement on an H200, benchmarks/results/device_decode.md. Where units of two tiles leave
# multiprocessors idle in the end, those of one are faster, of 128 tokens torch.
_TILES = (Tile(8, 2, 1), Tile(16, 1, 2), Tile(32, 2, 1), Tile(64, 2, 1), Tile(128, 2, 1))
_UNEVEN = {8: Tile(8, 1, 2), 32: Tile(32, 1, 2), 64: Tile(64, 1, 2)}
_BUSY = 0.9


class _Packed12LinearArgs(ctypes.Structure):
    """Args of csrc/packed12_linear.cu."""

    _fields_ = (
        ("x", ctypes.c_uint64 * 16),
        ("tiles", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("back", ctypes.c_float),
        ("lift", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("tokens", "rows", "columns", "wide")),
        ("_end", ctypes.c_char * 24),  # the struct is a multiple of 64 bytes
    )


class _FewArgs(ctypes.Structure):
    """Args of csrc/packed12_linear_few.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tiles", "x", "out")),
        ("stride", ctypes.c_int64),
        ("back", ctypes.c_float),
        ("lift", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("tokens", "rows", "columns", "wide")),
    )


def _defines(tile: Tile) -> dict[str, int]:
    return {"TOKENS": tile.tokens, "TILES": tile.weights, "BLOCKS": tile.blocks,
            "BYTES": _ON_CHIP[tile.blocks], "ARGS": ctypes.sizeof(_Packed12LinearArgs)}  # fmt: skip


@cache
def _module(tile: Tile, device: torch.device) -> nvrtc.Module:
    """Of the current device, which `device` is."""
    return nvrtc.module(_SOURCE, _defines(tile), _PIN)


@cache
def _few_module(device: torch.device) -> nvrtc.Module:
    """Of the current device, which `device` is."""
    return nvrtc.module(_FEW_SOURCE, few_defines(), _PIN)


def few_defines() -> dict[str, int]:
    return {"ARGS": ctypes.sizeof(_FewArgs)}


def _few_bytes(tokens: int, columns: int) -> int:
    """On-chip memory of a block."""
    return tokens * (columns + 8) * 2


@cache
def _tile(tokens: int, rows: int, cores: int) -> Tile | None:
    """For a weight of so many rows; None where torch is faster."""
    tile = next((t for t in _TILES if tokens <= t.tokens), None)
    if tile is None or tile.weights == 1:
        return tile
    units = -(-rows // (tile.weights * ROWS))
    busy = units / (-(-units // cores) * cores)
    return tile if busy >= _BUSY else _UNEVEN.get(tile.tokens)


def compile_linear(facts: Facts, rows: Sequence[int]) -> None:
    """`Compiles.ahead` of LinearDense12."""
    cores = nvrtc.cores(torch.device("cuda", torch.cuda.current_device()))
    for tile in {_tile(count, facts.shape[0], cores) for count in rows if count}:
        if tile is not None:
            nvrtc.compile_for_device(_SOURCE, _defines(tile))


def compile_few(facts: Facts, rows: Sequence[int]) -> None:
    """`Compiles.ahead` of LinearFew12."""
    if any(0 < count <= MOST_FEW for count in rows):
        nvrtc.compile_for_device(_FEW_SOURCE, few_defines())


def multiply(x: Tensor, coded: CodedDense, out: Tensor, tile: Tile) -> None:
    """out [tokens, rows] = x · Wᵀ, bfloat16 or float32, for up to `tile.tokens`."""
    tokens, columns = x.shape
    x = readable(x)
    args = _Packed12LinearArgs()
    args.x[:] = nvrtc.box_map(
        x.data_ptr(), x.dtype, tokens, columns, tile.tokens, x.stride(0) if tokens > 1 else 0
    )
    args.tiles, args.out = coded.tiles.data_ptr(), out.data_ptr()
    args.back, args.lift = coded.back, coded.lift
    args.tokens, args.rows, args.columns = tokens, out.shape[1], columns
    args.wide = int(out.dtype == torch.float32)
    room, threads = _ON_CHIP[tile.blocks], 384 if tile.weights == 2 else 288
    grid = (nvrtc.cores(x.device) * tile.blocks, 1)
    nvrtc.launch(_module(tile, x.device).function("linear", room), grid, threads, room, args)


def multiply_few(x: Tensor, coded: CodedDense, out: Tensor) -> None:
    """The same for up to eight tokens."""
    tokens, columns = x.shape
    x = readable(x)
    rows, wide = out.shape[1], int(out.dtype == torch.float32)
    pointers = coded.tiles.data_ptr(), x.data_ptr(), out.data_ptr()
    args = _FewArgs(
        *pointers, x.stride(0), coded.back, coded.lift, tokens, rows, columns, wide
    )  # fmt: skip
    room = _few_bytes(tokens, columns)
    function = _few_module(x.device).function("few", _ON_CHIP_FEW)
    nvrtc.launch(function, (-(-rows // 16), 1), 256, room, args)


class _Dense12(ABC):
    """bfloat16 weights, read in 12 bits each where they can be held so and that is faster."""

    tag = DENSE_ROWS

    def __init__(self, facts: Facts) -> None:
        self.dtype = torch_dtype(facts.dtype)

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        values = weight.dequantise(self.dtype).contiguous()
        held = {"weight": values}
        return self.hold_second_form(Packed(self.tag, weight.shape, held, values.nbytes, _restore))

    def hold_second_form(self, packed: Packed) -> Packed:
        """See Footprint.second_form."""
        coded = encode(packed.tensors["weight"], _PIN)
        if coded is None:
            return packed
        tensors = {**packed.tensors, _HELD: coded}
        return replace(packed, tensors=tensors, nbytes=packed.nbytes + coded.tiles.nbytes)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        if not self.serves(x.shape[0], packed):
            return F.linear(x, packed.tensors["weight"])
        out = torch.empty(x.shape[0], packed.shape[0], dtype=x.dtype, device=x.device)
        self._multiply(x, packed.tensors[_HELD], out)
        return out

    def gives_float32(self, rows: int, packed: Packed) -> bool:
        """See Float32Linear."""
        weight: Tensor = packed.tensors["weight"]
        return self.serves(rows, packed) or sums_in_float32(weight.dtype, weight.device)

    def apply_float32(self, x: Tensor, packed: Packed, out: Tensor | None = None) -> Tensor:
        """See Float32Linear."""
        packed.expect(self.tag)
        if not self.serves(x.shape[0], packed):
            return float32_product(x, packed.tensors["weight"], out)
        if out is None:
            out = torch.empty(x.shape[0], packed.shape[0], dtype=torch.float32, device=x.device)
        self._multiply(x, packed.tensors[_HELD], out)
        return out

    @abstractmethod
    def serves(self, rows: int, packed: Packed) -> bool:
        """See Footprint.second_form."""

    @abstractmethod
    def _multiply(self, x: Tensor, coded: CodedDense, out: Tensor) -> None:
        """out = x · Wᵀ, for what it serves."""


class LinearDense12(_Dense12):
    """For large weights, such as a head."""

    def serves(self, rows: int, packed: Packed) -> bool:
        """See Footprint.second_form."""
        tile = self._tile(rows, packed.shape[0], packed.tensors["weight"].device)
        return tile is not None and _HELD in packed.tensors

    def _multiply(self, x: Tensor, coded: CodedDense, out: Tensor) -> None:
        tile = self._tile(x.shape[0], out.shape[1], x.device)
        assert tile is not None, "see serves"
        multiply(x, coded, out, tile)

    @staticmethod
    def _tile(tokens: int, rows: int, device: torch.device) -> Tile | None:
        return _tile(tokens, rows, nvrtc.cores(device)) if tokens else None


class LinearFew12(_Dense12):
    """For others, and up to eight tokens."""

    def serves(self, rows: int, packed: Packed) -> bool:
        """See Footprint.second_form."""
        fits = 0 < rows <= MOST_FEW and _few_bytes(rows, packed.shape[1]) <= _ON_CHIP_FEW
        return fits and _HELD in packed.tensors

    def _multiply(self, x: Tensor, coded: CodedDense, out: Tensor) -> None:
        multiply_few(x, coded, out)


def _restore(packed: Packed) -> Tensor:
    values: Tensor = packed.tensors["weight"]
    return values.to(torch.float32)
