"""Weights as the kernels of jit/coded.py read them: codes packed in words, scales next to them.

A word holds one code of each plane, and a plane is WIDTH neighbouring columns, so that unpacking
moves nothing. Scales that are bytes at rest stay bytes: relative to one number per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.api import Weight, WeightPart, decode_scale
from ds_runtime_triton.launch import cdiv

INT4, E2M1, E4M3, INT8 = 0, 1, 2, 3  # CODES of jit/coded.py
CODES = {
    "int4_group": INT4,
    "w4afp8": INT4,
    "int8_group": INT8,
    "mxfp4": E2M1,
    "nvfp4": E2M1,
    "mxfp8": E4M3,
    "fp8_channel": E4M3,
    "fp8_tensor": E4M3,
}
_SPAN = 128  # columns, at most
_POWERS, _E4M3_SCALES = 7, 4  # SHIFT: how a scale's byte becomes bits of bfloat16
_SYMMETRIC = 8  # zero point of int4 codes without one, when stored as 0 … 15


@dataclass(frozen=True)
class Form:
    """How a weight lies in words; the compile-time part of a launch, and `lead` and `spans`.

    lead: columns of nothing before the first, for a shard that begins inside a group. group:
    columns that share a scale, 0 if all do. shift: 0 for scales that are numbers.
    """

    codes: int
    planes: int
    width: int
    scales: int
    group: int
    shift: int
    asym: bool
    cols: int
    lead: int

    @property
    def bits(self) -> int:
        return 8 if self.codes in (E4M3, INT8) else 4

    @property
    def span(self) -> int:
        return self.planes * self.width

    @property
    def spans(self) -> int:
        return cdiv(self.lead + self.cols, self.span)

    @property
    def spans_per_scale(self) -> int:
        return max(1, self.group // self.span) if self.group else self.spans

    @property
    def groups(self) -> int:
        """Rows of the scale grid that is kept: scales as numbers."""
        if self.scales == 0:
            return 1
        return cdiv(self.spans, self.spans_per_scale) * self.scales

    @property
    def by_row(self) -> bool:
        return self.scales == 0 or self.shift > 0

    @property
    def word(self) -> torch.dtype:
        return torch.int16 if self.bits * self.planes == 16 else torch.uint8

    def launch(self) -> dict[str, int | bool]:
        """Compile-time arguments."""
        return {
            "CODES": self.codes,
            "PLANES": self.planes,
            "WIDTH": self.width,
            "SCALES": self.scales,
            "SPANS_PER_SCALE": self.spans_per_scale,
            "SHIFT": self.shift,
            "ASYM": self.asym,
            "ROWS": self.by_row,
            "EVEN": self.lead == 0 and self.cols % self.span == 0,
        }


@dataclass(frozen=True)
class Coded:
    """words [spans, rows, width]: what a tile reads lies together; scale [groups, rows], of bytes a
    word per span [spans, rows]; zero [groups, rows] int8; row_scale [rows] float32. What a form has
    not is one element."""

    form: Form
    words: Tensor
    scale: Tensor
    zero: Tensor
    row_scale: Tensor

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.words, self.scale, self.zero, self.row_scale))


def _grouping(weight: Weight) -> tuple[int, int] | None:
    """(columns that share a scale in every part, the phase of the first column); (0, 0): all do.
    The group is a power of two. None if parts are of no known kind."""
    blocks = [p.block for p in weight.parts]
    if any(p.format not in CODES or p.dequantiser for p in weight.parts) or None in blocks:
        return None
    widths = [b[1] for b in blocks if b is not None]
    phases = [p.offset[1] for p in weight.parts]
    cols = weight.shape[1]
    if all(phase % w + cols <= w for w, phase in zip(widths, phases, strict=True)):
        return 0, 0
    group = gcd(*widths)
    if len({phase % group for phase in phases}) > 1:
        group = gcd(group, *phases)
    group &= -group
    return group, phases[0] % group


def _shift(weight: Weight) -> int:
    """How scales may stay bytes: all are powers of two, or e4m3 numbers."""
    kinds = {p.tensors["scale"].dtype for p in weight.parts}
    if kinds <= {torch.uint8, torch.float8_e8m0fnu}:
        return _POWERS
    return _E4M3_SCALES if kinds == {torch.float8_e4m3fn} else 0


def form_of(weight: Weight, bytes_for_fp8: bool = False) -> Form | None:
    """How this weight is kept, or None if a cut leaves groups that no kernel takes.

    bytes_for_fp8: int4 codes in words of 8 bits, as the product with FP8 tokens wants them.
    """
    found, formats = _grouping(weight), {p.format for p in weight.parts}
    kinds = {CODES[f] for f in formats if f in CODES}
    if found is None or len(kinds) != 1:
        return None
    (codes,), (group, lead) = kinds, found
    asym = any("zero" in p.tensors for p in weight.parts)
    planes = 2 if codes in (E4M3, INT8) or bytes_for_fp8 else 4
    least = 32 if bytes_for_fp8 else 16
    if bytes_for_fp8 and (codes != INT4 or asym or lead or not group):
        return None
    scales, width, shift = 1, _SPAN // planes, 0
    if not group:
        scales = 1 if codes in (INT4, INT8) else 0
    elif group >= 64:
        width = min(group, _SPAN) // planes
    elif group >= least:
        scales, width, shift = planes, group, _shift(weight)
    else:
        return None
    return Form(codes, planes, width, scales, group, shift, asym, weight.shape[1], lead)


def _bits_of(part: WeightPart) -> Tensor:
    """Codes as the bits that are stored, uint8 [rows, cols]."""
    codes = part.tensors["weight"]
    if CODES[part.format] == INT4:
        unsigned = codes if "zero" in part.tensors else codes + _SYMMETRIC
        return unsigned.to(torch.uint8)
    return codes.view(torch.uint8)


def _grid(part: WeightPart, name: str, form: Form) -> Tensor:
    """A part's scales or zeros, one row per row of the part and one column per group of columns:
    [rows, groups]."""
    assert part.block is not None
    (height, width), (up, left) = part.block, part.offset
    grid = part.tensors[name]
    bytes_kind = grid.dtype if grid.element_size() == 1 else None
    grid = grid.view(torch.uint8) if bytes_kind is not None else grid
    grid = grid.repeat_interleave(height, 0)[up : up + part.shape[0]]
    if form.group:
        first = left // form.group
        count = cdiv(form.lead + form.cols, form.group)
        grid = grid.repeat_interleave(max(1, width // form.group), 1)[:, first : first + count]
    else:
        grid = grid[:, left // width :][:, :1]
    return grid.contiguous().view(bytes_kind) if bytes_kind is not None else grid


def _padded(grid: Tensor, count: int, value: float) -> Tensor:
    return F.pad(grid, (0, count - grid.shape[1]), value=value)


def _packed(bits: Tensor, form: Form) -> Tensor:
    """uint8 codes [rows, cols] as words [spans, rows, width]."""
    rows = bits.shape[0]
    whole = F.pad(bits, (form.lead, form.spans * form.span - form.lead - form.cols))
    planes = whole.view(rows, form.spans, form.planes, form.width).to(torch.int32)
    words = torch.zeros(rows, form.spans, form.width, dtype=torch.int32, device=bits.device)
    for plane in range(form.planes):
        words |= planes[:, :, plane] << (form.bits * plane)
    return words.to(form.word).transpose(0, 1).contiguous()


def unpacked(words: Tensor, form: Form) -> Tensor:
    """The inverse: codes in int32 [rows, cols]."""
    wide = words.to(torch.int32).transpose(0, 1).unsqueeze(2)  # [rows, spans, 1, width]
    shifts = torch.arange(form.planes, device=words.device, dtype=torch.int32) * form.bits
    codes = (wide >> shifts[:, None]) & ((1 << form.bits) - 1)
    return codes.reshape(words.shape[1], -1)[:, form.lead : form.lead + form.cols]


def _byte_scales(part: WeightPart, bits: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, a byte per group, a number per row): codes lose what a scale of zero makes of
    them, and take over its sign."""
    grid = _grid(part, "scale", form)
    whole = part.tensors.get("global")
    if form.shift == _POWERS:
        grid = grid.view(torch.uint8).to(torch.int32)
        most = grid.amax(1)
        made = (grid - most[:, None] + 127).clamp(min=0)
        row = torch.exp2(most.to(torch.float64) - 127).to(torch.float32)
    else:
        values = grid.to(torch.float32)
        mantissa, exponent = torch.frexp(values.abs() / 512)  # mantissa · 2^exponent, in [½, 1)
        made = ((exponent + 30) << 3) | (mantissa * 16 - 8).to(torch.int32)
        made = torch.where(values == 0, 0, made)
        by_code = (values[:, :, None]).expand(-1, -1, form.group).flatten(1)
        by_code = by_code[:, form.lead : form.lead + form.cols]
        bits = torch.where(by_code == 0, 0, torch.where(by_code < 0, bits ^ 8, bits))
        row = torch.full((part.shape[0],), 512.0, device=grid.device)
    row = row if whole is None else row * whole.to(torch.float32)
    return bits.to(torch.uint8), made.to(torch.uint8), row


