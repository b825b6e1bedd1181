"""Rotation angles by position: plain RoPE, or YaRN (arXiv 2309.00071) as DeepSeek configures it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ds_runtime.description.config import ModelConfig, Yarn
from ds_runtime.description.tree import Stored


def cos_sin_table(config: ModelConfig, positions: int, device: Any) -> Tensor:
    """[positions, rope] float32: cos in the first half of the columns, sin in the second.

    Computed in float64. Under YaRN the frequencies are always the scaled ones, whatever the
    context, and cos and sin carry the factor m(mscale) / m(mscale_all_dim).
    """
    frequencies = inverse_frequencies(config)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1) * amplitude(config)
    return table.to(device=device, dtype=torch.float32)


def amplitude(config: ModelConfig) -> float:
    """What cos and sin are multiplied by: 1 for every DeepSeek model so far.

    It is m(1) unless both mscale and mscale_all_dim are stated, as in transformers.
    """
    yarn = config.yarn
    if yarn is None:
        return 1.0
    if not yarn.mscale:
        return yarn.multiplier(1.0)
    return yarn.multiplier(yarn.mscale) / yarn.multiplier(yarn.mscale_all_dim)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each rotated pair: [rope / 2] float64."""
    dim = config.qk_rope
    pairs = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    plain = config.rope_theta**-pairs
    if config.yarn is None:
        return plain
    keep = 1 - _ramp(config.yarn, dim, config.rope_theta)  # 1: fast pairs stay as they are
    return plain / config.yarn.factor * (1 - keep) + plain * keep


def _ramp(yarn: Yarn, dim: int, theta: float) -> Tensor:
    """0 for pairs that turn often within the original context, 1 for slow ones: [dim / 2]."""

    def pair_of(rotations: float) -> float:
        return dim * math.log(yarn.original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high: float = min(math.ceil(pair_of(yarn.beta_slow)), dim - 1)
    if low == high:
        high += 0.001
    steps = torch.arange(dim // 2, dtype=torch.float64)
    return ((steps - low) / (high - low)).clamp(0, 1)


def paired_rows(config: ModelConfig, stored: Stored, rows: int) -> Tensor | None:
    """The checkpoint's row for each row of a rank's weight, where its rotated dims are not stored
    as pairs, but as all first halves before all second ones. None for any other weight.
    """
    if config.rope_interleave or not (head := stored.rotated):
        return None
    plain, half = head - config.qk_rope, config.qk_rope // 2
    pairs = plain + torch.arange(config.qk_rope).view(2, half).T.reshape(-1)
    order = torch.cat((torch.arange(plain), pairs))  # new row → old row, within a head
    heads = torch.arange(rows // head)
    return (heads[:, None] * head + order).reshape(-1)
