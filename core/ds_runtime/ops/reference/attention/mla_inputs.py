"""Torch reference of what stands before attention in steps that only decode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ds_runtime.ops.contract import Dims, Facts
from ds_runtime.ops.dtypes import torch_dtype
from ds_runtime.ops.reference.attention.dense import ReferenceMlaAbsorb, mla_prologue
from ds_runtime.ops.reference.cases import Call, Case, Maker, Saved
from ds_runtime.ops.reference.norm import rms_norm
from ds_runtime.ops.weight import MlaWeights, Packed


class ReferenceMlaInputs:
    """Reference of MlaInputs: its parts, one after the other."""

    tag = "reference.mla_inputs"

    def __init__(self, facts: Facts) -> None:
        self.dtype, self.absorb = torch_dtype(facts.dtype), ReferenceMlaAbsorb(facts)

    def pack(self, weights: MlaWeights, facts: Facts) -> Packed:
        names = ("q_a", "q_b", "kv_a")
        tensors: dict[str, Any] = {n: getattr(weights, n).dequantise(self.dtype) for n in names}
        tensors |= {"q_norm": weights.q_norm, "kv_norm": weights.kv_norm}
        nbytes = sum(t.nbytes for t in tensors.values())
        tensors["kv_b"] = self.absorb.pack(weights.kv_b, facts)
        return Packed(self.tag, facts.shape, tensors, nbytes + tensors["kv_b"].nbytes)

    def apply(
        self,
        x: Tensor,
        eps: float,
        positions: Tensor,
        cos_sin: Tensor,
        cache: Tensor,
        slots: Tensor,
        packed: Packed,
    ) -> tuple[Tensor, Tensor]:
        packed.expect(self.tag)
        held, linear = packed.tensors, torch.nn.functional.linear
        latent = rms_norm(linear(x, held["q_a"]), held["q_norm"], eps)
        heads, nope, _ = held["kv_b"].tensors["uk"].shape
        q = linear(latent, held["q_b"])
        q = q.view(x.shape[0], heads, q.shape[1] // heads)
        kv = linear(x, held["kv_a"])
        rest = held["kv_norm"], eps, positions, cos_sin, cache, slots
        q_rope, _, _ = mla_prologue(q, kv, *rest)
        return self.absorb.apply_q(q[..., :nope], q_rope, held["kv_b"]), latent


def mla_inputs_samples(facts: Facts) -> Iterator[Case]:
    """Few tokens, padding, three formats. Sizes that facts.dims does not say are small."""
    dims = {"hidden": 64, "q_lora": 32} | dict(facts.dims)
    names = ("hidden", "q_lora", "heads", "qk_nope", "qk_rope", "v", "kv_lora")
    hidden, q_lora, heads, nope, rope_dim, v, kv_lora = (dims[n] for n in names)
    for fmt in ("dense", "fp8_block", "int8_channel"):
        make = Maker(facts, fmt)
        shapes = (
            (q_lora, hidden),
            (heads * (nope + rope_dim), q_lora),
            (kv_lora + rope_dim, hidden),
            (heads * (nope + v), kv_lora),
        )
        q_a, q_b, kv_a, kv_b = (make.weight(*shape, fmt) for shape in shapes)
        q_norm, kv_norm = make.normal(q_lora), make.normal(kv_lora)
        weights = MlaWeights(q_a, q_b, kv_a, kv_b, q_norm, kv_norm)
        shape = (q_lora + kv_lora + rope_dim, hidden)
        here = replace(facts, dims=Dims(dims), weight_format=fmt, shape=shape)
        calls = [Call((weights, here), method="pack", save="packed")]
        for tokens, padding in ((0, 0), (1, 0), (7, 2)):
            cache, _ = make.paged((tokens + 4, 3))
            slots = make.order(cache.rows.shape[0])[:tokens]
            slots[:padding] = -1
            positions, table = make.integers(0, 900, tokens), make.cos_sin(900, rope_dim)
            given = (make.normal(tokens, hidden), 1e-6, positions, table, cache, slots)
            calls.append(Call((*given, Saved("packed")), method="apply", written=(4,)))
        foreign = Packed("nobody.nothing", shape, {}, 0)
        calls.append(Call((*given, foreign), "apply", raises=TypeError))
        yield Case(fmt, here, tuple(calls))
