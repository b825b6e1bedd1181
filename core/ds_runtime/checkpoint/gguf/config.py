"""The keys of a `deepseek2` GGUF file as a config.json. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_runtime.checkpoint.gguf.header import GgufTensor
from ds_runtime.checkpoint.gguf.names import K_B, named
from ds_runtime.checkpoint.reader import Reader
from ds_runtime.errors import UnsupportedError, shown

ARCHITECTURE = "deepseek2"
METHOD = "gguf"  # quant_method of what is written
_SCORING = {0: "softmax", 1: "softmax", 2: "sigmoid"}  # 0: older files, which do not say


def config_json(
    values: Mapping[str, Any], tensors: Mapping[str, GgufTensor], where: str
) -> dict[str, Any]:
    """The model's config.json. `where` names the file in errors."""
    found = values.get("general.architecture")
    if found != ARCHITECTURE:
        raise UnsupportedError(
            f"{where}: general.architecture {shown(found)} is not supported; expected "
            f"{ARCHITECTURE!r}"
        )
    prefix = f"{ARCHITECTURE}."
    own = {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}
    get = Reader(own, where, ARCHITECTURE)
    layers = get.integer("block_count") - get.integer("nextn_predict_layers", default=0)
    rope = get.integer("rope.dimension_count")
    head, v_head = _heads(get)
    eos = values.get("tokenizer.ggml.eos_token_id")
    return {
        **_experts(get, tensors),
        **_rotation(get),
        "vocab_size": tensors["token_embd.weight"].shape[0]
        if "token_embd.weight" in tensors
        else get.integer("vocab_size"),
        "hidden_size": get.integer("embedding_length"),
        "intermediate_size": get.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": get.integer("attention.head_count"),
        "num_key_value_heads": get.integer("attention.head_count"),
        "q_lora_rank": get.integer("attention.q_lora_rank", default=0) or None,
        "kv_lora_rank": get.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": head - rope,
        "qk_rope_head_dim": rope,
        "v_head_dim": v_head,
        "rms_norm_eps": get.number("attention.layer_norm_rms_epsilon", 1e-6),
        "max_position_embeddings": get.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        **({} if eos is None else {"eos_token_id": eos}),
        "quantization_config": {"quant_method": METHOD, "types": types(tensors, layers)},
    }


def _heads(get: Reader) -> tuple[int, int]:
    """(width of a query head, width of a value head): of the model, not of the absorbed cache."""
    key, value = "attention.key_length_mla", "attention.value_length_mla"
    if get.any(key) is not None:
        return get.integer(key), get.integer(value)
    return get.integer("attention.key_length"), get.integer("attention.value_length")


def _experts(get: Reader, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Architecture, experts and routing."""
    biased = any(name.endswith("exp_probs_b.bias") for name in tensors)
    gating = get.integer("expert_gating_func", default=2 if biased else 1)
    if gating not in _SCORING:
        raise get.wrong("expert_gating_func", "1 (softmax) or 2 (sigmoid)")
    v3 = biased or _SCORING[gating] == "sigmoid"
    name = "DeepseekV3ForCausalLM" if v3 else "DeepseekV2ForCausalLM"
    kind = {"architectures": [name], "model_type": "deepseek_v3" if v3 else "deepseek_v2"}
    experts = get.integer("expert_count", default=0)
    if not experts:
        return kind
    groups = get.integer("expert_group_count", default=0) or 1
    grouped = "group_limited_greedy" if groups > 1 else "greedy"
    return {
        **kind,
        "n_routed_experts": experts,
        "num_experts_per_tok": get.integer("expert_used_count"),
        "n_shared_experts": get.integer("expert_shared_count", default=0),
        "moe_intermediate_size": get.integer("expert_feed_forward_length"),
        "first_k_dense_replace": get.integer("leading_dense_block_count", default=0),
        "moe_layer_freq": 1,
        "n_group": groups,
        "topk_group": get.integer("expert_group_used_count", default=0) or 1,
        "topk_method": "noaux_tc" if biased else grouped,
        "scoring_func": _SCORING[gating],
        "norm_topk_prob": get.boolean("expert_weights_norm", False),
        "routed_scaling_factor": get.number("expert_weights_scale", 1.0),
    }


def _rotation(get: Reader) -> dict[str, Any]:
    """Theta and YaRN. The file's multiplier is a tenth of mscale_all_dim."""
    theta = get.number("rope.freq_base", 10000.0, 1.0)
    kind = get.text("rope.scaling.type")
    if kind in ("", "none"):
        return {"rope_theta": theta}
    if kind != "yarn":
        raise get.wrong("rope.scaling.type", "'yarn' or 'none'")
    # As the file holds it, in float32; rounded to the few digits that a config has.
    scale = round(10 * get.number("rope.scaling.yarn_log_multiplier", 0.1), 5)
    return {
        "rope_theta": theta,
        "rope_scaling": {
            "type": "yarn",
            "factor": get.number("rope.scaling.factor"),
            "original_max_position_embeddings": get.integer("rope.scaling.original_context_length"),
            "beta_fast": get.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": get.number("rope.scaling.yarn_beta_slow", 1.0),
            "mscale": scale,
            "mscale_all_dim": scale,
        },
    }


def types(tensors: Mapping[str, GgufTensor], layers: int) -> dict[str, str]:
    """Module → type of its weight; routed experts of a layer share one entry, and kv_b_proj that
    is cut in two says so."""
    found: dict[str, str] = {}
    for name, tensor in named(tensors, layers).items():
        module, _, last = name.rpartition(".")
        if ".experts." in module:
            at, _, rest = module.partition(".experts.")
            module = f"{at}.experts.{rest.partition('.')[2]}"
        if last in ("weight", K_B) and len(tensor.shape) > 1:
            found[module] = tensor.type.name if last == "weight" else K_B
    return found