def _part_of(part: WeightPart, form: Form) -> Coded:
    bits = _bits_of(part)
    device = bits.device
    none = torch.zeros(1, dtype=torch.int8, device=device)
    zero, row = none, torch.ones(1, dtype=torch.float32, device=device)
    if form.shift:
        bits, made, row = _byte_scales(part, bits, form)
        made = _padded(made, form.spans * form.planes, 0).view(-1, form.spans, form.planes)
        word = torch.zeros(made.shape[:2], dtype=torch.int32, device=device)
        for plane in range(form.planes):
            word |= made[:, :, plane].to(torch.int32) << (8 * plane)
        scale = word.to(torch.int32 if form.planes == 4 else torch.int16)
    else:
        scale = decode_scale(_grid(part, "scale", form), torch.float32)
        if (whole := part.tensors.get("global")) is not None:
            scale = scale * whole.to(torch.float32)
        if form.by_row:
            scale, row = torch.ones(1, 1, device=device), scale[:, 0].contiguous()
        else:
            scale = _padded(scale, form.groups, 1.0)
        if form.asym:
            neutral = _SYMMETRIC if form.codes == INT4 else 0
            zero = torch.full(
                (part.shape[0], form.groups), neutral, dtype=torch.int8, device=device
            )
            if "zero" in part.tensors:
                own = _grid(part, "zero", form).to(torch.int8)
                zero[:, : own.shape[1]] = own
    zero = zero.T if form.asym else zero
    return Coded(form, _packed(bits, form), scale.T, zero, row)


