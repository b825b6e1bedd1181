"""FlashInfer's FP4 and MXFP8 matmuls on compute capability 10, which has matrix units of both.

Activations are rounded where they are multiplied: to NVFP4 by NVFP4 weights, to MXFP8 by MXFP8 and
MXFP4 weights. Sources: flashinfer.gemm, flashinfer.quantization and flashinfer.fused_moe of release
0.7.2.post1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.api import ExpertSource, Facts, Packed, Weight
from ds_runtime_cuda import fp4
from ds_runtime_cuda.flashinfer import _library

_TILE = 128  # rows of the library's epilogue, in whose order weights are shuffled
_LARGEST = 512.0  # of silu(gate) · up, where the checkpoint does not say: below is no saturation


def swizzled(scale: Tensor) -> Tensor:
    """Scales [rows, groups] in tiles of 128 × 4, as the library lays them out: 2-D, padded."""
    rows, groups = scale.shape
    flat: Tensor = _library().block_scale_interleave(scale.contiguous().view(torch.uint8))
    return flat.view(-(-rows // 128) * 128, -(-groups // 4) * 4)


def _plain(swizzled: Tensor, rows: int, groups: int) -> Tensor:
    """[rows, groups] uint8 again."""
    high, wide = swizzled.shape
    tiles = swizzled.reshape(high // 128, wide // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(high, wide)[:rows, :groups]


def _restore_dense(packed: Packed) -> Tensor:
    held: Tensor = packed.tensors["dense"]
    return held.to(torch.float32)


def _packed(tag: str, shape: tuple[int, ...], tensors: dict[str, Tensor], restore: Any) -> Packed:
    return Packed(tag, shape, dict(tensors), sum(t.nbytes for t in tensors.values()), restore)


class _Linear:
    """What the linears below share: shards that cut a group are held in bfloat16."""

    tag, group = "", 0

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        if fp4.aligned(weight, self.group):
            return self._pack(weight)
        held = weight.dequantise(torch.bfloat16)
        return Packed(self.tag, weight.shape, {"dense": held}, held.nbytes, _restore_dense)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        if "dense" in packed.tensors:
            return F.linear(x, packed.tensors["dense"])
        if not x.shape[0]:
            return x.new_empty(0, packed.shape[0])
        return self._apply(x, packed.tensors)

    def _pack(self, weight: Weight) -> Packed:
        raise NotImplementedError

    def _apply(self, x: Tensor, held: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError


class LinearNvfp4(_Linear):
    """y = x · Wᵀ in NVFP4. Every row of x is first divided by the power of two above it."""

    tag, group = "cuda.flashinfer_nvfp4_linear", 16

    def __init__(self, facts: Facts) -> None:
        self._lib, self._gemm = _library(), _library("flashinfer.gemm").mm_fp4

    def _pack(self, weight: Weight) -> Packed:
        scale, top = fp4.scales(weight)
        made = {
            "weight": fp4.codes(weight),
            "scale": swizzled(scale),
            "alpha": torch.full((1,), top / fp4.TOP, device=scale.device),
            "top": torch.full((1,), fp4.TOP, device=scale.device),
        }
        return _packed(self.tag, weight.shape, made, _restore_nvfp4)

    def _apply(self, x: Tensor, held: dict[str, Tensor]) -> Tensor:
        most = x.abs().amax(-1, keepdim=True).to(torch.float32).clamp(min=1e-30)
        size = torch.exp2(torch.ceil(torch.log2(most)))  # [tokens, 1]
        q, scale = self._lib.nvfp4_quantize(
            (x / size).to(x.dtype), held["top"], sfLayout=self._lib.SfLayout.layout_128x4
        )
        out: Tensor = self._gemm(
            q,
            held["weight"].T,
            scale,
            held["scale"].T,
            held["alpha"],
            out_dtype=torch.bfloat16,
        )
        return (out * size).to(x.dtype)


def _restore_nvfp4(packed: Packed) -> Tensor:
    held, (rows, cols) = packed.tensors, packed.shape
    scale = _plain(held["scale"], rows, cols // 16).contiguous().view(torch.float8_e4m3fn)
    values: Tensor = fp4.wide(held["weight"], scale, 16) * (held["alpha"] * fp4.TOP)
    return values


class LinearMxfp8(_Linear):
    """y = x · Wᵀ in MXFP8."""

    tag, group = "cuda.flashinfer_mxfp8_linear", 32

    def __init__(self, facts: Facts) -> None:
        self._lib, self._gemm = _library(), _library("flashinfer.gemm").mm_mxfp8

    def _pack(self, weight: Weight) -> Packed:
        values = torch.cat([p.tensors["weight"].view(torch.uint8) for p in weight.parts])
        made = {
            "weight": values.view(torch.float8_e4m3fn),
            "scale": swizzled(fp4.exponents(weight)),
        }
        return _packed(self.tag, weight.shape, made, _restore_mxfp8)

    def _apply(self, x: Tensor, held: dict[str, Tensor]) -> Tensor:
        q, scale = self._lib.mxfp8_quantize(x.contiguous(), is_sf_swizzled_layout=True)
        return self._gemm(  # type: ignore[no-any-return]
            q, held["weight"].T, scale, held["scale"].flatten(), out_dtype=torch.bfloat16
        )


def _restore_mxfp8(packed: Packed) -> Tensor:
    held, (rows, cols) = packed.tensors, packed.shape
    scale = _plain(held["scale"], rows, cols // 32).contiguous().view(torch.float8_e8m0fnu)
    scale = scale.to(torch.float32).repeat_interleave(32, -1)
    values: Tensor = held["weight"].to(torch.float32) * scale
    return values


class Experts:
    """What the experts below share: tensors of one expert after another, and their scalars."""

    tag = ""

    def pack(self, source: ExpertSource, facts: Facts) -> Packed:
        tensors: dict[str, Tensor] = {}
        for e in range(source.num_experts):
            gate, up, down = source.expert(e)
            upper = Weight((*up.parts, *gate.parts))  # the library wants up first
            one = {**self._one("upper", upper), **self._one("lower", down)}
            one["largest"] = torch.tensor(_largest(down), device=one["upper"].device)
            for name, part in one.items():
                if e == 0:
                    tensors[name] = part.new_empty(source.num_experts, *part.shape)
                tensors[name][e].copy_(part)
        shape = (source.num_experts, source.hidden, source.intermediate)
        return _packed(self.tag, shape, tensors, None)

    def _one(self, name: str, weight: Weight) -> dict[str, Tensor]:
        raise NotImplementedError


def _largest(down: Weight) -> float:
    """The largest input of `down` that FP4 is to hold: as calibrated, where the checkpoint says."""
    told = [float(p.tensors["input_scale"]) for p in down.parts if "input_scale" in p.tensors]
    return max(told) * fp4.TOP if told else _LARGEST


def _shuffled(lib: Any, name: str, codes: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Codes and scales in TensorRT-LLM's order of rows; of `upper`, the halves are woven first."""
    scale = scale.contiguous().view(torch.uint8)
    if name == "upper":
        codes = lib.reorder_rows_for_gated_act_gemm(codes)
        scale = lib.reorder_rows_for_gated_act_gemm(scale)
    woven = lib.shuffle_matrix_sf_a(scale, _TILE)
    return {
        name: lib.shuffle_matrix_a(codes.contiguous(), _TILE),
        f"{name}_scale": woven.view(torch.uint8).view(scale.shape),
    }


