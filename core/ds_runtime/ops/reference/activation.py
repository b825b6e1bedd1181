"""Torch reference of the activation."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from ds_runtime.ops.contract import Facts
from ds_runtime.ops.dtypes import wide
from ds_runtime.ops.reference.cases import Case, Maker, case
from ds_runtime.ops.reference.matrices.linear import quantize_group


def silu_mul(gate_up: Tensor) -> Tensor:
    """Reference of SiluMul."""
    gate, up = gate_up.to(wide(gate_up.dtype)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype).contiguous()


def silu_mul_quantize(gate_up: Tensor, group: int, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Reference of SiluMulQuantize: the composition."""
    return quantize_group(silu_mul(gate_up), group, ue8m0)


def silu_mul_samples(facts: Facts) -> Iterator[Case]:
    """Odd widths, strides, both ends of the sigmoid."""
    for tokens, n in ((0, 64), (1, 1), (3, 33), (17, 256)):
        make = Maker(facts, label := f"{tokens}x{n}")
        yield case(label, facts, make.normal(tokens, 2 * n))
    make = Maker(facts, "strided")
    yield case("strided", facts, make.inside(make.normal(5, 2 * 50)))
    yield case("large", facts, make.normal(5, 2 * 64, scale=100))
    yield case("small", facts, make.normal(5, 2 * 64, scale=0.1))


def silu_mul_quantize_samples(facts: Facts) -> Iterator[Case]:
    """Both scale kinds, groups of zeros, both ends of the sigmoid, strided rows."""
    for ue8m0 in (False, True):
        kind = "power-of-two" if ue8m0 else "float"
        for tokens, n in ((0, 128), (1, 2304), (70, 384)):
            make = Maker(facts, label := f"{kind} {tokens}x{n}")
            yield case(label, facts, make.normal(tokens, 2 * n), 128, ue8m0)
        make = Maker(facts, label := f"{kind} awkward")
        x = make.normal(5, 512, scale=10)
        x[1, :128], x[2, 7], x[3] = 0, 100, x[3] * 1e-6
        yield case(label, facts, make.inside(x), 128, ue8m0)
