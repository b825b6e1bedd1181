"""Linears in every published quantisation, written without the reader's code.

Each writer turns a Linear's float32 values into the tensors of its format and the values that they
mean: by compressed-tensors where that is its format, else by numpy after the format's description.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
    MXFP4PackedCompressor,
    MXFP8QuantizationCompressor,
    NVFP4PackedCompressor,
    PackedQuantizationCompressor,
    unpack_fp4_from_uint8,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from torch import Tensor

Tensors = dict[str, Tensor]
Writer = Callable[[str, np.ndarray], tuple[Tensors, np.ndarray]]  # module, values → tensors, values
GROUP = 32
_NAMES = ("gate_proj", "up_proj", "down_proj")


def grid_max(values: np.ndarray, height: int, width: int) -> np.ndarray:
    """The largest magnitude of each block."""
    rows, cols = values.shape
    padded = np.zeros((-(-rows // height) * height, -(-cols // width) * width))
    padded[:rows, :cols] = abs(values)
    return padded.reshape(padded.shape[0] // height, height, -1, width).max((1, 3)) + 1e-9


def spread(grid: np.ndarray, shape: tuple[int, int], height: int, width: int) -> np.ndarray:
    """One entry per element."""
    return grid.repeat(height, 0).repeat(width, 1)[: shape[0], : shape[1]]


def t(array: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous tensor of numpy's bytes, seen as `dtype`."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if dtype is None else tensor.view(dtype)


def e4m3(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).astype(ml_dtypes.float8_e4m3fn)


def fp8(scale: str = "float", name: str = "weight_scale_inv", block: tuple[int, int] = (128, 128)):
    """Native blocks; scale: float, powers (of two, in float32), byte or e8m0."""

    def write(module: str, values: np.ndarray) -> tuple[Tensors, np.ndarray]:
        grid = (grid_max(values, *block) / 448).astype(np.float32)
        byte = np.ceil(np.log2(grid)).astype(np.int64) + 127
        if scale != "float":
            grid = np.exp2(byte - 127.0).astype(np.float32)
        wide = spread(grid, values.shape, *block)
        codes = e4m3(values / wide)
        stored = t(grid) if scale in ("float", "powers") else t(byte.astype(np.uint8))
        stored = stored.view(torch.float8_e8m0fnu) if scale == "e8m0" else stored
        weight = t(codes.view(np.uint8), torch.float8_e4m3fn)
        return {"weight": weight, name: stored}, codes.astype(np.float32) * wide

    return write


def int8(height: int, name: str):
    """Blocks of 128, or rows (height 1)."""

    def write(module: str, values: np.ndarray) -> tuple[Tensors, np.ndarray]:
        width = 128 if height > 1 else values.shape[1]
        grid = (grid_max(values, height, width) / 127).astype(np.float32)
        wide = spread(grid, values.shape, height, width)
        codes = np.rint(values / wide).astype(np.int8)
        return {"weight": t(codes), name: t(grid)}, codes * wide

    return write


def asymmetric(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes 0 … 15, zero points, scales in fp16) in groups of columns."""
    groups = values.reshape(values.shape[0], -1, GROUP)
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    scale = ((high - low) / 15 + 1e-6).astype(np.float16)
    zero = np.clip(np.rint(-low / scale), 1, 15).astype(np.int64)
    codes = np.rint(groups / scale[..., None].astype(np.float64)) + zero[..., None]
    return np.clip(codes, 0, 15).astype(np.int64).reshape(values.shape), zero, scale


def words(codes: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """[n, 8m] → [n, m] int32; nibble i of a word is element order[i]."""
    eights = codes.reshape(codes.shape[0], -1, 8).astype(np.uint32)
    packed = np.zeros(eights.shape[:2], np.uint32)
    for nibble, element in enumerate(order):
        packed |= eights[:, :, element] << np.uint32(4 * nibble)
    return packed.view(np.int32)


def meaning(codes: np.ndarray, zero: np.ndarray, scale: np.ndarray) -> np.ndarray:
    groups = codes.reshape(codes.shape[0], -1, GROUP) - zero[..., None]
    return (groups * scale[..., None].astype(np.float32)).reshape(codes.shape)


def awq(module: str, values: np.ndarray) -> tuple[Tensors, np.ndarray]:
    codes, zero, scale = asymmetric(values)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": t(words(codes.T, order)),
        "qzeros": t(words(zero.T, order)),
        "scales": t(scale.T),
    }
    return tensors, meaning(codes, zero, scale)


