"""FlashInfer's experts written in CuteDSL, on compute capability 10: NVFP4 by NVFP4.

Source of the calls: flashinfer.fused_moe.cute_dsl of release 0.7.2.post1; how it wants its weights
is in prepare_cute_dsl_weights there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_runtime.api import Facts, Packed, Weight
from ds_runtime_cuda import flashinfer_fp4, fp4
from ds_runtime_cuda.flashinfer import _library

_PAIR = 64  # rows of up, and so many of gate behind them


def _paired(values: Tensor) -> Tensor:
    """Rows (all of up, then all of gate) as turns of so many rows of each."""
    halves = values.view(2, -1, _PAIR, values.shape[1])
    return halves.transpose(0, 1).reshape(values.shape)


class ExpertsNvfp4CuteDsl(flashinfer_fp4.Experts):
    """Routed experts through CuteDslMoEWrapper, which is safe to capture; fixed order of sums."""

    tag = "cuda.flashinfer_cute_nvfp4_experts"

    def __init__(self, facts: Facts) -> None:
        self._lib = _library()
        self._make = _library("flashinfer.fused_moe").CuteDslMoEWrapper
        self._tiles = _library("flashinfer.cute_dsl").convert_sf_to_mma_layout
        self._captured = facts.graph_capture
        self._runner: Any = None  # it knows sizes, and no weights

    def _one(self, name: str, weight: Weight) -> dict[str, Tensor]:
        (scale, top), codes = fp4.scales(weight), fp4.codes(weight)
        if name == "upper":
            codes = _paired(codes)
            scale = _paired(scale.view(torch.uint8))
        swizzled = flashinfer_fp4.swizzled(scale)
        top_ = torch.tensor(top, device=codes.device)
        return {name: codes, f"{name}_scale": swizzled, f"{name}_top": top_}

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        if not x.shape[0]:
            return torch.empty_like(x)
        held, (experts, hidden, inter) = packed.tensors, packed.shape
        if self._runner is None:
            self._runner = self._make(
                num_experts=experts,
                top_k=ids.shape[1],
                hidden_size=hidden,
                intermediate_size=inter,
                use_cuda_graph=self._captured,
                device=str(x.device),
                use_fused_finalize=False,  # that one adds in any order
                quant_mode="w4a4",
            )
        inward = fp4.TOP / x.abs().amax().to(torch.float32).clamp(min=1e-30).nan_to_num(1.0)
        outward = fp4.TOP / held["largest"].amax()  # one for all experts
        linear = self._lib.SfLayout.layout_linear
        q, scale = self._lib.nvfp4_quantize(x.contiguous(), inward.view(1), sfLayout=linear)
        out: Tensor = self._runner.run(
            q,
            scale,
            ids,
            weights,
            held["upper"],
            self._tiles(held["upper_scale"].flatten(0, 1), 2 * inter, hidden, experts),
            held["upper_top"] / inward,
            outward.view(1),
            held["lower"],
            self._tiles(held["lower_scale"].flatten(0, 1), hidden, inter, experts),
            held["lower_top"] / outward,
        )
        return out
