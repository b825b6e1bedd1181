"""config.json in every published form, and models that must be refused in one sentence."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from model_harness import decide

from ds_runtime.assembly.assemble import find_loader
from ds_runtime.description.config import Indexing
from ds_runtime.description.hf import from_hf, load_config
from ds_runtime.errors import CheckpointError, ConfigError, DsRuntimeError, UnsupportedError
from ds_runtime.model.rope import amplitude, inverse_frequencies
from ds_runtime.plugins.manager import load_plugins
from ds_runtime_kit.models.tiny import SHAPES, config_dict, write_tiny_fp8
from examples import examples

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


def test_sparse_models():
    """V3.2's own numbers; GLM's list of layers equals its frequency and offset."""
    config = from_hf(published("deepseek-v3.2"))
    assert config.indexing == Indexing(64, 128, 2048, False, (True,) * 61)
    glm = published("glm-5.2")
    config = from_hf(glm)
    assert config.indexing.interleaved and config.indexing.computes[:11] == (
        *(True,) * 3, *(False,) * 3, True, *(False,) * 3, True,
    )  # fmt: skip
    kinds = glm.pop("indexer_types")
    assert from_hf(glm) == config and sum(config.indexing.computes) == kinds.count("full") == 21
    pattern = {"index_topk_pattern": "FSS", "index_topk_freq": 4}
    assert from_hf({**glm, **pattern}).indexing.computes == (True, False, False, *(True,) * 75)
    assert from_hf({**glm, **pattern, "indexer_types": kinds}) == config


@pytest.mark.parametrize(("given", "kept"), [(2048, 2048), (163840, 163840), (2**31 - 1, 163840)])
def test_no_more_tokens_are_chosen_than_there_are(given, kept):
    """Who wants every token attended gives any large number; memory is set aside for choices."""
    assert from_hf({**published("deepseek-v3.2"), "index_topk": given}).indexing.top_k == kept


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"index_topk": None}, ConfigError, "index_topk is missing"),
        ({"q_lora_rank": None}, ConfigError, "q_lora_rank is missing"),
        ({"index_head_dim": 96}, UnsupportedError, "index_head_dim 96 is not supported"),
        ({"index_head_dim": 32}, UnsupportedError, "at least qk_rope_head_dim 64"),
        ({"rope_interleave": False}, UnsupportedError, "rope_interleave false"),
        ({"index_topk_pattern": "FX"}, ConfigError, "index_topk_pattern is 'FX', expected F or S"),
        ({"index_topk_pattern": "SF"}, ConfigError, "layer 0 shares"),
        ({"index_topk_freq": 0}, ConfigError, "index_topk_freq is 0"),
        ({"indexer_types": ["full"]}, ConfigError, "indexer_types names 1 layers"),
        ({"indexer_types": ["full", "none"] * 30 + ["full"]}, ConfigError, "indexer_types has 'no"),
    ],
)
def test_indexers_that_cannot_be_computed(change, error, said):
    with pytest.raises(error, match=said):
        from_hf({**published("deepseek-v3.2"), **change})


def test_refused_with_a_reason(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published("deepseek-v4.1-flash")))
    with pytest.raises(UnsupportedError, match=r"DeepSeek-V4\.1") as caught:
        load_config(tmp_path)
    assert "DeepseekV4ForCausalLM" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            UnsupportedError,
            "R1-Distill checkpoints have this",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"]},
            UnsupportedError,
            "an engine for Qwen2 and Llama",
        ),
        ({"architectures": ["OtherForCausalLM"]}, UnsupportedError, "'OtherForCausalLM' is unkn"),
        ({"architectures": None, "model_type": "qwen"}, UnsupportedError, "'qwen' is unknown"),
        ({"hidden_size": None}, ConfigError, "hidden_size is missing"),
        ({"hidden_size": "big"}, ConfigError, "hidden_size is 'big'"),
        ({"num_attention_heads": 0}, ConfigError, "num_attention_heads is 0, .* at least 1"),
        ({"q_lora_rank": "small"}, ConfigError, "q_lora_rank is 'small'"),
        ({"rms_norm_eps": "tiny"}, ConfigError, "rms_norm_eps is 'tiny'"),
        ({"n_routed_experts": 10**9}, ConfigError, "n_routed_experts is 10+, .* at most 8192"),
        ({"num_hidden_layers": 10**6}, ConfigError, "num_hidden_layers is 10+, .* at most 2048"),
        ({"num_nextn_predict_layers": 10**9}, ConfigError, "num_nextn_.* at most 2048"),
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
        ({"rope_scaling": {"type": "yarn"}}, ConfigError, r"rope_scaling\.factor is missing"),
        ({"rope_scaling": "yarn"}, ConfigError, "rope_scaling is 'yarn', expected a JSON object"),
        ({"rope_scaling": {"type": "yarn", "factor": "a"}}, ConfigError, "factor is 'a', .*number"),
        ({"rope_theta": "a"}, ConfigError, "rope_theta is 'a', expected a number above 1"),
        ({"rope_theta": 1}, ConfigError, "rope_theta is 1, "),
        ({"eos_token_id": "x"}, ConfigError, "eos_token_id is 'x', expected a token id or a list"),
        ({"eos_token_id": [1, True]}, ConfigError, "eos_token_id is"),
        ({"quantization_config": [1]}, ConfigError, r"quantization_config is \[1\], .* object"),
        ({"moe_layer_freq": 0}, ConfigError, "moe_layer_freq is 0, .* at least 1"),
        ({"topk_group": 9}, ConfigError, "topk_group 9 is more than n_group 8"),
        ({"architectures": "DeepseekV3ForCausalLM"}, ConfigError, "architectures is .* list of st"),
        ({"num_experts_per_tok": 0}, ConfigError, "num_experts_per_tok is 0, .* at least 1"),
        (
            {"rms_norm_eps": -1e-6},
            ConfigError,
            "rms_norm_eps is -1e-06, expected a number of at least",
        ),
        ({"rms_norm_eps": float("inf")}, ConfigError, "rms_norm_eps is inf"),
        ({"rms_norm_eps": float("nan")}, ConfigError, "rms_norm_eps is nan"),
        ({"num_hidden_layers": 10**400}, ConfigError, r"num_hidden_layers is 10+\.\.\., .* most 2"),
        ({"norm_topk_prob": "yes"}, ConfigError, "norm_topk_prob is 'yes', expected true or false"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "attention_factor": 1.5}, "rope_scaling": None},
            UnsupportedError,
            r"rope_parameters\.attention_factor 1\.5 is not supported",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4, "truncate": False}},
            UnsupportedError,
            r"rope_scaling\.truncate False",
        ),
        (
            {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57 + ["dense"]},
            UnsupportedError,
            "'dense' at layer 60, where 'sparse'",
        ),
        ({"mlp_layer_types": ["dense"] * 3}, ConfigError, "names 3 layers, .* is 61"),
        ({"mlp_layer_types": "dense"}, ConfigError, "mlp_layer_types is 'dense'"),
    ],
)
def test_bad_values(change, error, said):
    with pytest.raises(error, match=said):
        from_hf({**published("deepseek-v3"), **change})


class Noting(dict):
    """Remembers the keys that are asked for."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.asked = set()

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)


