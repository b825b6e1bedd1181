"""A config.json for pages that show a binding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    values = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 256,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "intermediate_size": 128,
        "max_position_embeddings": 512,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path
