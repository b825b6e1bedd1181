"""Rotation tables against transformers' own rotary modules."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2RotaryEmbedding
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from ds_runtime.model.hf import from_hf
from ds_runtime.model.rope import amplitude, cos_sin_table
from ds_runtime.testing.tiny import config_dict

SCALINGS = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"mscale": 0.707, "mscale_all_dim": 0.707},
    {"mscale": 1.0, "mscale_all_dim": 1.0, "factor": 40.0},
    {"mscale": 1.0, "mscale_all_dim": 0.707},
    {"mscale": 0.5, "mscale_all_dim": 1.3, "rope_theta": 50000.0, "factor": 64.0},
    {"beta_fast": 2.0, "beta_slow": 2.0},
    {"factor": 1.0},
]


@pytest.mark.parametrize("dim", [6, 64])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("family", ["v2", "v3"])
def test_table(family, scaling, dim):
    base = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0}
    base |= {"original_max_position_embeddings": 64}
    parameters = scaling if scaling.get("rope_type") == "default" else {**base, **scaling}
    _, values = config_dict(family, rope_parameters=parameters, qk_rope_head_dim=dim)
    cls = {"v2": DeepseekV2Config, "v3": DeepseekV3Config}[family]
    config = cls(**values, architectures=[f"Deepseek{family.upper()}ForCausalLM"])
    ours = cos_sin_table(from_hf(config.to_dict()), 700, torch.device("cpu"))
    assert ours.shape == (700, dim) and ours.dtype == torch.float32
    positions, x = torch.arange(700)[None], torch.zeros(1, 1, dtype=torch.float32)
    if family == "v2":
        complex_table = DeepseekV2RotaryEmbedding(config)(x, positions)[0]
        theirs = torch.cat((complex_table.real, complex_table.imag), -1)
    else:
        cos, sin = DeepseekV3RotaryEmbedding(config)(x, positions)
        theirs = torch.cat((cos[0, :, : dim // 2], sin[0, :, : dim // 2]), -1)
    # Theirs multiplies float32 frequencies by positions up to 700.
    assert (ours - theirs).abs().max() < 2e-4


def test_amplitude_is_one_for_equal_mscales():
    _, values = config_dict("v3")
    raw = {**values, "architectures": ["DeepseekV3ForCausalLM"]}
    assert amplitude(from_hf(raw)) == 1.0