def asked_keys() -> tuple[list[str], list[str]]:
    """Every key that parsing looks at, in config.json and in its rope_scaling."""
    raw = published("deepseek-v3")
    outer, rope = Noting(raw), Noting(raw["rope_scaling"])
    outer["rope_scaling"] = rope
    from_hf(outer)
    return sorted(outer.asked), sorted(rope.asked | {"rope_theta"})


TOP, ROPE = asked_keys()
LIKELY = [0, 1, 2, -1, 7, 10**400, 1e308, 1e-320, float("nan"), float("inf"), "", "yarn", "x"]
LIKELY += [[], [1], ["dense"], {}, {"type": "yarn"}, {"rope_type": "yarn", "factor": 3}]
ATOMS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JSON = st.sampled_from(LIKELY) | st.recursive(
    ATOMS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(ROPE), inner),
    max_leaves=5,
)


@settings(max_examples=examples(400), deadline=None)
@given(
    st.sampled_from(["deepseek-v2-lite", "deepseek-v3"]),
    st.dictionaries(st.sampled_from(TOP), JSON, max_size=3),
    st.dictionaries(st.sampled_from(ROPE), st.sampled_from(LIKELY) | JSON, max_size=2),
)
@example("deepseek-v3", {}, {"factor": 1e-12, "mscale": 1e12})
@example("deepseek-v3", {}, {"factor": 1e-320})
@example("deepseek-v3", {"topk_method": 10**5000}, {"attention_factor": 10**5000})
@example("deepseek-v3", {}, {"beta_fast": 1e-320})
@example("deepseek-v3", {}, {"beta_fast": 1e-12, "beta_slow": 1e12, "mscale_all_dim": 1e12})
@example("deepseek-v3", {"rope_theta": 1 + 2**-52}, {"original_max_position_embeddings": 1})
def test_any_value_is_served_or_refused(name, change, rope):
    raw = published(name)
    raw["rope_scaling"] |= rope
    try:
        config = from_hf({**raw, **change})
        config.check_tp(2)
    except DsRuntimeError as e:
        assert str(e)
        return
    assert [config.is_moe(layer) for layer in (0, 5)] and config.softmax_scale > 0
    assert config.dims()["heads"] == config.heads
    small = replace(config, qk_rope=min(config.qk_rope, 64))
    assert torch.isfinite(inverse_frequencies(small)).all() and math.isfinite(amplitude(small))


