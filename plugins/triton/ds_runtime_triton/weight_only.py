"""Linear with weights of few bits, kept as they are and multiplied in the compute dtype."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from ds_runtime.api import Facts, Packed, Weight, torch_dtype
from ds_runtime_triton.coded import CODES, INT4, INT8, Coded, Form, coded, form_of, wide_values
from ds_runtime_triton.config import Config, folder, tuned
from ds_runtime_triton.jit.coded import coded_gemm_kernel
from ds_runtime_triton.launch import counters
from ds_runtime_triton.linear import LinearDense, dense_variant, grid_of, pieces
from ds_runtime_triton.linear import variant as products


def ptx(config: Config, form: Form, dtype: torch.dtype) -> bool:
    """Whether words are decoded in PTX. It makes bfloat16, and multiplies floats by scales far too
    large: only those that are relative to their row's do not overflow. It has no int8."""
    fits = form.codes != INT8 and (form.codes == INT4 or form.scales < 2 or form.shift > 0)
    return bool(config.get("PTX")) and dtype == torch.bfloat16 and fits


def variant(facts: Facts, rows: int) -> Hashable:
    """`Compiles.variant` of LinearWeightOnly, which may have to keep a weight dense."""
    return products(facts, "linear_weight_only", rows), dense_variant(facts, rows)


class LinearWeightOnly:
    """Few tokens: split over the inner dimension. A shard that cuts groups too finely is kept in
    the compute dtype."""

    tag = "triton.linear_weight_only"

    def __init__(self, facts: Facts) -> None:
        self.dtype = torch_dtype(facts.dtype)
        self.dense = LinearDense(facts)
        self.arch = folder(facts.device.arch, facts.dtype)

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        weight.expect(CODES, self.tag)
        form = form_of(weight)
        if form is None:
            inner = self.dense.pack(weight, facts)
            return Packed(self.tag, weight.shape, {"dense": inner}, inner.nbytes, _restore)
        held, (n, k) = coded(weight, form), weight.shape
        tensors = {
            "dense": None,
            "coded": held,
            "arrived": (arrived := counters(held.words)),
            "tuned": tuned(self.arch, "linear_weight_only", f"N={n},K={k}"),
        }
        nbytes = held.nbytes + arrived.nbytes
        return Packed(self.tag, (n, k), tensors, nbytes, restore=_restore)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        if packed.tensors["dense"] is not None:
            return self.dense.apply(x, packed.tensors["dense"])
        m, (n, k) = x.shape[0], packed.shape
        y = torch.empty(m, n, dtype=x.dtype, device=x.device)
        if m == 0:
            return y
        config: Config = packed.tensors["tuned"].at(m)
        held: Coded = packed.tensors["coded"]
        grid, split = grid_of(config, m, n)
        coded_gemm_kernel[grid](
            x, held.words, held.scale, held.zero, held.row_scale, y, pieces(config, *grid, x),
            packed.tensors["arrived"], m, n, k, x.stride(0), held.form.lead, held.form.spans,
            **held.form.launch(),
            **{**config, "SPLIT": split, "PTX": ptx(config, held.form, x.dtype)},
        )  # fmt: skip
        return y


def _restore(packed: Packed) -> Tensor:
    inner: Packed | None = packed.tensors["dense"]
    return wide_values(packed.tensors["coded"]) if inner is None else inner.dequantise()


# The name that the plan shows.
linear_weight_only = LinearWeightOnly
