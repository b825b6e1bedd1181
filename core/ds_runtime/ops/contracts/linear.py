"""Contracts of everything that is a matrix: linear, embedding, activation quantisation."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from ds_runtime.ops.contract import Op

if TYPE_CHECKING:
    from torch import Tensor

    from ds_runtime.ops.contract import Facts
    from ds_runtime.ops.weight import Packed, Weight

_REF = "ds_runtime.ops.reference.matrices.linear"
# Activations rounded as well: e4m3 by group, int8 by token, int8 by token and group.
_COARSE = {"fp8_w8a8": 6e-2, "int8_w8a8": 3e-2, "int4_w4a8": 3e-2, "mxfp4_w4a4": 0.2}


class Linear(Protocol):
    """y = x · Wᵀ for one weight [out, in] in `facts.weight_format`.

    `pack(weight, facts)` is called once at load and may release or convert the components; it
    owns what it keeps. `apply(x, packed)`: x [tokens, in] in facts.dtype, last dim contiguous,
    rows may be strided; returns a new contiguous [tokens, out] in x.dtype, accumulated in fp32.
    tokens == 0 is legal; `in` and `out` need not be multiples of anything. `apply` raises
    TypeError for another kernel's Packed. Formats: those of `ops/formats.py` that the kernel
    names, in the form that `WeightPart` says. A kernel may have the methods of QuantizedLinear and
    of Float32Linear.
    """

    def pack(self, weight: Weight, facts: Facts) -> Packed: ...

    def apply(self, x: Tensor, packed: Packed) -> Tensor: ...


class Groups(NamedTuple):
    """How activations are quantised: `size` and `ue8m0` are QuantizeGroup's group and ue8m0."""

    size: int
    ue8m0: bool


class QuantizedLinear(Protocol):
    """What a Linear has beside its contract if it takes quantised activations, so that the op in
    front of it can quantise as it writes.

    `quantizes(rows, packed)`: how `apply` quantises that many rows before it multiplies, or None
    where it does not. `apply_quantized(q, scale, packed)`: apply of x ≈ q · scale, both as
    QuantizeGroup gives them for these groups, scales of any strides.
    """

    def quantizes(self, rows: int, packed: Packed) -> Groups | None: ...

    def apply_quantized(self, q: Tensor, scale: Tensor, packed: Packed) -> Tensor: ...


class Float32Linear(Protocol):
    """What a Linear has beside its contract if it can give its sums as they are, before they are
    rounded: for the head, whose logits are float32.

    `gives_float32(rows, packed)`: whether it can for so many rows. `apply_float32(x, packed, out)`:
    apply(x, packed), but float32: in `out`, a contiguous [tokens, out] float32, or a new tensor if
    that is None or left out.
    """

    def gives_float32(self, rows: int, packed: Packed) -> bool: ...

    def apply_float32(self, x: Tensor, packed: Packed, out: Tensor | None = None) -> Tensor: ...


class Embed(Protocol):
    """Rows of a table. ids: [tokens] int64. table: [rows, hidden]; start: the first id it holds.

    Ids outside [start, start + rows) give zero rows (vocabulary-parallel shards are summed
    later). Returns a new contiguous [tokens, hidden] in table.dtype. tokens == 0 is legal.
    """

    def __call__(self, ids: Tensor, table: Tensor, start: int) -> Tensor: ...


class QuantizeGroup(Protocol):
    """Per-token, per-group FP8 e4m3 quantisation of activations.

    x: [tokens, n], n a multiple of `group`; rows may be strided. scale = max(amax, 1e-4) / 448
    per group, rounded up to a power of two if `ue8m0`. Returns (q [tokens, n] float8_e4m3fn,
    scale [tokens, n / group] float32, of any strides) with x ≈ q · scale. tokens == 0 is legal.
    Source: DeepSeek-V3 technical report, section 3.3.
    """

    def __call__(self, x: Tensor, group: int, ue8m0: bool) -> tuple[Tensor, Tensor]: ...


LINEAR = Op(
    name="linear",
    protocol=f"{__name__}:Linear",
    reference=f"{_REF}:ReferenceLinear",
    samples=f"{_REF}:linear_samples",
    tolerance={"float32": 2e-5, "bfloat16": 1e-2, "float16": 2e-3} | _COARSE,
    kind="object",
    heavy=True,
    summary="dense projection, packed once",
)

EMBED = Op(
    name="embed",
    protocol=f"{__name__}:Embed",
    reference=f"{_REF}:embed",
    samples=f"{_REF}:embed_samples",
    tolerance={"float32": 0.0, "bfloat16": 0.0, "float16": 0.0},
    summary="token embedding lookup",
)

QUANTIZE_GROUP = Op(
    name="quantize_group",
    protocol=f"{__name__}:QuantizeGroup",
    reference=f"{_REF}:quantize_group",
    samples=f"{_REF}:quantize_group_samples",
    tolerance={"float32": 1e-2, "bfloat16": 1e-2, "float16": 1e-2},
    summary="per-token-group FP8 quantisation",
)
