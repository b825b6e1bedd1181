"""Torch reference of the interleaved rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ds_runtime.ops.contract import Facts
from ds_runtime.ops.dtypes import wide
from ds_runtime.ops.reference.cases import Case, Maker, case


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., 0::2].to(cos.dtype), x[..., 1::2].to(cos.dtype)
    pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1)  # [..., d / 2, 2]
    return pairs.flatten(-2).to(x.dtype)


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Reference of Rope."""
    table = cos_sin[positions].to(wide(q.dtype))  # [tokens, d]
    cos, sin = table.chunk(2, dim=-1)
    return _rotate(q, cos.unsqueeze(1), sin.unsqueeze(1)), _rotate(k, cos, sin)


def rope_samples(facts: Facts) -> Iterator[Case]:
    """Slices of wider tensors as the model makes them, unsorted and repeated positions."""
    d = facts.dims["qk_rope"]
    for tokens, heads in ((0, 2), (1, 1), (5, 3), (33, 4)):
        make = Maker(facts, label := f"{tokens} tokens, {heads} heads")
        q, k = make.normal(tokens, heads, d), make.normal(tokens, d)
        yield case(label, facts, q, k, make.integers(0, 50, tokens), make.cos_sin(50, d))
    make = Maker(facts, "slices")
    q, k = make.inside(make.normal(7, 3, d), 16, 0), make.inside(make.normal(7, d), 32, 0)
    far = torch.tensor([0, 4999, 17, 17, 3, 4096, 1])
    yield case("slices, far positions", facts, q, k, far, make.cos_sin(5000, d))
    q, k = make.normal(4, 2, d, scale=300), make.normal(4, d, scale=300)
    yield case("large", facts, q, k, torch.arange(4), make.cos_sin(4, d))
    q, k = make.normal(3, 2, 2), make.normal(3, 2)
    yield case("one pair", facts, q, k, torch.arange(3), make.cos_sin(9, 2))
