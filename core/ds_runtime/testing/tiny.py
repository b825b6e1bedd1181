"""Tiny random checkpoints as transformers writes them, for tests of the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
_COMMON: Mapping[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": YARN,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_V3 = "DeepseekV3"
SHAPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "v2": (
        "DeepseekV2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
        | {"routed_scaling_factor": 16.0},
    ),
    "v2-lite": (
        "DeepseekV2",
        {"topk_method": "greedy", "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    ),
    "v3": (
        _V3,
        {"n_group": 4, "topk_group": 2, "n_shared_experts": 1, "rms_norm_eps": 1e-6}
        | {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "factor": 40.0}}
        | {"max_position_embeddings": 2560},
    ),
    "kimi": (
        _V3,
        {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 2.827}
        | {"rope_parameters": {**YARN, "rope_theta": 50000.0, "mscale": 1.0, "factor": 64.0}}
        | {"max_position_embeddings": 4096},
    ),
    "odd": (
        _V3,
        {"n_group": 3, "topk_group": 2, "n_routed_experts": 15, "num_experts_per_tok": 5}
        | {"hidden_size": 45, "num_attention_heads": 3, "num_key_value_heads": 3}
        | {"q_lora_rank": 29, "kv_lora_rank": 37, "qk_nope_head_dim": 11, "qk_rope_head_dim": 6}
        | {"v_head_dim": 13, "intermediate_size": 51, "moe_intermediate_size": 23}
        | {"norm_topk_prob": False, "rope_interleave": False, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}},
    ),
}


def config_dict(shape: str, **overrides: Any) -> tuple[str, dict[str, Any]]:
    """(family, config values) of a named shape."""
    family, values = SHAPES[shape]
    return family, {**_COMMON, **values, **overrides}


def make_model(shape: str, seed: int = 0, **overrides: Any) -> Any:
    """A random transformers model in float32, weights large enough that logits differ."""
    import torch
    import transformers

    family, values = config_dict(shape, **overrides)
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**values)
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                parameter.copy_(torch.randn(parameter.shape) * 0.3 - 0.5)
            elif "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape))
            elif "inv_freq" not in name:
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5 * 1.3)
    return model


def write_tiny(folder: Path, shape: str, seed: int = 0, **overrides: Any) -> Any:
    """Save a tiny model of that shape to `folder`; returns it, in float32.

    The folder holds config.json and safetensors, no tokenizer.
    """
    model = make_model(shape, seed, **overrides)
    model.save_pretrained(folder)
    return model
