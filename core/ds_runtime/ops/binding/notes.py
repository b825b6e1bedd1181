"""What a plan says of a kernel that was chosen: the decision, and remarks. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ds_runtime.ops.contract import RANK_REFERENCE, Kernel, Site
from ds_runtime.ops.formats import conversions


@dataclass(frozen=True, slots=True)
class Decision:
    """Who won an op at a site, and every refusal. `lost` are acceptable kernels of lower rank.

    converts: in what the weight is held because no kernel reads its own format, or the kernel does
    not keep it, and what that costs. instead: better ones that --batch-invariant alone keeps out.
    """

    op: str
    site: Site
    kernel: str
    provider: str
    rank: int
    refused: tuple[tuple[str, str], ...] = ()
    lost: tuple[tuple[str, int], ...] = ()
    note: str = ""
    layout: str = ""
    contract: int = 1
    converts: str = ""
    instead: tuple[str, ...] = ()


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
