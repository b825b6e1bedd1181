"""vllm-xpu-kernels: routed experts as one remap and two grouped matmuls.

Source of the calls: vllm_xpu_kernels/fused_moe_interface.py of release 0.1.16.2. It tells the
recipe by the dtypes of weights and scales. Weights of 8 and 16 bits lie as [experts, in, out], of 4
bits as [experts, out, in / 2]; gate comes before up. On Arc B-series weights are widened inside the
matmul, and activations stay in the compute dtype.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ds_runtime.api import ExpertSource, Facts, Packed, Weight, fp8_blocks, torch_dtype

_PARTS = ("gate_up", "down")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@cache
def _library() -> Any:
    return import_module("vllm_xpu_kernels.fused_moe_interface")


class ExpertsDense:
    """In the compute dtype."""

    tag = "vllm_xpu.experts_dense"

    def __init__(self, facts: Facts) -> None:
        self._make = _library().XpuFusedMoe
        self._dtype = torch_dtype(facts.dtype)

    def pack(self, source: ExpertSource, facts: Facts) -> Packed:
        tensors: dict[str, Any] = {}
        for e in range(source.num_experts):
            gate, up, down = source.expert(e)
            for name, weight in zip(_PARTS, (Weight((*gate.parts, *up.parts)), down), strict=True):
                for key, part in self._encoded(name, weight).items():
                    if e == 0:
                        tensors[key] = part.new_empty(source.num_experts, *part.shape)
                    tensors[key][e].copy_(part)
        tensors = {key: self._typed(key, part) for key, part in tensors.items()}
        nbytes = sum(t.nbytes for t in tensors.values())
        shape = (source.num_experts, source.hidden, source.intermediate)
        return Packed(self.tag, shape, tensors, nbytes, restore=self._restore)

    def _encoded(self, name: str, weight: Weight) -> dict[str, Tensor]:
        """One expert's tensors; FP8 and FP4 as bytes."""
        return {name: weight.dequantise(self._dtype).T}

    def _typed(self, name: str, tensor: Tensor) -> Tensor:
        """Bytes as the dtype that names the recipe."""
        return tensor

    @staticmethod
    def _restore(packed: Packed) -> Tensor:
        gate_up: Tensor = packed.tensors["gate_up"]
        return gate_up.transpose(1, 2).to(torch.float32)

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if not x.shape[0]:
            return out
        held = packed.tensors
        if "runner" not in held:  # it keeps the weights, and nothing of a call
            held["runner"] = self._make(
                w13=held["gate_up"],
                w13_scales=held.get("gate_up_scale"),
                w13_bias=None,
                w2=held["down"],
                w2_scales=held.get("down_scale"),
                w2_bias=None,
                n_experts_per_token=ids.shape[1],
                activation="silu",
                num_experts=packed.shape[0],
            )
        held["runner"].apply(out, x.contiguous(), weights, ids)
        return out


class ExpertsFp8(ExpertsDense):
    """e4m3 in 128×128 blocks, float32 scales [experts, in / 128, out / 128]."""

    tag = "vllm_xpu.experts_fp8"

    def _encoded(self, name: str, weight: Weight) -> dict[str, Tensor]:
        joined = fp8_blocks.join(weight)
        assert joined is not None, "refuse() lets whole blocks pass alone"
        values, scale = joined
        return {name: values.view(torch.uint8).T, f"{name}_scale": scale.T}

    def _typed(self, name: str, tensor: Tensor) -> Tensor:
        return tensor if name.endswith("_scale") else tensor.view(torch.float8_e4m3fn)

    @staticmethod
    def _restore(packed: Packed) -> Tensor:
        held = packed.tensors
        return fp8_blocks.spread(held["gate_up"], held["gate_up_scale"]).transpose(1, 2)


class ExpertsMxfp8(ExpertsDense):
    """e4m3, a power of two per 32 inputs: scales e8m0 [experts, in / 32, out]."""

    tag = "vllm_xpu.experts_mxfp8"

    def _encoded(self, name: str, weight: Weight) -> dict[str, Tensor]:
        values = torch.cat([p.tensors["weight"].view(torch.uint8) for p in weight.parts])
        return {name: values.T, f"{name}_scale": _exponents(weight).T}

    def _typed(self, name: str, tensor: Tensor) -> Tensor:
        scale = name.endswith("_scale")
        return tensor.view(torch.float8_e8m0fnu if scale else torch.float8_e4m3fn)

    @staticmethod
    def _restore(packed: Packed) -> Tensor:
        held = packed.tensors
        scale = held["gate_up_scale"].to(torch.float32).repeat_interleave(32, 1)
        values: Tensor = held["gate_up"].to(torch.float32) * scale
        return values.transpose(1, 2)


class ExpertsMxfp4(ExpertsDense):
    """e2m1, two to a byte with the first below; scales e8m0 [experts, out, in / 32]."""

    tag = "vllm_xpu.experts_mxfp4"

    def _encoded(self, name: str, weight: Weight) -> dict[str, Tensor]:
        codes = torch.cat([p.tensors["weight"] for p in weight.parts])
        packed = codes[:, 0::2] | codes[:, 1::2] << 4
        return {name: packed, f"{name}_scale": _exponents(weight)}

    def _typed(self, name: str, tensor: Tensor) -> Tensor:
        scale = name.endswith("_scale")
        return tensor.view(torch.float8_e8m0fnu if scale else torch.float4_e2m1fn_x2)

    @staticmethod
    def _restore(packed: Packed) -> Tensor:
        held = packed.tensors
        data = held["gate_up"].view(torch.uint8)
        codes = torch.stack((data & 15, data >> 4), dim=-1).flatten(-2).to(torch.int64)
        values = torch.tensor((*_E2M1, *(-v for v in _E2M1)), device=data.device)[codes]
        scale: Tensor = held["gate_up_scale"].to(torch.float32)
        return values * scale.repeat_interleave(32, -1)


def _exponents(weight: Weight) -> Tensor:
    """The e8m0 bytes of all parts, one below the other: [out, in / 32] uint8."""
    return torch.cat([part.tensors["scale"].view(torch.uint8) for part in weight.parts])