def test_quantisation_that_no_loader_reads_is_refused(tmp_path):
    write_tiny_fp8(tmp_path, "v3")
    offers = load_plugins().offers(decide(tmp_path).facts)
    config = load_config(tmp_path)
    assert find_loader(offers, config).name == "fp8"
    for change in ({"weight_block_size": 5}, {"modules_to_not_convert": 5}, {"quant_method": []}):
        wrong = replace(config, quantization={**config.quantization, **change})
        with pytest.raises(UnsupportedError, match=r"quantization_config.* is not supported"):
            find_loader(offers, wrong)


def test_layer_types_that_agree_are_read():
    kinds = ["dense"] * 3 + ["sparse"] * 58
    raw = published("deepseek-v3")
    assert from_hf({**raw, "mlp_layer_types": kinds}) == from_hf(raw)
    assert from_hf({**raw, "mlp_layer_types": kinds, "first_k_dense_replace": None}) == from_hf(raw)


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
    config = replace(config, heads=15)
    with pytest.raises(ConfigError, match="--tp 2: num_attention_heads 15"):
        config.check_tp(2)
    config.check_tp(2, 1)
    dims = config.dims(2, 1)
    assert dims["heads"] == 15 and dims["intermediate"] == config.intermediate // 2


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(2, 24), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_a_number_of_ranks_that_does_not_divide_names_the_nearest_that_do(share, groups, ep):
    """The numbers of the error are accepted with the same --dp and --ep, and none is nearer."""
    config = from_hf(published("deepseek-v2-lite"))
    tp = share * groups

    def why_not(n):
        if n % groups or n % ep or n > config.heads * groups:
            return "no such ranks"
        try:
            config.check_tp(n, n // groups, ep)
        except ConfigError as e:
            return str(e)

    if tp % ep or why_not(tp) is None:
        return
    with pytest.raises(ConfigError, match=r"is not divisible by .*: give ") as said:
        config.check_tp(tp, tp // groups, ep)
    named = [int(n) for n in re.findall(r"--tp (\d+)", str(said.value).partition(": give ")[2])]
    fits = [n for n in range(1, config.heads * groups + 1) if why_not(n) is None]
    assert named == [n for n in fits if n < tp][-1:] + [n for n in fits if n > tp][:1]
    assert named or "another --dp or --ep" in str(said.value)


def test_experts_of_a_rank_are_as_wide_as_ranks_share_them():
    config = from_hf(published("deepseek-v3"))
    for tp, ep in itertools.product((1, 2, 4, 8), repeat=2):
        if tp % ep == 0:
            dims = config.dims(tp, tp, ep)
            assert dims["moe_intermediate"] == 2048 * ep // tp, "of a part's ranks"
            assert dims["intermediate"] == config.intermediate // tp
            assert dims["experts"] == 256, "of all parts"
