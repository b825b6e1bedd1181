"""Whether a WeightPart is one of its format: what kernels rely on and values alone do not show."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ds_runtime.ops.dtypes import decode_scale
from ds_runtime.ops.formats import FORMATS, WeightFormat
from ds_runtime.ops.weight import WeightPart

if TYPE_CHECKING:
    from ds_runtime.weights.place import PartRequest

_ACT_ORDER, _GLOBAL = "int4_actorder", "nvfp4"


def wrong_form(part: WeightPart, request: PartRequest) -> str:
    """What is wrong with the part that a loader read for a request, as a sentence, or ""."""
    if not isinstance(part, WeightPart):
        return f"read returns {type(part).__name__}, expected a WeightPart"
    asked = {"name": request.module, "format": request.encoding.format, "shape": request.shape}
    for key, want in asked.items():
        if (found := getattr(part, key)) != want:
            return f"{key} of the part is {found!r}, expected {want!r}"
    form = FORMATS.get(part.format)
    if form is None:
        own = f"format {part.format!r} is the plugin's own"
        return "" if part.dequantiser else f"{own}: name its dequantiser in the WeightPart"
    return _wrong_codes(part, form) or (_wrong_grid(part, form) if form.codes else "")


def _wrong_codes(part: WeightPart, form: WeightFormat) -> str:
    """One code per element, in the format's dtype and range."""
    weight = part.tensors.get("weight")
    if weight is None:
        return "the part has no tensor 'weight'"
    dtype = str(weight.dtype).removeprefix("torch.")
    fits = dtype == form.codes if form.codes else weight.dtype.is_floating_point
    if not fits:
        return f"weight is {dtype}, {form.name} has {form.codes or 'a float dtype'}"
    if tuple(weight.shape) != part.shape:
        return f"weight has shape {list(weight.shape)}, expected {list(part.shape)}: nothing packed"
    if form.bits != 4 or not weight.numel():
        return ""
    low, high = (0, 15) if form.codes == "uint8" or "zero" in part.tensors else (-8, 7)
    least, most = int(weight.min()), int(weight.max())
    inside = low <= least and most <= high
    return "" if inside else f"codes are {least} to {most}, {form.name} has {low} to {high}"


def _wrong_grid(part: WeightPart, form: WeightFormat) -> str:
    """Block and offset say where the scales lie, which cover the part and no more."""
    if part.block is None:
        each = tuple(n or max(1, whole) for n, whole in zip(form.block, part.shape, strict=True))
        said = f"block is None: say how many (rows, columns) share a scale of {form.name}"
        return f"{said}, such as {each}"
    for name, block, own, first, extent in zip(
        ("rows", "columns"), part.block, form.block, part.offset, part.shape, strict=True
    ):
        if block < 1 or not 0 <= first < block:
            return f"{name}: block {block} and offset {first}, expected 0 <= offset < block"
        if own == 0 and extent + first > block:
            return f"{name}: block {block} is to cover all {extent}, as {form.name} has one scale"
        if own and not form.any_group and block != own:
            return f"{name}: block {block}, {form.name} has {own}"
    needed = ["scale", *["group"] * (form.name == _ACT_ORDER), *["global"] * (form.name == _GLOBAL)]
    if missing := [name for name in needed if name not in part.tensors]:
        return f"the part has no tensor {missing[0]!r}, which {form.name} needs"
    return _wrong_scales(part, part.block)


def _wrong_scales(part: WeightPart, block: tuple[int, int]) -> str:
    scale, zero = part.tensors["scale"], part.tensors.get("zero")
    for axis, name in enumerate(("rows", "columns")):
        covered = part.shape[axis] + part.offset[axis]
        if (axis == 1 and "group" in part.tensors) or not covered:
            continue
        wanted = -(-covered // block[axis])
        if scale.dim() != 2 or scale.shape[axis] != wanted:
            return (
                f"scale has shape {list(scale.shape)}, expected {wanted} {name}: offset "
                f"{part.offset[axis]} and {part.shape[axis]} {name} in blocks of {block[axis]}"
            )
    if not bool(torch.isfinite(decode_scale(scale, torch.float32)).all()):
        return "a scale is no finite number"
    if zero is not None and (zero.dtype, zero.shape) != (torch.int8, scale.shape):
        return (
            f"zero is {zero.dtype} {list(zero.shape)}, expected int8 {list(scale.shape)} as scale"
        )
    return ""
