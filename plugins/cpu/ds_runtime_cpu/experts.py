"""Routed experts: one native call per layer, or oneDNN matmuls expert by expert."""

from __future__ import annotations

from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.api import ExpertSource, Facts, Packed, UnsupportedError, Weight, WeightPart
from ds_runtime_cpu.linear import compute_dtype, prepack, prepacked_linear
from ds_runtime_cpu.native import calls
from ds_runtime_cpu.panels import COLUMNS, Form, Stack, forms_of
from ds_runtime_cpu.small import CODE, in_rows


class _Experts:
    """Sorts tokens by expert and streams every chosen expert's weights once, in their own format.

    int8 and int4 weights meet activations in 8 bits, rounded per token, or per token and group.
    """

    tag = "cpu.experts_native"
    formats: tuple[str, ...] = ()  # those that `pack` takes; empty: any

    def __init__(self, facts: Facts) -> None:
        self.dtype = compute_dtype(facts)

    def pack(self, source: ExpertSource, facts: Facts) -> Packed:
        if self.formats and source.format not in self.formats:
            raise TypeError(f"{self.tag} reads {' and '.join(self.formats)}, not {source.format}")
        count, hidden, inter = source.num_experts, source.hidden, source.intermediate
        forms: tuple[Form, Form] | None = None
        for e in range(count):
            gate, up, down = (_one_part(w) for w in source.expert(e))
            if forms is None:
                forms, before = _forms(gate, up, down, self.dtype), _said(gate, up, down)
                both = Stack(forms[0], count, inter, hidden, COLUMNS // 2)
                one = Stack(forms[1], count, hidden, inter)
            elif forms != _forms(gate, up, down, self.dtype):
                raise UnsupportedError(
                    f"{gate.name}: {_said(gate, up, down)}, where the experts before it are "
                    f"{before}; one kernel reads all experts of a layer, so store them alike"
                )
            forms[0].pack_part(both.room(), gate, half=0)
            forms[0].pack_part(both.room(), up, half=1)
            forms[1].pack_part(one.room(), down)
            both.close()
            one.close()
        assert forms is not None, "a layer has at least one expert"
        if both.form.code != one.form.code:  # one kernel reads both
            both.widen()
            one.widen()
        forms, shape = (both.form, one.form), (count, hidden, inter)
        w13, w2 = both.panels, one.panels
        run = _Run(forms, self.dtype, w13, w2, shape)
        tensors = {"w13": w13, "w2": w2, "forms": forms, "run": run}
        nbytes = w13.nbytes + w2.nbytes
        return Packed(self.tag, shape, tensors, nbytes, restore=_gate_up_native)

    def limited(
        self, x: Tensor, weights: Tensor, ids: Tensor, limit: float, packed: Packed
    ) -> Tensor:
        """ExpertsLimited's `apply`; an infinite limit is none."""
        packed.expect(self.tag)
        run: _Run = packed.tensors["run"]
        assert x.shape[1] == packed.shape[1] and x.dtype == self.dtype, (x.shape, x.dtype)
        assert weights.shape == ids.shape == (x.shape[0], ids.shape[1]), (weights.shape, ids.shape)
        kinds = (weights.dtype, ids.dtype)
        assert kinds == (torch.float32, torch.int32), kinds
        return run(x, weights.contiguous(), ids.contiguous(), limit)


class _Run:
    """The call for one layer's experts, with all that does not change from call to call."""

    def __init__(
        self,
        forms: tuple[Form, Form],
        dtype: torch.dtype,
        w13: Tensor,
        w2: Tensor,
        shape: tuple[int, int, int],
    ) -> None:
        up, down = forms
        kinds = (up.code, CODE[dtype])
        weights = (w13.data_ptr(), up.group, w2.data_ptr(), down.group)
        self._weights = (w13, w2)  # alive as long as the call has their addresses
        self._call = calls().bound(
            "experts", *kinds, None, None, None, None, *weights, None, None, None, None, *shape
        )

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, limit: float) -> Tensor:
        tokens, top_k = ids.shape
        x = in_rows(x)
        out = x.new_empty(x.shape)
        self._call(
            x.data_ptr(),
            x.stride()[0],
            weights.data_ptr(),
            ids.data_ptr(),
            limit,
            out.data_ptr(),
            tokens,
            top_k,
        )
        return out


class ExpertsNative(_Experts):
    """Experts of any format."""

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        return self.limited(x, weights, ids, inf, packed)


