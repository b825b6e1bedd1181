"""config.json in every published form, and models that must be refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from ds_runtime.errors import CheckpointError, ConfigError, UnsupportedError
from ds_runtime.model.config import from_hf, load_config
from ds_runtime.testing.tiny import SHAPES, config_dict

FIXTURES = Path(__file__).parent / "fixtures"


def published(name: str) -> dict:
    return json.loads((FIXTURES / f"{name}.json").read_text())


def test_v2_lite():
    c = from_hf(published("deepseek-v2-lite"))
    assert (c.hidden, c.layers, c.heads, c.q_lora, c.kv_lora) == (2048, 27, 16, None, 512)
    assert (c.experts, c.shared_experts, c.routing.top_k) == (64, 2, 6)
    assert (c.routing.method, c.routing.scoring, c.routing.scale) == ("greedy", "softmax", 1.0)
    assert not c.routing.renormalize and not c.quantization and c.dtype == "bfloat16"
    assert [c.is_moe(layer) for layer in (0, 1, 26)] == [False, True, True]
    assert c.softmax_scale == pytest.approx(0.11472, abs=1e-5)


def test_v2_and_v25_differ_in_mscale():
    v2, v25 = from_hf(published("deepseek-v2")), from_hf(published("deepseek-v2.5"))
    assert (v2.yarn.mscale_all_dim, v25.yarn.mscale_all_dim) == (0.707, 1.0)
    assert v2.routing == v25.routing
    assert (v2.routing.method, v2.routing.n_group, v2.routing.scale) == (
        "group_limited_greedy",
        8,
        16.0,
    )


def test_v3():
    c = from_hf(published("deepseek-v3"))
    assert (c.hidden, c.layers, c.heads, c.q_lora, c.first_dense) == (7168, 61, 128, 1536, 3)
    assert (c.routing.method, c.routing.scoring) == ("noaux_tc", "sigmoid")
    assert c.routing.renormalize and c.routing.scale == 2.5 and c.mtp_layers == 1
    assert c.quantization["weight_block_size"] == [128, 128]
    assert c.softmax_scale == pytest.approx(0.13523, abs=1e-5)
    v31 = from_hf(published("deepseek-v3.1"))
    assert v31.quantization["scale_fmt"] == "ue8m0" and v31.routing == c.routing


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_form(shape, tmp_path):
    """What transformers 5 saves: rope_parameters, no topk_method or scoring_func for V3."""
    family, values = config_dict(shape)
    getattr(transformers, f"{family}Config")(
        **values, architectures=[f"{family}ForCausalLM"]
    ).save_pretrained(tmp_path)
    c = load_config(tmp_path)
    parameters = values["rope_parameters"]
    assert c.rope_theta == parameters["rope_theta"]
    assert (c.yarn is None) == (parameters["rope_type"] == "default")
    assert c.routing.method == ("noaux_tc" if family == "DeepseekV3" else values["topk_method"])
    assert c.routing.scoring == ("sigmoid" if family == "DeepseekV3" else "softmax")
    assert c.q_lora == values["q_lora_rank"] and c.v_head == values["v_head_dim"]
    assert c.eps == values["rms_norm_eps"]


def test_hub_and_transformers_form_mean_the_same():
    hub = published("deepseek-v3")
    new = {k: v for k, v in hub.items() if k not in ("rope_scaling", "rope_theta", "torch_dtype")}
    rope = {k: v for k, v in hub["rope_scaling"].items() if k != "type"}
    new["rope_parameters"] = {**rope, "rope_type": "yarn", "rope_theta": hub["rope_theta"]}
    new["dtype"] = "bfloat16"
    new["num_local_experts"] = new.pop("n_routed_experts")
    new["num_mtp_layers"] = new.pop("num_nextn_predict_layers")
    del new["topk_method"], new["scoring_func"]
    assert from_hf(new) == from_hf(hub)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("deepseek-v3.2", "V3.2"),
        ("deepseek-v4-flash", "DeepSeek-V4 "),
        ("deepseek-v4.1-flash", "DeepSeek-V4.1"),
    ],
)
def test_refused_with_a_reason(name, said):
    with pytest.raises(UnsupportedError, match=said) as caught:
        from_hf(published(name))
    assert "DeepseekV3ForCausalLM" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, UnsupportedError, "'LlamaForCausalLM' is unkn"),
        ({"architectures": None, "model_type": "qwen"}, UnsupportedError, "'qwen' is unknown"),
        ({"hidden_size": None}, ConfigError, "hidden_size is missing"),
        ({"hidden_size": "big"}, ConfigError, "hidden_size is 'big'"),
        ({"num_attention_heads": 0}, ConfigError, "num_attention_heads is 0, .* at least 1"),
        ({"q_lora_rank": "small"}, ConfigError, "q_lora_rank is 'small'"),
        ({"rms_norm_eps": "tiny"}, ConfigError, "rms_norm_eps is 'tiny'"),
        ({"n_group": 2.5}, ConfigError, "n_group is 2.5"),
        ({"attention_bias": True}, UnsupportedError, "attention_bias"),
        ({"topk_method": "random"}, UnsupportedError, "'random'"),
        ({"scoring_func": "tanh"}, UnsupportedError, "'tanh'"),
        ({"hidden_act": "gelu"}, UnsupportedError, "'gelu'"),
        ({"torch_dtype": "int8"}, UnsupportedError, "'int8'"),
        ({"n_group": 7}, ConfigError, "7 groups"),
        ({"topk_group": 1, "num_experts_per_tok": 33}, ConfigError, "33"),
        ({"qk_rope_head_dim": 7}, UnsupportedError, "qk_rope_head_dim 7"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, UnsupportedError, "'linear'"),
        ({"rope_scaling": {"type": "yarn"}}, ConfigError, "'factor'"),
    ],
)
def test_bad_values(change, error, said):
    with pytest.raises(error, match=said):
        from_hf({**published("deepseek-v3"), **change})


def test_no_config(tmp_path):
    with pytest.raises(CheckpointError, match="not found"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="object"):
        load_config(tmp_path)


def test_tensor_parallel_must_divide():
    config = from_hf(published("deepseek-v2-lite"))
    config.check_tp(8)
    with pytest.raises(ConfigError, match="--tp 3: num_attention_heads 16"):
        config.check_tp(3)
