"""A plugin for FP8 weights whose Linear takes quantised activations, from two rows on, and whose
norms, attention and activation quantise as they write. `calls` counts them. Their parts are the
plugin's, too, so that both ways give the same bits."""

from __future__ import annotations

from collections import Counter

import torch.nn.functional as F

from ds_runtime.api import OPS, Groups, Kernel, Packed, hookimpl
from ds_runtime.ops.reference import activation, norm
from ds_runtime.ops.reference.attention import dense as attention
from ds_runtime.ops.reference.matrices.linear import quantize_group

calls: Counter[str] = Counter()
FUSED = (
    "rms_norm_quantize",
    "add_rms_norm_quantize",
    "mha_prefill_quantize",
    "silu_mul_quantize",
)
PHASES = frozenset({"prefill", "decode", "verify", "tree"})


class Linear:
    def __init__(self, facts):
        self.dtype = facts.dtype

    def pack(self, weight, facts):
        values = weight.dequantise()
        whole = values.shape[1] % 128 == 0
        return Packed("rounding", weight.shape, {"w": values, "whole": whole}, values.nbytes)

    def apply(self, x, packed):
        packed.expect("rounding")
        if not packed.tensors["whole"]:
            return F.linear(x.float(), packed.tensors["w"]).to(x.dtype)
        return self._product(*quantize_group(x, 128, False), packed).to(x.dtype)

    def quantizes(self, rows, packed):
        return Groups(128, False) if rows > 1 and packed.tensors["whole"] else None

    def apply_quantized(self, q, scale, packed):
        calls["linear"] += 1
        return self._product(q, scale, packed)

    def _product(self, q, scale, packed):
        return F.linear(q.float() * scale.repeat_interleave(128, 1), packed.tensors["w"])


def rms_norm_quantize(x, weight, eps, group, ue8m0):
    calls["norm"] += 1
    return norm.rms_norm_quantize(x, weight, eps, group, ue8m0)


def add_rms_norm_quantize(x, residual, weight, eps, group, ue8m0):
    calls["sum"] += 1
    return norm.add_rms_norm_quantize(x, residual, weight, eps, group, ue8m0)


mha_prefill, silu_mul = attention.mha_prefill, activation.silu_mul
rms_norm, add_rms_norm = norm.rms_norm, norm.add_rms_norm


def mha_prefill_quantize(*args):
    calls["attention"] += 1
    return attention.mha_prefill_quantize(*args)


def silu_mul_quantize(gate_up, group, ue8m0):
    calls["silu"] += 1
    return activation.silu_mul_quantize(gate_up, group, ue8m0)


def offer(op, name, **more):
    return Kernel(OPS[op], f"rounding:{name}", "rounding", 99, phases=PHASES, **more)


@hookimpl
def ds_quant_loaders(facts):
    return [offer("linear", "Linear", formats=frozenset({"fp8_block"}), numerics="fp8_w8a8")]


@hookimpl
def ds_ops(facts):
    parts = (offer(name, name) for name in ("rms_norm", "add_rms_norm", "silu_mul"))
    attention = offer("mha_prefill", "mha_prefill")
    return [attention, *parts, *(offer(name, name) for name in FUSED)]