def gptq(act_order: bool, version: int = 1):
    def write(module: str, values: np.ndarray) -> tuple[Tensors, np.ndarray]:
        cols = values.shape[1]
        order = np.random.default_rng(cols).permutation(cols) if act_order else np.arange(cols)
        codes, zero, scale = asymmetric(values[:, order])  # groups of the columns in that order
        back = np.argsort(order)
        meant = meaning(codes, zero, scale)[:, back]
        tensors = {
            "qzeros": t(words(zero.T - (version == 1))),
            "scales": t(scale.T),
            "g_idx": t((back // GROUP).astype(np.int32)),
        }
        tensors["qweight"] = t(words(codes[:, back]).T)  # eight columns to a word
        return tensors, meant

    return write


def nibbles(codes: np.ndarray) -> np.ndarray:
    """[n, 2m] → [n, m] uint8, the even column low."""
    codes = codes.astype(np.uint8) & 15
    return codes[:, ::2] | codes[:, 1::2] << 4


def w4afp8(module: str, values: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """Groups of 128, a partial one at the end; two's complement."""
    scale = (grid_max(values, 1, 128) / 7).astype(np.float32)
    scale = scale.astype(ml_dtypes.bfloat16)
    wide = spread(scale.astype(np.float32), values.shape, 1, 128)
    codes = np.clip(np.rint(values / wide), -8, 7).astype(np.int8)
    bits = t(scale.view(np.int16), torch.bfloat16)
    old = dict(zip(_NAMES, ("w1", "w3", "w2"), strict=True))[module.rpartition(".")[2]]
    tensors = {"weight": t(nibbles(codes)).view(torch.int8), "weight_scale_inv": bits}
    tensors[f"../{old}.input_scale"] = torch.tensor([0.02], dtype=torch.bfloat16)
    return tensors, codes * wide


def e2m1(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).astype(ml_dtypes.float4_e2m1fn)


def nvfp4(module: str, values: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """ModelOpt: weight_scale_2 multiplies."""
    whole = np.float32(abs(values).max() / (6 * 448))
    scale = e4m3(grid_max(values, 1, 16) / 6 / whole)
    wide = spread(scale.astype(np.float32) * whole, values.shape, 1, 16)
    codes = e2m1(values / wide)
    tensors = {
        "weight": t(nibbles(codes.view(np.uint8))),
        "weight_scale": t(scale.view(np.uint8), torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(float(whole)),
        "input_scale": torch.tensor(0.004),
    }
    return tensors, codes.astype(np.float32) * wide


def mxfp4(module: str, values: np.ndarray) -> tuple[Tensors, np.ndarray]:
    byte = (np.ceil(np.log2(grid_max(values, 1, 32) / 6)) + 127).astype(np.uint8)
    wide = spread(byte.view(ml_dtypes.float8_e8m0fnu).astype(np.float32), values.shape, 1, 32)
    codes = e2m1(values / wide)
    tensors = {"weight": t(nibbles(codes.view(np.uint8))), "weight_scale": t(byte)}
    return tensors, codes.astype(np.float32) * wide


def fp8_tensor(module: str, values: np.ndarray) -> tuple[Tensors, np.ndarray]:
    scale = np.float32(abs(values).max() / 448)
    codes = e4m3(values / scale)
    tensors = {
        "weight": t(codes.view(np.uint8), torch.float8_e4m3fn),
        "weight_scale": torch.tensor(float(scale)),
        "input_scale": torch.tensor(0.5),
    }
    return tensors, codes.astype(np.float32) * scale


def _scheme(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, **more}


_INT4, _INT8, _FLOAT8 = "pack-quantized", "int-quantized", "float-quantized"
_PACKED, _FLOAT = PackedQuantizationCompressor, FloatQuantizationCompressor
_TWO = {"group_size": 32, "symmetric": False}
COMPRESSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "int4": (_PACKED, _scheme(4, "int", "group", group_size=32), _INT4),
    "int4-channel": (_PACKED, _scheme(4, "int", "channel"), _INT4),
    "int4-zeros": (_PACKED, _scheme(4, "int", "group", **_TWO), _INT4),
    "int8": (IntQuantizationCompressor, _scheme(8, "int", "channel"), _INT8),
    "int8-zeros": (
        IntQuantizationCompressor,
        _scheme(8, "int", "channel", symmetric=False),
        _INT8,
    ),
    "int8-packed": (_PACKED, _scheme(8, "int", "channel"), _INT4),
    "int8-packed-zeros": (_PACKED, _scheme(8, "int", "group", **_TWO), _INT4),
    "fp8-tensor": (_FLOAT, _scheme(8, "float", "tensor"), _FLOAT8),
    "fp8-channel": (_FLOAT, _scheme(8, "float", "channel"), _FLOAT8),
    "fp8-block": (_FLOAT, _scheme(8, "float", "block", block_structure=[128, 128]), _FLOAT8),
    "nvfp4": (
        NVFP4PackedCompressor,
        _scheme(4, "float", "tensor_group", group_size=16),
        "nvfp4-pack-quantized",
    ),
    "mxfp4": (
        MXFP4PackedCompressor,
        _scheme(4, "float", "group", group_size=32),
        "mxfp4-pack-quantized",
    ),
    "mxfp8": (
        MXFP8QuantizationCompressor,
        _scheme(8, "float", "group", group_size=32),
        "mxfp8-quantized",
    ),
}


def compressed(kind: str) -> Writer:
    """As compressed-tensors writes and reads it."""
    compressor, arguments, _ = COMPRESSED[kind]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))

    def write(module: str, values: np.ndarray) -> tuple[Tensors, np.ndarray]:
        weight = torch.from_numpy(values).float()
        strategy = arguments["strategy"]
        state = {"weight": weight}
        largest = 7 if arguments["type"] == "int" else 6
        largest = largest if arguments["num_bits"] == 4 else 127 if largest == 7 else 448
        if strategy == "tensor":
            scale = torch.tensor([float(abs(values).max())]) / largest
        elif strategy == "block":
            scale = torch.from_numpy(grid_max(values, 128, 128)).float() / largest
        else:
            width = arguments.get("group_size") or values.shape[1]
            scale = torch.from_numpy(grid_max(values, 1, width)).float() / largest
        if kind.startswith("mx"):
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        if kind == "nvfp4":
            whole = torch.tensor([6 * 448 / float(abs(values).max())])
            scale = (scale * whole).to(torch.float8_e4m3fn).float()
            state["weight_global_scale"] = whole
        if kind.endswith("zeros"):
            draw = torch.Generator().manual_seed(values.size)
            zero = torch.randint(-4, 4, scale.shape, generator=draw, dtype=torch.int8)
            state["weight_zero_point"] = zero
        packed = compressor.compress({**state, "weight_scale": scale}, scheme)
        if arguments["num_bits"] == 4 and arguments["type"] == "float":  # theirs rounds to bf16
            codes = unpack_fp4_from_uint8(packed["weight_packed"], *weight.shape, torch.float32)
            whole = state.get("weight_global_scale")
            made = dequantize(codes, scale, args=scheme.weights, global_scale=whole)
            back = made.float().numpy()
        else:
            back = compressor.decompress(packed, scheme)["weight"].float().numpy()
        return {name: tensor.data for name, tensor in packed.items()}, back

    return write


def compressed_config(kind: str, ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    _, weights, format = COMPRESSED[kind]
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": ["lm_head", *ignore],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
