"""DeepSeek-V4's config.json in its own words and in those of transformers, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_config import JSON, LIKELY, Noting, published

from ds_runtime.description.config import Indexing, Yarn
from ds_runtime.description.hf import from_hf
from ds_runtime.errors import ConfigError, DsRuntimeError, UnsupportedError
from ds_runtime.model.rope import amplitude
from ds_runtime.ops.contract import Routing
from examples import examples

FLASH = published("deepseek-v4-flash")
TINY = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "q_lora_rank": 32,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "compress_ratios": [0, 0, 4, 128, 4, 128, 0],
    "qk_rope_head_dim": 8,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 8,
    "o_groups": 2,
    "o_lora_rank": 16,
    "num_hash_layers": 2,
    "num_nextn_predict_layers": 1,
    "sliding_window": 16,
    "max_position_embeddings": 4096,
    "swiglu_limit": 0.5,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    "hc_mult": 4,
    "routed_scaling_factor": 1.5,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}  # fmt: skip


def test_flash():
    c = from_hf(FLASH)
    assert (c.hidden, c.layers, c.heads, c.q_lora) == (4096, 43, 64, 1024)
    assert (c.latent, c.qk_head, c.v_head, c.qk_rope) == (512, 512, 512, 64)
    assert c.softmax_scale == 512**-0.5 and c.mtp_layers == 1 and c.eos_tokens == (1,)
    assert c.routing == Routing(6, 256, 1, 1, "sqrtsoftplus", "noaux_tc", True, 1.5)
    assert all(c.is_moe(layer) for layer in range(43)) and c.shared_experts == 1
    h = c.hybrid
    assert [h.ratios.count(r) for r in (0, 4, 128)] == [2, 21, 20]
    assert (h.window, h.groups, h.o_lora, h.hashed, h.limit) == (128, 8, 1024, 3, 10.0)
    assert (h.streams, h.rounds, h.stream_eps) == (4, 20, 1e-6)
    assert (c.rope_theta, c.yarn) == (1e4, None)
    assert (h.theta, h.yarn) == (160000, Yarn(16, 65536, mscale_all_dim=1.0))
    assert amplitude(replace(c, yarn=h.yarn)) == 1, "cos and sin stay as they are"
    assert c.indexing == Indexing(64, 128, 512, True, tuple(r == 4 for r in h.ratios))
    dims = c.dims(2)
    assert (dims["heads"], dims["o_groups"], dims["window"], dims["streams"]) == (32, 4, 128, 4)


@pytest.mark.parametrize("raw", [TINY, FLASH], ids=["tiny", "flash"])
def test_what_transformers_saves_means_the_same(raw, tmp_path):
    mine = {k: v for k, v in raw.items() if k != "quantization_config"}
    transformers.DeepseekV4Config(**mine).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "compress_ratios" not in saved and "num_hash_layers" not in saved
    assert from_hf(saved) == from_hf(mine)
    saved.pop("qk_rope_head_dim", None)  # then its part of a head says it
    assert from_hf(saved) == from_hf(mine)


def test_stages_of_another_draft_are_no_draft_layers():
    assert from_hf({**FLASH, "dspark_block_size": 5}).mtp_layers == 0


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"num_key_value_heads": 2}, UnsupportedError, "num_key_value_heads 2 .* expected 1"),
        ({"n_shared_experts": 2}, UnsupportedError, "n_shared_experts 2"),
        ({"scoring_func": "softmax"}, UnsupportedError, "'softmax' .* expected 'sqrtsoftplus'"),
        ({"topk_method": "greedy"}, UnsupportedError, "topk_method 'greedy'"),
        ({"norm_topk_prob": False}, UnsupportedError, "norm_topk_prob False"),
        ({"tie_word_embeddings": True}, UnsupportedError, "tie_word_embeddings True"),
        ({"expert_dtype": "int3"}, UnsupportedError, "expert_dtype 'int3'"),
        ({"quantization_config": {"expert_dtype": 4}}, UnsupportedError, "expert_dtype 4"),
        ({"attention_bias": True}, UnsupportedError, "attention_bias"),
        ({"hidden_act": "gelu"}, UnsupportedError, "'gelu'"),
        ({"compress_ratios": None}, ConfigError, "compress_ratios is missing"),
        ({"compress_ratios": [0, 4]}, ConfigError, "names 2 layers, num_hidden_layers is 43"),
        ({"compress_ratios": [8] * 44}, UnsupportedError, "has 8; supported: 0, 4, 128"),
        ({"compress_ratios": "4"}, ConfigError, "compress_ratios is '4', expected a list"),
        ({"layer_types": ["sliding_attention"] * 43}, ConfigError, "disagree; leave one out"),
        ({"layer_types": ["full"] * 43}, UnsupportedError, "layer_types has 'full'; supported:"),
        (
            {"layer_types": ["compressed_sparse_attention"] * 43, "compress_ratios": None}
            | {"compress_rates": {"compressed_sparse_attention": 8}},
            UnsupportedError,
            "compress_rates.compressed_sparse_attention 8; supported: 4",
        ),
        ({"mlp_layer_types": ["moe", "hash_moe"]}, UnsupportedError, "expected 43 layers, first"),
        ({"mlp_layer_types": ["moe"] * 43}, ConfigError, "num_hash_layers and mlp_layer_types"),
        ({"o_groups": 7}, ConfigError, "64 in o_groups 7 groups"),
        ({"qk_rope_head_dim": 63}, UnsupportedError, "qk_rope_head_dim 63 must be even"),
        ({"qk_rope_head_dim": 512}, UnsupportedError, "below head_dim 512"),
        ({"index_head_dim": 96}, UnsupportedError, "index_head_dim 96"),
        ({"num_experts_per_tok": 257}, ConfigError, "257 is more than n_routed_experts 256"),
        ({"rope_scaling": {"type": "linear"}}, UnsupportedError, "'linear'; supported: default"),
        ({"rope_scaling": {"type": "yarn"}}, ConfigError, r"original_max_\w+ is missing"),
        (
            {"rope_scaling": None, "rope_parameters": {"main": {"rope_type": "yarn"}}},
            UnsupportedError,
            r"rope_parameters\.main is of type 'yarn'",
        ),
        (
            {"rope_scaling": FLASH["rope_scaling"] | {"attention_factor": 1.3}},
            UnsupportedError,
            r"rope_scaling\.attention_factor 1\.3",
        ),
        ({"sliding_window": None}, ConfigError, "sliding_window is missing"),
        ({"hc_mult": 0}, ConfigError, "hc_mult is 0"),
    ],
)
def test_refused(change, error, said):
    with pytest.raises(error, match=said):
        from_hf({**FLASH, **change})


def test_ranks_must_divide_the_groups():
    with pytest.raises(ConfigError, match="--tp 16: o_groups 8"):
        from_hf(FLASH).check_tp(16)
    from_hf(FLASH).check_tp(8)


OUTER = Noting(FLASH)
from_hf(OUTER)


@settings(max_examples=examples(200), deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(OUTER.asked)), st.sampled_from(LIKELY) | JSON,
                       max_size=3))  # fmt: skip
def test_any_value_is_read_or_refused(change):
    try:
        config = from_hf({**FLASH, **change})
        config.check_tp(2)
    except DsRuntimeError as e:
        assert str(e)
        return
    assert len(config.hybrid.ratios) == config.layers and math.isfinite(config.softmax_scale)
    assert config.dims()["kv_lora"] + config.dims()["qk_rope"] == config.dims()["v"]
