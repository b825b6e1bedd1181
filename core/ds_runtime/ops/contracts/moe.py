"""Mixture-of-experts contracts: router logits, routing, routed experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ds_runtime.ops.contract import Op

if TYPE_CHECKING:
    from torch import Tensor

    from ds_runtime.ops.contract import Facts, Routing
    from ds_runtime.ops.weight import ExpertSource, Packed

_REF = "ds_runtime.ops.reference.matrices.moe"
_COARSE = {
    "fp8_w8a8": 8e-2,
    "int8_w8a8": 4e-2,
    "int4_w4a8": 4e-2,
    "mxfp4_w4a4": 0.25,
}  # two matmuls, as in linear.py


class RouterLogits(Protocol):
    """x · Wᵀ with both operands in fp32. x: [tokens, hidden], rows may be strided; weight:
    [experts, hidden] float32. Returns float32 [tokens, experts]. tokens == 0 is legal.
    """

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor: ...


class Route(Protocol):
    """Choose `routing.top_k` experts per token.

    logits: [tokens, experts] float32; bias: [experts] float32 or None. s = softmax or sigmoid of
    the logits. greedy: top-k of s. group_limited_greedy: group score = max of s in the group,
    keep topk_group groups, others 0, top-k. noaux_tc: c = s + bias, group score = sum of the two
    largest c (one, if a group has one expert), keep topk_group groups, others −inf, top-k by c.
    Weights are s (never c) at the chosen experts; if renormalize, divided by (sum + 1e-20);
    then times scale. Behind the chosen come routing.shared slots that every token takes: weight 1,
    ids num_experts, num_experts + 1, … Returns (weights float32 [tokens, top_k + shared], ids int32
    of the same shape); the order of the chosen is free, ids are distinct; at ties any choice is
    right. tokens == 0 is legal. Version 1 knew no shared slots.
    Source: the DeepSeek-V2 and V3 technical reports.
    """

    def __call__(
        self, logits: Tensor, bias: Tensor | None, routing: Routing
    ) -> tuple[Tensor, Tensor]: ...


class Experts(Protocol):
    """Routed SwiGLU experts: Σ_k weights[t,k] · down_e(silu(gate_e x) · up_e x), e = ids[t,k].

    top_k stands for all columns of `ids`, slots of shared experts among them.
    `pack(source, facts)` reads experts one by one. `apply(x, weights, ids, packed)`: x [tokens,
    hidden] in facts.dtype; weights float32 and ids int32 [tokens, top_k], ids distinct per token.
    Returns a new contiguous [tokens, hidden] in x.dtype; products accumulate in fp32. Experts
    without tokens and tokens == 0 are legal. Formats as in Linear.
    """

    def pack(self, source: ExpertSource, facts: Facts) -> Packed: ...

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor: ...


ROUTER_LOGITS = Op(
    name="router_logits",
    protocol=f"{__name__}:RouterLogits",
    reference=f"{_REF}:router_logits",
    samples=f"{_REF}:router_logits_samples",
    tolerance={"float32": 1e-5, "bfloat16": 1e-5, "float16": 1e-5},
    summary="router scores in fp32",
)

ROUTE = Op(
    name="route",
    protocol=f"{__name__}:Route",
    reference=f"{_REF}:route",
    samples=f"{_REF}:route_samples",
    tolerance={"float32": 1e-5, "bfloat16": 1e-5, "float16": 1e-5},
    summary="grouped top-k expert choice",
)

EXPERTS = Op(
    name="experts",
    protocol=f"{__name__}:Experts",
    reference=f"{_REF}:ReferenceExperts",
    samples=f"{_REF}:experts_samples",
    tolerance={"float32": 2e-5, "bfloat16": 1.5e-2, "float16": 4e-3} | _COARSE,
    kind="object",
    heavy=True,
    summary="routed experts, packed once",
)
