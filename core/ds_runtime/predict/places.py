"""What a model's places have bound, and which kernel serves a call by its rows. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ds_runtime.description.tree import ATTENTION, DOWN, Q_B, QKV_A
from ds_runtime.ops.binding.by_rows import Shares
from ds_runtime.ops.contract import Kernel, Site

CODING = {"rms_norm_quantize", "add_rms_norm_quantize", "silu_mul_quantize"}  # FP8, for a linear
_ARITHMETIC = {"int8_w8a8": "int8", "int4_w4a8": "int8", "fp8_w8a8": "float8_e4m3fn"}
_MULTIPLIES = {"block": f"{ATTENTION}.{QKV_A}", ATTENTION: f"{ATTENTION}.{Q_B}"}  # what they make


def arithmetic(kernel: Kernel, dtype: str) -> str:
    """The dtype in which a kernel multiplies, given that in which the model computes."""
    cost = kernel.op.cost
    return (
        "float32" if cost is not None and cost.float32 else _ARITHMETIC.get(kernel.numerics, dtype)
    )


def serving(shares: Shares | None, kernel: Kernel, method: str, rows: int) -> Kernel:
    """The kernel that serves a call of `rows` rows at a place."""
    if shares is None:
        return kernel
    for each in shares.some:
        if each.rows.holds(rows) and (not each.rows.methods or method in each.rows.methods):
            return each
    return shares.rest


class Places:
    """Which ops of a binding's places have a kernel, and how wide their weights are.

    A model has thousands of places, and each asks about others.
    """

    def __init__(
        self,
        choices: Iterable[tuple[Site, Kernel | None]],
        shares: Mapping[tuple[str, int, str], Shares],
    ) -> None:
        self.width: dict[tuple[int, str], int] = {}  # input columns by (layer, module)
        self._ops: dict[tuple[int, str], set[str]] = {}
        self._linears: dict[tuple[int, str], Kernel] = {}
        self._shares = shares
        for site, kernel in choices:
            if len(site.shape) > 1:
                self.width[site.layer, site.module] = site.shape[1]
            if kernel is not None:
                self._ops.setdefault((site.layer, site.module), set()).add(site.op)
            if kernel is not None and site.op == "linear":
                self._linears[site.layer, site.module] = kernel

    def at(self, layer: int, module: str) -> set[str]:
        """The ops of one place that have a kernel."""
        return self._ops.get((layer, module), set())

    def called(self, layer: int, module: str, rows: int) -> set[str]:
        """Those of them that a step with this number of rows may call. None makes codes for a
        weight whose kernel multiplies these rows as they are."""
        here = self.at(layer, module)
        if not here & CODING:
            return here
        there = _MULTIPLIES.get(module, f"{module}.{DOWN}")
        return here if self._rounds(layer, there, rows) else here - CODING

    def _rounds(self, layer: int, module: str, rows: int) -> bool:
        """Whether the kernel of a weight multiplies this number of rows as FP8 codes."""
        kernel = self._linears.get((layer, module))
        if kernel is None:
            return False
        serves = serving(self._shares.get(("linear", layer, module)), kernel, "apply", rows)
        return arithmetic(serves, "") == "float8_e4m3fn"
