"""Torch references of the norms."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ds_runtime.ops.contract import Facts
from ds_runtime.ops.dtypes import wide
from ds_runtime.ops.reference.cases import Call, Case, Maker, case
from ds_runtime.ops.reference.matrices.linear import quantize_group


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Reference of RmsNorm."""
    compute = wide(x.dtype)
    values = x.to(compute)
    inverse = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (values * inverse * weight.to(compute)).to(x.dtype).contiguous()


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Reference of AddRmsNorm: the composition."""
    summed = (x + residual).contiguous()
    return rms_norm(summed, weight, eps), summed


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, group: int, ue8m0: bool
) -> tuple[Tensor, Tensor]:
    """Reference of RmsNormQuantize: the composition."""
    return quantize_group(rms_norm(x, weight, eps), group, ue8m0)


def add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: int, ue8m0: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of AddRmsNormQuantize: the composition."""
    normed, summed = add_rms_norm(x, residual, weight, eps)
    return (*quantize_group(normed, group, ue8m0), summed)


def rms_norm_samples(facts: Facts) -> Iterator[Case]:
    """Sizes, strides, extremes, a float32 weight beside low-precision activations."""
    for tokens, hidden in ((0, 64), (1, 1), (1, 576), (3, 129), (17, 512)):
        make = Maker(facts, label := f"{tokens}x{hidden}")
        yield case(label, facts, make.normal(tokens, hidden), make.normal(hidden), 1e-6)
    for label, scale in (("large", 1e4), ("tiny", 1e-4)):
        make = Maker(facts, label)
        yield case(label, facts, make.normal(5, 192, scale=scale), make.normal(192), 1e-6)
    make = Maker(facts, "strided")
    yield case("strided", facts, make.inside(make.normal(9, 200)), make.normal(200), 1e-5)
    x = make.normal(4, 128)
    x[2] = 0
    yield case("zero row", facts, x, make.normal(128), 1e-6)
    weight = make.normal(128, dtype=torch.float32)
    yield case("float32 weight", facts, make.normal(6, 128), weight, 1e-6)


def add_rms_norm_samples(facts: Facts) -> Iterator[Case]:
    """As for rms_norm; the kernel may overwrite the residual."""
    shapes = ((0, 64), (1, 7), (3, 130), (33, 512))
    for tokens, hidden in shapes:
        make = Maker(facts, label := f"{tokens}x{hidden}")
        x, residual = make.normal(tokens, hidden), make.normal(tokens, hidden, scale=3)
        yield Case(label, facts, (Call((x, residual, make.normal(hidden), 1e-6), free=(1,)),))
    make = Maker(facts, "strided")
    x, residual = make.inside(make.normal(5, 96)), make.inside(make.normal(5, 96), 1, 2)
    yield Case("strided", facts, (Call((x, residual, make.normal(96), 1e-6), free=(1,)),))
    x, residual = make.normal(5, 96, scale=100), make.normal(5, 96, scale=1e4)
    weight = make.normal(96, dtype=torch.float32)
    yield Case("large, float32 weight", facts, (Call((x, residual, weight, 1e-6), free=(1,)),))


def rms_norm_quantize_samples(facts: Facts) -> Iterator[Case]:
    """Both scale kinds, groups of zeros, outliers, wide and strided rows."""
    for ue8m0 in (False, True):
        kind = "power-of-two" if ue8m0 else "float"
        for tokens, n in ((0, 128), (1, 1536), (7, 384), (1, 16384)):
            make = Maker(facts, label := f"{kind} {tokens}x{n}")
            yield case(label, facts, make.normal(tokens, n), make.normal(n), 1e-6, 128, ue8m0)
        make = Maker(facts, label := f"{kind} awkward")
        x = make.normal(70, 256)
        x[1, :128], x[2, 7], x[3] = 0, 3e4, x[3] * 1e-6
        weight = make.normal(256, dtype=torch.float32)
        yield case(label, facts, make.inside(x), weight, 1e-6, 128, ue8m0)


def add_rms_norm_quantize_samples(facts: Facts) -> Iterator[Case]:
    """As for rms_norm_quantize; the kernel may overwrite the residual."""
    for sample in rms_norm_quantize_samples(facts):
        ((x, *rest),) = (call.args for call in sample.calls)
        make = Maker(facts, sample.label)
        residual = make.inside(make.normal(*x.shape, scale=2), 1, 2)
        call = Call((x, residual, *rest), free=(1,))
        yield Case(sample.label, sample.facts, (call,))
        if "awkward" not in sample.label:
            whole = Call((x, make.normal(*x.shape), *rest), free=(1,))
            yield Case(f"{sample.label}, contiguous", sample.facts, (whole,))
