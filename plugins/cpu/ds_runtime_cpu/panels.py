"""Weights in panels, the layout of the native matmuls (csrc/gemm.h), made once at load.

`Form` says how the values are held: in the compute dtype, or as the codes of the checkpoint's own
format with its scales. int8 and int4 weights meet activations that are rounded to 8 bits. bfloat16
takes 12 bits a weight, without loss, where that streams faster and all panels fit (`Stack`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor

from ds_runtime.api import Weight, WeightPart, decode_scale
from ds_runtime_cpu.native import calls, library
from ds_runtime_cpu.small import CODE, in_rows

COLUMNS = 64  # of a panel
_DENSE, _FP8, _INT8, _INT4, _INT4_ZEROS, _BF12, _FP4 = range(7)  # DsFormat
_CODES = {
    "fp8_block": torch.float8_e4m3fn,
    "int8_channel": torch.int8,
    "int4_group": torch.int8,
    "mxfp4": torch.uint8,
}
# Elements of k that share a scale, best first: a block of work holds whole groups, and a group
# whole steps of the matrix units.
_GROUPS = {
    "fp8_block": (128, 64, 32),
    "int4_group": tuple(range(256, 0, -32)),
    "mxfp4": (32,),
}
_KINDS = {"fp8_block": _FP8, "mxfp4": _FP4}  # that need no more than a group
_MOST_K8 = 65536  # up to here int32 sums of 8-bit products do not overflow


@dataclass(frozen=True, slots=True)
class Form:
    """A kind of panel. code: of the format in C; dtype: of computing; group: elements per scale."""

    code: int
    dtype: torch.dtype
    group: int = 0

    def nbytes(self, n: int, k: int, width: int = COLUMNS) -> int:
        """Bytes of a packed [n, k] matrix, `width` rows of it to a panel."""
        of_panel = library().panel_bytes(self.code, CODE[self.dtype], k, self.group)
        return -(-n // width) * of_panel

    def empty(self, count: int, n: int, k: int, width: int = COLUMNS) -> Tensor:
        """Room for `count` packed [n, k] matrices, one after the other: uint8 [count, bytes]."""
        out = torch.empty(count, self.nbytes(n, k, width), dtype=torch.uint8)
        calls().large_pages(out.data_ptr(), out.nbytes)
        return out

    def pack(
        self,
        panels: Tensor,
        values: Tensor,
        scales: Tensor | None = None,
        first: int = 0,
        of: int | None = None,
        zeros: Tensor | None = None,
        half: int = -1,
    ) -> None:
        """Fill rows [first, first + rows) of one packed matrix of `of` rows.

        values [rows, k] with any strides, in `dtype` or as codes; scales and zeros [rows, groups]
        float32. half: 0 or 1 for two matrices that share panels, 32 rows of each in turn.
        """
        rows, k = values.shape
        of = rows if of is None else of
        width = COLUMNS if half < 0 else COLUMNS // 2
        assert panels.nbytes == self.nbytes(of, k, width) and panels.is_contiguous()
        assert self.code != _BF12, "packed as dense first"
        assert self.code == _DENSE or values.dtype.itemsize == 1
        assert self.code != _DENSE or values.dtype == self.dtype
        grids = [None if g is None else g.contiguous() for g in (scales, zeros)]
        groups = -(-k // self.group) if self.group else 1
        for grid in grids:
            assert grid is None or (grid.dtype, grid.shape) == (torch.float32, (rows, groups))
        calls().pack(
            self.code,
            CODE[self.dtype],
            values.data_ptr(),
            values.stride(0),
            values.stride(1),
            *(0 if grid is None else grid.data_ptr() for grid in grids),
            groups,
            panels.data_ptr(),
            first,
            rows,
            of,
            k,
            self.group,
            half,
        )

    def pack_part(
        self, panels: Tensor, part: WeightPart, first: int = 0, of: int = 0, half: int = -1
    ) -> None:
        """Fill the rows of one part, from row `first` of `of` (or all that the part has) on."""
        of = of or part.shape[0]
        if self.code == _DENSE:
            self.pack(panels, part.dequantise(self.dtype), None, first, of, None, half)
            return
        rows, k = part.shape
        at = torch.arange(rows), torch.arange(0, k, self.group or k)
        zeros = grid(part, *at, "zero") if "zero" in part.tensors else None
        codes = part.tensors["weight"]
        self.pack(panels, codes, grid(part, *at), first, of, zeros, half)

    def unpack(self, panels: Tensor, n: int, k: int) -> Tensor:
        """The float32 [n, k] values of one packed matrix, new."""
        out = torch.empty(n, k)
        calls().unpack(
            self.code, CODE[self.dtype], panels.data_ptr(), out.data_ptr(), n, k, self.group
        )
        return out

    def unpack_halves(self, panels: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
        """The values of two packed [n, k] matrices that share panels."""
        half = COLUMNS // 2
        count = -(-n // half)
        both = self.unpack(panels, count * COLUMNS, k).view(count, 2, half, k)
        return both[:, 0].reshape(-1, k)[:n], both[:, 1].reshape(-1, k)[:n]


def dense(dtype: torch.dtype) -> Form:
    """Values in the compute dtype."""
    return Form(_DENSE, dtype)


class Stack:
    """Packed matrices [n, k], filled one after the other: `room`, `form.pack` into it, `close`.

    bfloat16 is narrowed to 12 bits a weight when a matrix is closed. The first one with a panel of
    too many different exponents widens those before it, and all stay in 16.
    """

    def __init__(self, form: Form, count: int, n: int, k: int, width: int = COLUMNS) -> None:
        """form: how matrices are filled. `width` rows to a panel, as in `Form.nbytes`."""
        self._filled = 0
        self._wide, self._count = form, count
        self._rows, self._k = -(-n // width) * COLUMNS, k  # of panels, whoever shares them
        narrows = form == dense(torch.bfloat16) and library().narrows
        self.form = Form(_BF12, form.dtype) if narrows else form
        self.panels = self.form.empty(count, self._rows, k)
        self._one = form.empty(1, self._rows, k)[0] if narrows else None

    def room(self) -> Tensor:
        """Where the next matrix goes."""
        return self.panels[self._filled] if self._one is None else self._one

    def close(self) -> None:
        """The matrix in `room` is complete."""
        one = self._one
        if one is not None and not narrow(one, self.panels[self._filled], self._rows, self._k):
            self.widen()
            self.panels[self._filled].copy_(one)
        self._filled += 1
        if self._filled == self._count:
            self._one = None

    def widen(self) -> None:
        """Hold all matrices as they are filled."""
        if self.form == self._wide:
            return
        form, before = self.form, self.panels
        self.form, self._one = self._wide, None
        self.panels = self.form.empty(self._count, self._rows, self._k)
        for i in range(self._filled):
            bits = form.unpack(before[i], self._rows, self._k).view(torch.int32) >> 16
            self.form.pack(self.panels[i], bits.to(torch.int16).view(torch.bfloat16))


def narrow(wide: Tensor, panels: Tensor, n: int, k: int) -> bool:
    """Whether a packed bfloat16 [n, k] fits 12 bits a weight; then `panels` holds it so."""
    left = torch.empty(1, dtype=torch.int64)
    count = -(-n // COLUMNS)
    assert wide.nbytes == dense(torch.bfloat16).nbytes(n, k)
    assert panels.nbytes == Form(_BF12, torch.bfloat16).nbytes(n, k)
    calls().narrow(wide.data_ptr(), panels.data_ptr(), count, k, left.data_ptr())
    return not left.item()


def fp8(parts: Iterable[WeightPart], dtype: torch.dtype, *along: int) -> Form | None:
    """fp8 codes as they are, or None where a shard cuts scale blocks too finely.

    Every number in `along` is a distance in the direction of k at which blocks must end.
    """
    return _own(tuple(parts), dtype, "fp8_block", gcd(*along))


def form_of(parts: Iterable[WeightPart], dtype: torch.dtype) -> Form:
    """How these parts, with the same columns, are held: in their own format if panels have it."""
    parts = tuple(parts)
    along = gcd(*(d for p in parts if p.block for d in (p.block[1], p.offset[1])))
    return _own(parts, dtype, parts[0].format, along) or dense(dtype)


def forms_of(groups: Iterable[Iterable[WeightPart]], dtype: torch.dtype) -> tuple[Form, ...]:
    """How groups of parts are held that one kernel reads: all in one format, or all dense. int4
    with zero points is one with int4 without, whose zero points are 0.
    """
    found = tuple(form_of(parts, dtype) for parts in groups)
    codes = {form.code for form in found}
    if codes == {_INT4, _INT4_ZEROS}:
        return tuple(replace(form, code=_INT4_ZEROS) for form in found)
    return found if len(codes) == 1 else (dense(dtype),) * len(found)


def _own(parts: tuple[WeightPart, ...], dtype: torch.dtype, name: str, along: int) -> Form | None:
    """The parts' format `name` if panels can have it; scales change at multiples of `along`."""
    if any(p.format != name or p.block is None or p.dequantiser for p in parts):
        return None
    if name not in _CODES or any(p.tensors["weight"].dtype != _CODES[name] for p in parts):
        return None
    if name == "mxfp4" and not all(map(_powers, parts)):
        return None
    if name not in _KINDS and any(p.shape[1] > _MOST_K8 for p in parts):
        return None
    if name == "int8_channel":
        whole = all(p.block is not None and sum(_columns(p)) <= p.block[1] for p in parts)
        return Form(_INT8, dtype) if whole else None
    group = next((g for g in _GROUPS[name] if along % g == 0), 0)
    if not group:
        return None
    zeros = any("zero" in p.tensors for p in parts)
    return Form(_KINDS.get(name, _INT4_ZEROS if zeros else _INT4), dtype, group)


