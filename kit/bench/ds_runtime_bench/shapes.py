"""config.json of the random checkpoints that benchmarks and tests run on. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_runtime.errors import ConfigError


def _yarn(mscale: float, original: int = 4096, factor: float = 40) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }


_V2_LITE: Mapping[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "rope_theta": 10000,
    "rope_scaling": _yarn(0.707),
    "max_position_embeddings": 163840,
}
_V3: Mapping[str, Any] = {
    **_V2_LITE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rope_scaling": _yarn(1.0),
}
_V32: Mapping[str, Any] = {
    **_V3,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
_TINY: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "intermediate_size": 320,
    "moe_intermediate_size": 192,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 2048,
}
_V4: Mapping[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 32768,
    "hidden_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 48,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_hash_layers": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "swiglu_limit": 10.0,
    "compress_ratios": [0, 4, 128, 4, 128, 0],
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
    "num_nextn_predict_layers": 0,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny-v2-lite": {**_V2_LITE, **_TINY, "rope_scaling": _yarn(0.707, 256, 8)},
    "tiny-v3": {**_V3, **_TINY, "q_lora_rank": 96, "rope_scaling": _yarn(1.0, 256, 8)},
    "lite-2": {**_V2_LITE, "num_hidden_layers": 2},
    "lite-8": {**_V2_LITE, "num_hidden_layers": 8},
    "v2-lite": _V2_LITE,
    "v3-narrow": {
        **_V3,
        "num_hidden_layers": 30,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 1,
    },
    "v3-slice": {
        **_V3,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    },
    "tiny-v32": {
        **_V32,
        **_TINY,
        "q_lora_rank": 96,
        "rope_scaling": _yarn(1.0, 256, 8),
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 16,
    },
    "v32-slice": {**_V32, "num_hidden_layers": 4, "first_k_dense_replace": 1},
    "v4-cpu": _V4,
    "v4-tiny": {
        **_V4,
        "vocab_size": 512,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 128,
        "o_groups": 2,
        "o_lora_rank": 128,
        "moe_intermediate_size": 192,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "sliding_window": 16,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 8,
        "rope_scaling": {**_V4["rope_scaling"], "original_max_position_embeddings": 256},
        "max_position_embeddings": 4096,
    },
    "v3-cpu": {
        **_V3,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "n_routed_experts": 16,
        "vocab_size": 32768,
    },
}
DTYPES = ("bfloat16", "float16", "float32", "fp8", "fp8_ue8m0", "fp4")


def own_dtype(shape: str) -> str:
    """The `dtype` that published models of this shape have, or else bfloat16."""
    return "fp4" if "hc_mult" in SHAPES.get(shape, {}) else "bfloat16"


def config_of(shape: str, dtype: str) -> dict[str, Any]:
    """The config.json of a named shape.

    dtype: "fp8" and "fp8_ue8m0" are native 128×128 blocks, with scales of float32 or powers of two;
    "fp4" is the latter but for routed experts in e2m1, of DeepSeek-V4's shapes only.
    """
    if shape not in SHAPES:
        raise ConfigError(f"--shape {shape!r}: known are {', '.join(SHAPES)}")
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype!r}: must be one of {', '.join(DTYPES)}")
    native = own_dtype(shape) == "fp4"
    if dtype == "fp4" and not native:
        fits = ", ".join(name for name in SHAPES if own_dtype(name) == "fp4")
        raise ConfigError(f"--dtype fp4: is for --shape {fits}, not {shape}; use fp8")
    quantised = dtype.startswith("fp")
    config = {
        **SHAPES[shape],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16" if quantised else dtype,
    }
    if quantised:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    if quantised and native:
        config["expert_dtype"] = "fp4" if dtype == "fp4" else "fp8"
    if dtype in ("fp8_ue8m0", "fp4"):
        config["quantization_config"]["scale_fmt"] = "ue8m0"
    return config
