"""Routed experts as two grouped matmuls over rows that the vendor's ops sort and combine, and the
choice of experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_runtime.api import (
    ExpertSource,
    Facts,
    Packed,
    Routing,
    Weight,
    route,
    torch_dtype,
    with_shared_slots,
)
from ds_runtime_npu import int8
from ds_runtime_npu.library import NZ, npu

_GROUPED: dict[str, Any] = {"split_item": 2, "group_type": 0, "group_list_type": 1}  # by counts


class Experts:
    """In the compute dtype: npu_moe_init_routing_v2, npu_grouped_matmul, npu_swiglu,
    npu_moe_finalize_routing.
    """

    tag = "npu.experts"
    rounds = -1  # quant_mode of the routing: rows stay as they are

    def __init__(self, facts: Facts) -> None:
        self._dtype = torch_dtype(facts.dtype)

    def _part(self, weight: Weight) -> tuple[Tensor, Tensor | None]:
        """([in, out], scales [out] or None)."""
        return weight.dequantise(self._dtype).t(), None

    def pack(self, source: ExpertSource, facts: Facts) -> Packed:
        tensors: dict[str, Tensor] = {}
        for e in range(source.num_experts):
            gate, up, down = source.expert(e)
            for name, weight in (("upper", Weight((*gate.parts, *up.parts))), ("lower", down)):
                values, scale = self._part(weight)
                named = {name: values} | ({f"{name}_scale": scale} if scale is not None else {})
                for key, part in named.items():
                    if e == 0:
                        tensors[key] = part.new_empty(source.num_experts, *part.shape)
                    tensors[key][e].copy_(part)
        for name in ("upper", "lower"):
            tensors[name] = npu().npu_format_cast(tensors[name], NZ)
        shape = (source.num_experts, source.hidden, source.intermediate)
        nbytes = sum(t.nbytes for t in tensors.values())
        return Packed(self.tag, shape, tensors, nbytes, restore=self._restore)

    def _restore(self, packed: Packed) -> Tensor:
        upper: Tensor = packed.tensors["upper"].transpose(1, 2).to(torch.float32)
        return upper

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        if not x.shape[0]:
            return torch.empty_like(x, memory_format=torch.contiguous_format)
        experts = packed.shape[0]
        rows, order, counts, scale = npu().npu_moe_init_routing_v2(
            x.contiguous(),
            ids,
            active_num=ids.numel(),
            expert_num=experts,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            quant_mode=self.rounds,
            active_expert_range=[0, experts],
            row_idx_type=0,
        )
        out = self._multiply(rows, scale, counts, packed.tensors)
        return npu().npu_moe_finalize_routing(  # type: ignore[no-any-return]
            out, None, None, None, weights.to(out.dtype), order, None, drop_pad_mode=2
        )

    def _multiply(
        self, rows: Tensor, scale: Tensor, counts: Tensor, held: dict[str, Tensor]
    ) -> Tensor:
        """Sorted rows through every expert's two matrices."""
        grouped = npu().npu_grouped_matmul
        (hidden,) = grouped([rows], [held["upper"]], group_list=counts, **_GROUPED)
        inner = npu().npu_swiglu(hidden)
        (out,) = grouped([inner], [held["lower"]], group_list=counts, **_GROUPED)
        return out  # type: ignore[no-any-return]


class ExpertsInt8(Experts):
    """Int8 by int8: rows are rounded where they are sorted, and again between the matmuls."""

    tag = "npu.experts_int8"
    rounds = 1  # dynamically, per row

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        # For float16 the op takes no scales of the result's dtype.
        self._scales = torch.bfloat16 if self._dtype == torch.bfloat16 else torch.float32

    def _part(self, weight: Weight) -> tuple[Tensor, Tensor | None]:
        codes, scale = int8.rows(weight)
        return codes.t(), scale.to(self._scales)

    def _restore(self, packed: Packed) -> Tensor:
        scale: Tensor = packed.tensors["upper_scale"].to(torch.float32).unsqueeze(2)
        return super()._restore(packed) * scale

    def _multiply(
        self, rows: Tensor, scale: Tensor, counts: Tensor, held: dict[str, Tensor]
    ) -> Tensor:
        hidden = self._matmul(rows, scale, counts, held["upper"], held["upper_scale"])
        inner, again = npu().npu_dynamic_quant(npu().npu_swiglu(hidden))
        return self._matmul(inner, again, counts, held["lower"], held["lower_scale"])

    def _matmul(
        self, rows: Tensor, per_row: Tensor, counts: Tensor, weight: Tensor, scale: Tensor
    ) -> Tensor:
        (out,) = npu().npu_grouped_matmul(
            [rows],
            [weight],
            scale=[scale],
            per_token_scale=[per_row],
            group_list=counts,
            output_dtype=self._dtype,
            **_GROUPED,
        )
        return out  # type: ignore[no-any-return]


def choose(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Route with npu_moe_gating_top_k: sigmoid scores are normalised by it, softmax scores are not;
    other routings are computed in torch.
    """
    tokens, experts = logits.shape
    paired = routing.method == "noaux_tc"
    fits = routing.renormalize == paired and (routing.scoring == "sigmoid") == paired
    if not tokens or not fits or experts // routing.n_group <= 2:
        return route(logits, bias, routing)
    whole = routing.method == "greedy"
    weights, ids, _ = npu().npu_moe_gating_top_k(
        logits.contiguous(),
        routing.top_k,
        bias=bias if paired else None,
        k_group=1 if whole else routing.topk_group,
        group_count=1 if whole else routing.n_group,
        group_select_mode=int(paired),
        norm_type=int(paired),
        routed_scaling_factor=routing.scale,
        eps=1e-20,
    )
    return with_shared_slots(weights, ids, routing)
