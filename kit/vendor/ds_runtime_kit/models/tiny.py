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
V3_HEADS: Mapping[str, Any] = {  # of V3's size: those that libraries' attention is made for
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
}
_INDEXED: Mapping[str, Any] = {  # ≥ 16 heads: ReLU makes zeros, and with few heads scores tie
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 24,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "rms_norm_eps": 1e-6,
}
SPARSE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "v32": (
        "DeepseekV32",
        {**_INDEXED, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "glm": (
        "GlmMoeDsa",
        {**_INDEXED, "num_hidden_layers": 5, "index_topk_freq": 2, "index_skip_topk_offset": 2}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 8000.0}}
        | {"rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    ),
}
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
    family, values = {**SHAPES, **SPARSE}[shape]
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


def write_tiny_fp8(folder: Path, shape: str, seed: int = 0, **overrides: Any) -> Any:
    """As write_tiny, but with native 128×128 FP8 weights; the returned model holds their values.

    Scales are float32; every Linear that DeepSeek stores in FP8 is.
    """
    import json

    import torch
    from safetensors.torch import load_file, save_file

    model = write_tiny(folder, shape, seed, **overrides)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [n for n in tensors if _is_fp8(n)]:
        weight, scale = _to_fp8(tensors[name])
        tensors[name] = weight
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (folder / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        _round_model(model)
    return model


def _is_fp8(name: str) -> bool:
    """Whether DeepSeek stores this tensor in FP8: of an indexer all but its heads' weights."""
    ends = ("indexer.wq_b.weight", "indexer.wk.weight")
    own = "_proj" in name and name.endswith(".weight") and ".indexer." not in name
    return own or name.endswith(ends)


def _to_fp8(values: Any) -> tuple[Any, Any]:
    """(e4m3 [rows, cols], float32 scales per 128×128 block, partial ones included)."""
    import torch

    rows, cols = values.shape
    weight = torch.empty(rows, cols, dtype=torch.float8_e4m3fn)
    scale = torch.empty(-(-rows // 128), -(-cols // 128))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
            scale[i, j] = values[block].abs().max() / 448
            weight[block] = (values[block] / scale[i, j]).to(torch.float8_e4m3fn)
    return weight, scale


def _round_model(model: Any) -> None:
    """Replace the weights that write_tiny_fp8 quantises by what their FP8 form means."""

    def rounded(values: Any) -> Any:
        weight, scale = _to_fp8(values)
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return weight.float() * wide[: values.shape[0], : values.shape[1]]

    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            half = parameter.shape[1] // 2
            for expert in parameter:
                expert[:half].copy_(rounded(expert[:half]))
                expert[half:].copy_(rounded(expert[half:]))
        elif name.endswith("experts.down_proj"):
            for expert in parameter:
                expert.copy_(rounded(expert))
        elif _is_fp8(name):
            parameter.copy_(rounded(parameter))