def joined(parts: Sequence[Coded]) -> Coded:
    """Rows of all, one after the other."""
    form = parts[0].form
    scale, zero, row = parts[0].scale, parts[0].zero, parts[0].row_scale
    if form.scales:
        scale = torch.cat([p.scale for p in parts], dim=1)
    if form.asym:
        zero = torch.cat([p.zero for p in parts], dim=1)
    if form.by_row:
        row = torch.cat([p.row_scale for p in parts])
    words = torch.cat([p.words for p in parts], dim=1)
    return Coded(form, words, scale.contiguous(), zero.contiguous(), row.contiguous())


def taking_turns(first: Coded, second: Coded) -> Coded:
    """Rows of two weights of one shape in turns."""
    form = first.form

    def both(a: Tensor, b: Tensor, kept: bool) -> Tensor:
        return torch.stack((a, b), -1).flatten(-2) if kept else a

    return replace(
        first,
        words=torch.stack((first.words, second.words), 2).flatten(1, 2),
        scale=both(first.scale, second.scale, form.scales > 0),
        zero=both(first.zero, second.zero, form.asym),
        row_scale=both(first.row_scale, second.row_scale, form.by_row),
    )


def coded(weight: Weight, form: Form) -> Coded:
    """The weight in this form, which is its own: `form_of`."""
    return joined([_part_of(part, form) for part in weight.parts])


def wide_values(held: Coded) -> Tensor:
    """[rows, cols] float32."""
    form, rows = held.form, held.words.shape[1]
    codes = unpacked(held.words, form)
    if form.codes == E4M3:
        values = codes.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    elif form.codes == E2M1:
        table = torch.tensor((0, 0.5, 1, 1.5, 2, 3, 4, 6), device=codes.device)
        values = torch.cat((table, -table))[codes.to(torch.int64)]
    else:
        signed = codes.to(torch.uint8).view(torch.int8) if form.codes == INT8 else codes
        none = 0 if form.codes == INT8 else _SYMMETRIC
        zero = _by_column(held.zero, form) if form.asym else none
        values = signed.to(torch.float32) - zero
    if form.scales:
        values = values * _by_column(_scale_numbers(held), form)
    return values * held.row_scale[:, None] if form.by_row else values.view(rows, -1)


def _scale_numbers(held: Coded) -> Tensor:
    """[groups, rows] float32."""
    form = held.form
    if not form.shift:
        return held.scale
    shifts = torch.arange(form.planes, device=held.scale.device, dtype=torch.int32) * 8
    bits = (held.scale.to(torch.int32)[:, None] >> shifts[:, None]) & 255
    base = 96 << 7 if form.shift == _E4M3_SCALES else 0
    return ((bits.flatten(0, 1) << form.shift) + base << 16).view(torch.float32)


def _by_column(grid: Tensor, form: Form) -> Tensor:
    """[groups, rows] → [rows, cols]."""
    each = form.spans * form.span // grid.shape[0] if not form.group else None
    width = each or (form.width if form.scales > 1 else form.span * form.spans_per_scale)
    wide = grid.T.to(torch.float32).repeat_interleave(width, 1)
    return wide[:, form.lead : form.lead + form.cols]
