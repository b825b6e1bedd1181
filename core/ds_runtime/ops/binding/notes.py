"""What a plan remarks of a kernel that was chosen. Torch-free."""

from __future__ import annotations

from ds_runtime.ops.contract import RANK_REFERENCE, Kernel
from ds_runtime.ops.formats import conversions


def spread(kernel: Kernel, weight_format: str) -> str:
    """What a kernel costs that reads a format and holds it dense; "" if it keeps the format."""
    if not weight_format or kernel.rank <= RANK_REFERENCE or weight_format in kernel.keeps:
        return ""
    return next((str(c) for c in conversions(weight_format) if c.target == "dense"), "")


def note_of(kernel: Kernel) -> str:
    """The kernel's own remark, and that it is called through an adapter if it is."""
    op = kernel.op
    if kernel.contract == op.version:
        return kernel.note
    said = f"written for contract {kernel.contract}, adapted to {op.version}"
    return f"{kernel.note}; {said}" if kernel.note else said