def _powers(part: WeightPart) -> bool:
    """Whether all scales are powers of two that a byte (e8m0) holds."""
    scale = part.tensors["scale"]
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return True
    mantissa, exponent = torch.frexp(scale.to(torch.float32))
    return bool(((mantissa == 0.5) & (exponent > -126)).all())


def _columns(part: WeightPart) -> tuple[int, int]:
    return part.offset[1], part.shape[1]


def grid(part: WeightPart, rows: Tensor, cols: Tensor, name: str = "scale") -> Tensor:
    """[rows, cols] float32: scales (or zero points) of the elements at these indices of a part."""
    assert part.block is not None
    (height, width), (row0, col0) = part.block, part.offset
    values = decode_scale(part.tensors[name], torch.float32)
    return values[(rows + row0) // height][:, (cols + col0) // width]


def pack_weight(weight: Weight, dtype: torch.dtype) -> tuple[Form, Tensor]:
    """A whole weight: (form, packed uint8 [bytes])."""
    n, k = weight.shape
    form = form_of(weight.parts, dtype)
    stack, first = Stack(form, 1, n, k), 0
    for part in weight.parts:
        form.pack_part(stack.room(), part, first, n)
        first += part.shape[0]
    stack.close()
    return stack.form, stack.panels[0]


class Matmul:
    """y = x · Wᵀ by the native kernels, for one packed weight or one per head. One C call.

    What does not change from call to call is settled when it is made.
    """

    def __init__(
        self, form: Form, panels: Tensor, n: int, k: int, heads: int = 1, rest: int = 0
    ) -> None:
        """panels: uint8, `heads` packed [n, k] matrices. rest: columns that `per_head` leaves
        behind those of a head, for its caller to fill."""
        assert panels.is_contiguous() and panels.nbytes == heads * form.nbytes(n, k)
        self._panels = panels  # alive as long as the call has its address
        self._n, self._k, self._heads, self._dtype = n + rest, k, heads, form.dtype
        row = heads * (n + rest)
        settled = (panels.data_ptr(), form.group, None, row, n + rest, heads, None, n, k)
        kinds = (form.code, CODE[form.dtype])
        self._call = calls().bound("linear", *kinds, None, None, None, *settled)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, k], the same for all heads → [T, heads · n], new."""
        x = in_rows(x)
        tokens, k = x.shape
        assert k == self._k and x.dtype == self._dtype, (x.shape, x.dtype, self._k)
        out = x.new_empty(tokens, self._heads * self._n)
        self._call(x.data_ptr(), x.stride()[0], 0, out.data_ptr(), tokens)
        return out

    def per_head(self, x: Tensor) -> Tensor:
        """x [T, heads, k] → [T, heads, n + rest], new and contiguous."""
        x = in_rows(x)
        tokens, heads, k = x.shape
        by_row, by_head, _ = x.stride()
        assert (heads, k, x.dtype) == (self._heads, self._k, self._dtype), (x.shape, x.dtype)
        out = x.new_empty(tokens, heads, self._n)
        self._call(x.data_ptr(), by_row, by_head, out.data_ptr(), tokens)
        return out