def _first(out: Any) -> Tensor:
    """The library returns a list of one tensor."""
    result: Tensor = out[0] if isinstance(out, list | tuple) else out
    return result


class _Trtllm(Experts):
    """TensorRT-LLM's fused kernels."""

    def __init__(self, facts: Facts) -> None:
        self._lib = _library()
        self._moe = _library("flashinfer.fused_moe").trtllm_fp4_block_scale_routed_moe

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        if not x.shape[0]:
            return torch.empty_like(x)
        held, (experts, _, inter) = packed.tensors, packed.shape
        q, scale, (gate, up, down) = self._quantised(x, held)
        out = self._moe(
            topk_ids=(ids, weights),
            routing_bias=None,
            hidden_states=q,
            hidden_states_scale=scale,
            gemm1_weights=held["upper"],
            gemm1_weights_scale=held["upper_scale"].view(torch.float8_e4m3fn),
            gemm1_bias=None,
            gemm1_alpha=None,
            gemm1_beta=None,
            gemm1_clamp_limit=None,
            gemm2_weights=held["lower"],
            gemm2_weights_scale=held["lower_scale"].view(torch.float8_e4m3fn),
            gemm2_bias=None,
            output1_scale_scalar=up,
            output1_scale_gate_scalar=gate,
            output2_scale_scalar=down,
            num_experts=experts,
            top_k=ids.shape[1],
            n_group=None,
            topk_group=None,
            intermediate_size=inter,
            local_expert_offset=0,
            local_num_experts=experts,
            routed_scaling_factor=None,
            hidden_states_scale_layout=self._lib.SfLayout.layout_linear,
        )
        return _first(out)

    def _quantised(
        self, x: Tensor, held: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
        """x in few bits, its scales, and the factors of gate, up and down, if there are some."""
        raise NotImplementedError


class ExpertsNvfp4(_Trtllm):
    """Routed experts in NVFP4 with TensorRT-LLM's fused kernels."""

    tag = "cuda.flashinfer_trtllm_nvfp4_experts"

    def _one(self, name: str, weight: Weight) -> dict[str, Tensor]:
        scale, top = fp4.scales(weight)
        made = _shuffled(self._lib, name, fp4.codes(weight), scale)
        return made | {f"{name}_top": torch.tensor(top, device=scale.device)}

    def _quantised(
        self, x: Tensor, held: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
        linear = self._lib.SfLayout.layout_linear
        inward = fp4.TOP / x.abs().amax().to(torch.float32).clamp(min=1e-30).nan_to_num(1.0)
        outward = fp4.TOP / held["largest"]  # [experts]: the scale of silu(gate) · up
        q, scale = self._lib.nvfp4_quantize(x.contiguous(), inward.view(1), sfLayout=linear)
        gate = held["upper_top"] / inward
        return (
            q,
            scale.view(torch.float8_e4m3fn),
            (gate, gate * outward, held["lower_top"] / outward),
        )


class ExpertsMxfp4(_Trtllm):
    """Routed experts with MXFP4 weights and MXFP8 activations, TensorRT-LLM's fused kernels."""

    tag = "cuda.flashinfer_trtllm_mxfp4_experts"

    def _one(self, name: str, weight: Weight) -> dict[str, Tensor]:
        return _shuffled(self._lib, name, fp4.codes(weight), fp4.exponents(weight))

    def _quantised(
        self, x: Tensor, held: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
        q, scale = self._lib.mxfp8_quantize(x.contiguous(), is_sf_swizzled_layout=False)
        return q, scale.view(torch.float8_e4m3fn).view(-1, x.shape[1] // 32), (None, None, None)


class ExpertsNvfp4Cutlass(Experts):
    """Routed experts in NVFP4 with CUTLASS's fused kernels, sums in a fixed order."""

    tag = "cuda.flashinfer_cutlass_nvfp4_experts"

    def __init__(self, facts: Facts) -> None:
        self._moe = _library("flashinfer.fused_moe").cutlass_fused_moe

    def _one(self, name: str, weight: Weight) -> dict[str, Tensor]:
        scale, top = fp4.scales(weight)
        top_ = torch.tensor(top, device=scale.device)
        return {name: fp4.codes(weight), f"{name}_scale": swizzled(scale), f"{name}_top": top_}

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        if not x.shape[0]:
            return torch.empty_like(x)
        held = packed.tensors
        inward = fp4.TOP / x.abs().amax().to(torch.float32).clamp(min=1e-30).nan_to_num(1.0)
        outward = fp4.TOP / held["largest"].amax()  # one for all experts
        out = self._moe(
            x.contiguous(),
            ids,
            weights,
            held["upper"].view(torch.int64),
            held["lower"].view(torch.int64),
            x.dtype,
            [
                inward,
                held["upper_scale"].view(torch.int32),
                held["upper_top"] / inward,
                outward,
                held["lower_scale"].view(torch.int32),
                held["lower_top"] / outward,
            ],
            use_fused_finalize=False,
        )
        return _first(out)
