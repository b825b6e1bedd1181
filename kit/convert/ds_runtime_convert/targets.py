"""What checkpoints can be converted to: the quantization_config that is written. Torch-free.

A target says nothing else. How each Linear is stored follows from that config, read by the same
loader that reads the result later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ds_runtime.description.structure import JOIN, KV_B
from ds_runtime.description.tree import COMPRESSOR, HEADS, Stored
from ds_runtime.errors import UnsupportedError

_NEVER = [
    *HEADS,
    r"re:.*mlp\.gate$",
    rf"re:.*{JOIN}$",
    r"re:.*weights_proj$",
    rf"re:.*{COMPRESSOR}\.w(kv|gate)$",
]
_KV_B = rf"re:.*{KV_B}$"  # small, and decode multiplies by it from both sides


@dataclass(frozen=True, slots=True)
class Target:
    """quantization: of config.json; beside: the content of hf_quant_config.json. group: columns
    that a Linear's must be a multiple of, or it stays as it is. half_scales: scales are stored in
    the checkpoint's dtype, as readers of the format expect.
    """

    name: str
    summary: str
    quantization: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, Any] = field(default_factory=dict)
    group: int = 1
    half_scales: bool = False

    def files(self, kept: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(quantization_config, hf_quant_config.json); either may be empty. kept: more modules
        that stay as they are."""
        stated = dict(self.quantization)
        if more := sorted(kept):
            stated["ignore"] = [*stated["ignore"], *more]
        return stated, dict(self.beside)

    def kept(self, linears: Iterable[Stored]) -> list[str]:
        """The Linears whose columns the format's groups do not divide."""
        return [s.module for s in linears if s.shape[1] % self.group]


def _compressed(format: str, ignore: list[str], weights: dict[str, Any], inputs: Any = None) -> Any:
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": ignore,
        "config_groups": {"group_0": {**scheme, "output_activations": None}},
    }


def _weights(bits: int, kind: str, strategy: str, group: int | None = None) -> dict[str, Any]:
    size = {} if group is None else {"group_size": group}
    base = {"num_bits": bits, "type": kind, "strategy": strategy, **size}
    return {**base, "symmetric": True, "dynamic": False}


_BY_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
_INT4 = _weights(4, "int", "group", 128)
_FP4 = _weights(4, "float", "tensor_group", 16)
_MX4, _MX8 = (_weights(bits, "float", "group", 32) for bits in (4, 8))
_FOUR = [*_NEVER, _KV_B]
_ALL = (
    Target("bf16", "numbers in bfloat16"),
    Target(
        "fp8",
        "native FP8: e4m3, a float32 scale per 128×128 block",
        {**_FP8, "weight_block_size": [128, 128]},
    ),
    Target(
        "int8",
        "int8, a scale per row (compressed-tensors int-quantized)",
        _compressed("int-quantized", _NEVER, _weights(8, "int", "channel"), _BY_TOKEN),
        half_scales=True,
    ),
    Target(
        "w4a16",
        "int4, a scale per 128 columns (compressed-tensors pack-quantized)",
        _compressed("pack-quantized", _FOUR, _INT4),
        group=128,
        half_scales=True,
    ),
    Target(
        "w4afp8",
        "routed experts int4 by 128 columns, not calibrated; all else native FP8",
        beside={"quantization": {"quant_algo": "MIXED_PRECISION", "group_size": 128}},
    ),
    Target(
        "nvfp4",
        "e2m1, an e4m3 scale per 16 columns (compressed-tensors nvfp4-pack-quantized)",
        _compressed("nvfp4-pack-quantized", _FOUR, _FP4),
        group=16,
    ),
    Target(
        "mxfp4",
        "e2m1, a power of two per 32 columns (compressed-tensors mxfp4-pack-quantized)",
        _compressed("mxfp4-pack-quantized", _FOUR, _MX4),
        group=32,
    ),
    Target(
        "mxfp8",
        "e4m3, a power of two per 32 columns (compressed-tensors mxfp8-quantized)",
        _compressed("mxfp8-quantized", _NEVER, _MX8),
        group=32,
    ),
)
TARGETS: Mapping[str, Target] = {t.name: t for t in _ALL}


def find_target(name: str) -> Target:
    """The target of that name; UnsupportedError lists all."""
    if name not in TARGETS:
        raise UnsupportedError(f"--to {name}: is none of {', '.join(TARGETS)}")
    return TARGETS[name]