class LimitedNative(_Experts):
    """ExpertsLimited of any format."""

    def apply(
        self, x: Tensor, weights: Tensor, ids: Tensor, limit: float, packed: Packed
    ) -> Tensor:
        return self.limited(x, weights, ids, limit, packed)


_AS_THEY_ARE = ("dense", "fp8_block", "mxfp4")  # formats that meet activations as they are
_BY_TOKEN = ("int8_channel",)  # activations in 8 bits, rounded per token
_BY_GROUP = ("int4_group",)  # and per token and group


class ExpertsPanels(ExpertsNative):
    formats = _AS_THEY_ARE


class ExpertsInt8(ExpertsNative):
    formats = _BY_TOKEN


class ExpertsInt4(ExpertsNative):
    formats = _BY_GROUP


class LimitedPanels(LimitedNative):
    formats = _AS_THEY_ARE


class LimitedInt8(LimitedNative):
    formats = _BY_TOKEN


class LimitedInt4(LimitedNative):
    formats = _BY_GROUP


def _one_part(weight: Weight) -> WeightPart:
    """The weight's only part, or all of them as one dense part."""
    if len(weight.parts) == 1:
        return weight.parts[0]
    values = weight.dequantise()
    return WeightPart(weight.parts[0].name, "dense", weight.shape, {"weight": values})


def _forms(
    gate: WeightPart, up: WeightPart, down: WeightPart, dtype: torch.dtype
) -> tuple[Form, Form]:
    """How gate and up, and down are held: in their own format if all can be."""
    both, one = forms_of(((gate, up), (down,)), dtype)
    return both, one


def _said(*parts: WeightPart) -> str:
    """Formats, blocks and zero points of an expert's parts, for people."""
    said = (
        f"{p.format}{f' in blocks of {p.block}' if p.block else ''}"
        f"{' with zero points' if 'zero' in p.tensors else ''}"
        for p in parts
    )
    return ", ".join(dict.fromkeys(said))


def _gate_up_native(packed: Packed) -> Tensor:
    count, hidden, inter = packed.shape
    form: Form = packed.tensors["forms"][0]
    stacks = [torch.cat(form.unpack_halves(w, inter, hidden)) for w in packed.tensors["w13"]]
    return torch.stack(stacks).view(count, 2 * inter, hidden)


class ExpertsPrepacked:
    """Per expert with tokens: gather, two oneDNN matmuls, weighted scatter in float32."""

    tag = "cpu.experts_prepacked"

    def __init__(self, facts: Facts) -> None:
        self.dtype = compute_dtype(facts)

    def pack(self, source: ExpertSource, facts: Facts) -> Packed:
        count, hidden, inter = source.num_experts, source.hidden, source.intermediate
        w13: list[Tensor] = []
        w2: list[Tensor] = []
        for e in range(count):
            gate, up, down = source.expert(e)
            both = torch.cat((gate.dequantise(self.dtype), up.dequantise(self.dtype)))
            w13.append(prepack(both))  # [2 · inter, hidden]
            w2.append(prepack(down.dequantise(self.dtype)))
        nbytes = count * 3 * hidden * inter * self.dtype.itemsize
        shape = (count, hidden, inter)
        return Packed(self.tag, shape, {"w13": w13, "w2": w2}, nbytes, restore=_gate_up_onednn)

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        tokens, top_k = ids.shape
        flat = ids.reshape(-1).to(torch.int64) + 1  # those of −1 come first
        order = torch.argsort(flat, stable=True)
        absent, *counts = torch.bincount(flat, minlength=packed.shape[0] + 1).tolist()
        rows = order // max(top_k, 1)
        scale = weights.reshape(-1)[order].unsqueeze(-1)  # [pairs, 1]
        sums = torch.zeros(tokens, packed.shape[1])
        start = absent
        for e, count in enumerate(counts):
            if count == 0:
                continue
            take = rows[start : start + count]
            gate, up = prepacked_linear(x[take], packed.tensors["w13"][e]).chunk(2, dim=-1)
            y = prepacked_linear(F.silu(gate) * up, packed.tensors["w2"][e])
            sums.index_add_(0, take, y.to(torch.float32) * scale[start : start + count])
            start += count
        return sums.to(x.dtype)


def _gate_up_onednn(packed: Packed) -> Tensor:
    return torch.stack([w.to_dense().to(torch.float32) for w in packed.tensors["w13"]])


# The names that the plan shows.
experts_native = ExpertsPanels
experts_int8 = ExpertsInt8
experts_int4 = ExpertsInt4
limited_native = LimitedPanels
limited_int8 = LimitedInt8
limited_int4 = LimitedInt4
experts_prepacked = ExpertsPrepacked
