"""The canonical weight formats: all that a loader may make and a kernel may read. Torch-free.

A format is what a `WeightPart` holds in memory (`ops/weight.py`), never how a file stores it. Codes
are one per element in [rows, cols], whatever packing, transposition or scale direction the
checkpoint had. The meaning of every format is `dequantise` of `ops/weight.py`:

    value[r, c] = (code[r, c] − zero[i, j]) · scale[i, j] · global

where i and j are the block that element (r, c) lies in. `--quantize`, conversions of the binder
and estimates of memory read this table; docs/formats.md shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WHOLE = 0  # of a block's extent: all rows, or all columns


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One format. bits: of a code at rest (0: the compute dtype). codes: the torch dtype in which
    a part holds one code per element. block: (rows, columns) that share a scale; WHOLE for all,
    and a part may have another where `any_group`. scale_bytes: of one scale, as kernels keep it.
    """

    name: str
    bits: int
    codes: str
    block: tuple[int, int]
    scale_bytes: int
    summary: str
    any_group: bool = False

    def grid(self, rows: int, cols: int) -> tuple[int, int]:
        """(rows, columns) of scales over a [rows, cols] weight."""
        height, width = (b or n or 1 for b, n in zip(self.block, (rows, cols), strict=True))
        return -(-rows // height), -(-cols // width)

    def nbytes(self, rows: int, cols: int, item: int) -> float:
        """Bytes of a [rows, cols] weight at rest, scales included; `item` of the compute dtype."""
        if not self.bits:
            return rows * cols * item
        down, across = self.grid(rows, cols)
        return rows * cols * self.bits / 8 + down * across * self.scale_bytes


_E4M3, _INT8, _CODES = "float8_e4m3fn", "int8", "uint8"
_TABLE = (
    WeightFormat("dense", 0, "", (WHOLE, WHOLE), 0, "numbers: bf16, fp16, fp32"),
    WeightFormat("fp8_tensor", 8, _E4M3, (WHOLE, WHOLE), 4, "e4m3, one scale"),
    WeightFormat("fp8_channel", 8, _E4M3, (1, WHOLE), 4, "e4m3, a scale per row"),
    WeightFormat("fp8_block", 8, _E4M3, (128, 128), 4, "e4m3, a scale per 128×128 block"),
    WeightFormat(
        "fp8_group", 8, _E4M3, (1, 128), 4, "e4m3, a scale per block of any size", any_group=True
    ),
    WeightFormat("mxfp8", 8, _E4M3, (1, 32), 1, "e4m3, a power of two per 32 columns of a row"),
    WeightFormat("int8_channel", 8, _INT8, (1, WHOLE), 4, "int8, a scale per row"),
    WeightFormat("int8_block", 8, _INT8, (128, 128), 4, "int8, a scale per 128×128 block"),
    WeightFormat(
        "int8_group",
        8,
        _INT8,
        (1, 128),
        4,
        "int8, with or without zero points; a scale per row and group of columns",
        any_group=True,
    ),
    WeightFormat(
        "int4_group",
        4,
        _INT8,
        (1, 128),
        4,
        "codes −8 … 7, or 0 … 15 with zero points; a scale per row and group of columns",
        any_group=True,
    ),
    WeightFormat(
        "int4_actorder",
        4,
        _INT8,
        (1, 128),
        4,
        "as int4_group, but each column names its group",
        any_group=True,
    ),
    WeightFormat(
        "w4afp8",
        4,
        _INT8,
        (1, 128),
        4,
        "as int4_group without zero points, calibrated for FP8 activations",
        any_group=True,
    ),
    WeightFormat(
        "nvfp4", 4, _CODES, (1, 16), 1, "e2m1, an e4m3 scale per 16 columns of a row, a global one"
    ),
    WeightFormat("mxfp4", 4, _CODES, (1, 32), 1, "e2m1, a power of two per 32 columns of a row"),
)
FORMATS: Mapping[str, WeightFormat] = {f.name: f for f in _TABLE}
BLOCKED = tuple(name for name in FORMATS if name != "dense")  # a code, times a scale per block


@dataclass(frozen=True, slots=True)
class Conversion:
    """`source` held as `target`. exact: every value stays the same number; otherwise `cost` says
    in a sentence what is lost.
    """

    source: str
    target: str
    exact: bool
    cost: str

    def __str__(self) -> str:
        return f"{self.source} → {self.target} ({self.bits}; {self.cost})"

    @property
    def bits(self) -> str:
        """`4.5 → 16 bits per weight`; of a large matrix in a 16-bit compute dtype."""
        a, b = (_bits(name) for name in (self.source, self.target))
        return f"{a} → {b} bits per weight"


def _bits(name: str) -> str:
    size = 4096
    return f"{FORMATS[name].nbytes(size, size, 2) * 8 / size**2:.3g}" if name in FORMATS else "?"


# What holds the same numbers in other words, best first. Dense always does, to the compute dtype.
_EXACT: Mapping[str, tuple[str, ...]] = {
    "w4afp8": ("int4_group",),
    "fp8_tensor": ("fp8_channel", "fp8_block"),
    "mxfp4": ("mxfp8",),
}
# What is nearest where memory does not allow dense: same or more bits, and fewest values rounded.
_NEAREST: Mapping[str, tuple[str, ...]] = {
    "fp8_tensor": ("mxfp8", "int8_channel"),
    "fp8_channel": ("mxfp8", "fp8_block", "int8_channel"),
    "fp8_block": ("mxfp8", "fp8_channel", "int8_block", "int8_channel"),
    "fp8_group": ("mxfp8", "fp8_block", "fp8_channel", "int8_block", "int8_channel"),
    "mxfp8": ("fp8_block", "fp8_channel", "int8_channel"),
    "int8_channel": ("int8_block", "fp8_block", "fp8_channel", "mxfp8"),
    "int8_block": ("int8_channel", "fp8_block", "fp8_channel", "mxfp8"),
    "int8_group": ("mxfp8", "int8_block", "int8_channel", "fp8_block", "fp8_channel"),
    "int4_group": ("w4afp8", "mxfp8", "fp8_block", "int8_block", "int8_channel"),
    "int4_actorder": ("mxfp8", "fp8_block", "int8_block", "int8_channel", "int4_group"),
    "w4afp8": ("mxfp8", "fp8_block", "int8_block", "int8_channel"),
    "nvfp4": ("mxfp8", "fp8_block", "int8_block", "int8_channel", "mxfp4", "int4_group"),
    "mxfp4": ("fp8_block", "int8_block", "int8_channel", "nvfp4", "int4_group"),
}


def conversions(source: str, compact: bool = False) -> tuple[Conversion, ...]:
    """What `source` may be held as where nothing reads it, in the order to be tried.

    Exact ones come first, then dense, which a format of a plugin's own has, too. compact: rounding
    to another format of few bits goes before dense, for memories that cannot hold dense weights.
    """
    if source == "dense":
        return ()
    same = [Conversion(source, t, True, "exact") for t in _EXACT.get(source, ())]
    dense = [Conversion(source, "dense", True, "exact to the compute dtype")]
    near = [
        Conversion(source, t, False, f"rounded once more, to {FORMATS[t].summary}")
        for t in _NEAREST.get(source, ())
    ]
    return (*same, *near, *dense) if compact else (*same, *dense, *near)
