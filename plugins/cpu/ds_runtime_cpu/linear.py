"""Three ways to multiply by a weight: native panels, oneDNN's packing, and plain torch.

The native one keeps fp8 blocks as they are; the others convert them to the compute dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.api import Facts, Packed, Weight
from ds_runtime_cpu.native import calls
from ds_runtime_cpu.panels import COLUMNS, Form, Matmul, pack_weight
from ds_runtime_cpu.small import CODE, in_rows

# oneDNN packs for an expected number of rows; measured, 16 is as good as the best for any.
_EXPECTED_ROWS = 16


def compute_dtype(facts: Facts) -> torch.dtype:
    dtype = getattr(torch, facts.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def prepack(values: Tensor) -> Tensor:
    """[out, in] in oneDNN's own order (an opaque tensor of the same shape)."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(values.contiguous(), _EXPECTED_ROWS)
    return packed


def prepacked_linear(x: Tensor, packed: Tensor) -> Tensor:
    """x [tokens, in] times a prepacked [out, in], transposed."""
    if x.shape[0] == 0:
        return x.new_empty(0, packed.shape[0])
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return out


class LinearPrepacked:
    """oneDNN with weights in its own order: fast for every number of tokens."""

    tag = "cpu.linear_prepacked"

    def __init__(self, facts: Facts) -> None:
        self.dtype = compute_dtype(facts)

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        packed = prepack(whole_tiles(weight.dequantise(self.dtype)))
        nbytes = weight.shape[0] * weight.shape[1] * self.dtype.itemsize
        return Packed(self.tag, weight.shape, {"weight": packed}, nbytes, restore=_from_onednn)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        return prepacked_linear(whole_tiles(x), packed.tensors["weight"])


def whole_tiles(rows: Tensor) -> Tensor:
    """Rows filled up with zeros to a multiple of 32 columns, where they are 16-bit.

    On AMX, oneDNN reads shorter rows beyond their end: a neighbour's NaN would spoil them.
    """
    short = -rows.shape[1] % 32 if rows.dtype.itemsize == 2 else 0
    return F.pad(rows, (0, short)) if short else rows


def _from_onednn(packed: Packed) -> Tensor:
    values: Tensor = packed.tensors["weight"].to_dense()
    return values[:, : packed.shape[1]].to(torch.float32)


class LinearNative:
    """Panels in the format of the weight: one packing for one token and for thousands."""

    tag = "cpu.linear_native"
    formats: tuple[str, ...] = ("dense", "fp8_block", "mxfp4", "int8_channel", "int4_group")

    def __init__(self, facts: Facts) -> None:
        self.dtype = compute_dtype(facts)

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        weight.expect(self.formats, self.tag)
        form, panels = pack_weight(weight, self.dtype)
        tensors = {"weight": panels, "form": form, "matmul": Matmul(form, panels, *weight.shape)}
        return Packed(self.tag, weight.shape, tensors, panels.nbytes, restore=_from_panels)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        matmul: Matmul = packed.tensors["matmul"]
        return matmul(x)


class LinearPanels(LinearNative):
    """Activations as they are."""

    formats = ("dense", "fp8_block", "mxfp4")


class LinearInt8(LinearNative):
    """Activations in 8 bits, rounded per token."""

    formats = ("int8_channel",)


class LinearInt4(LinearNative):
    """Activations in 8 bits, rounded per token and group."""

    formats = ("int4_group",)


class _Groups:
    """Products of groups of columns with rows of their own, out of the panels of the whole weight.

    Where a group's rows begin within a panel, that panel's columns in front of them are computed
    as well. They are the end of the group in front, which is written later.
    """

    def __init__(self, form: Form, panels: Tensor, n: int, k: int, groups: int) -> None:
        out, size = n // groups, form.nbytes(COLUMNS, k)
        whole = out % COLUMNS == 0
        kinds, self._n = (form.code, CODE[form.dtype]), n
        first = [0] if whole else [g * out // COLUMNS for g in range(groups)]
        self._calls = [
            calls().bound(
                "linear",
                *(*kinds, None, None, None, panels.data_ptr() + at * size, form.group),
                *(None, n, out, groups if whole else 1, None),
                *(out if whole else (g + 1) * out - at * COLUMNS, k),
            )
            for g, at in enumerate(first)
        ]
        self._columns = [at * COLUMNS * form.dtype.itemsize for at in first]  # bytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, groups, k] → [tokens, groups · out], new."""
        x = in_rows(x)
        out = x.new_empty(x.shape[0], self._n)
        by_row, by_group, _ = x.stride()
        for g in reversed(range(len(self._calls))):
            source = x.data_ptr() + g * by_group * x.element_size()
            to = out.data_ptr() + self._columns[g]
            self._calls[g](source, by_row, by_group, to, x.shape[0])
        return out


class GroupedNative(LinearNative):
    """Panels in the format of the weight, as of `linear`. How many groups there are is the input's
    to say: what is settled for a number of them is kept."""

    tag = "cpu.grouped_linear"

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        weight.expect(self.formats, self.tag)
        form, panels = pack_weight(weight, self.dtype)
        tensors = {"weight": panels, "form": form, "groups": dict[int, _Groups]()}
        return Packed(self.tag, weight.shape, tensors, panels.nbytes, restore=_from_panels)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        groups = x.shape[1]
        products: dict[int, _Groups] = packed.tensors["groups"]
        if groups not in products:
            form, panels = packed.tensors["form"], packed.tensors["weight"]
            n, k = packed.shape
            products[groups] = _Groups(form, panels, n, k, groups)
        return products[groups](x)


class GroupedPanels(GroupedNative):
    """Activations as they are."""

    formats = LinearPanels.formats


class GroupedInt8(GroupedNative):
    """Activations in 8 bits, rounded per token and group of columns."""

    formats = LinearInt8.formats


class GroupedInt4(GroupedNative):
    """Activations in 8 bits, rounded per token and group of the weight's."""

    formats = LinearInt4.formats


def _from_panels(packed: Packed) -> Tensor:
    form: Form = packed.tensors["form"]
    rows, k = packed.shape
    return form.unpack(packed.tensors["weight"], rows, k)


class LinearPlain:
    """torch's linear on a contiguous weight."""

    tag = "cpu.linear_plain"

    def __init__(self, facts: Facts) -> None:
        self.dtype = compute_dtype(facts)

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        rows, k = weight.shape
        values = torch.zeros(
            rows, k + (-k % 32 if self.dtype.itemsize == 2 else 0), dtype=self.dtype
        )
        values[:, :k] = weight.dequantise(self.dtype)  # the checkpoint's pages may be released then
        return Packed(self.tag, weight.shape, {"weight": values}, values.nbytes, restore=_wide)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        return F.linear(whole_tiles(x), packed.tensors["weight"])


def _wide(packed: Packed) -> Tensor:
    values: Tensor = packed.tensors["weight"][:, : packed.shape[1]]
    return values.to(torch.float32)


# The names that the plan shows.
linear_prepacked = LinearPrepacked
linear_native = LinearPanels
linear_int8 = LinearInt8
linear_int4 = LinearInt4
linear_plain = LinearPlain
grouped_linear = GroupedPanels
grouped_linear_int8 = GroupedInt8
grouped_linear_int4 = GroupedInt4
