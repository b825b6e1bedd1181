"""Every published quantisation config, by names alone: which module has which format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_runtime.assembly.assemble import find_loader
from ds_runtime.description.hf import QUANT_FILE, from_hf, with_quant_file
from ds_runtime.description.structure import stored_modules
from ds_runtime.errors import UnsupportedError
from ds_runtime.ops.contract import DeviceInfo, Dims, Facts, QuantLoader
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.weights.layouts import expected
from ds_runtime.weights.loaders.compressed import compressed

FIXTURES = Path(__file__).parent / "fixtures"
FACTS = Facts(DeviceInfo("cpu", "", ""), Dims({}))
FP8 = ("fp8_block",) * 8
PLACES = (  # of an MoE layer, then of layer 61, which drafts
    "model.layers.5.self_attn.q_a_proj",
    "model.layers.5.self_attn.kv_a_proj_with_mqa",
    "model.layers.5.self_attn.kv_b_proj",
    "model.layers.5.self_attn.o_proj",
    "model.layers.5.mlp.shared_experts.up_proj",
    "model.layers.5.mlp.experts.255.down_proj",
    "model.layers.0.mlp.gate_proj",
    "model.layers.5.self_attn.indexer.wq_b",
    "model.layers.5.self_attn.indexer.weights_proj",
    "model.layers.61.self_attn.o_proj",
    "model.layers.61.mlp.experts.0.up_proj",
    "model.layers.61.eh_proj",
    "lm_head",
)
NATIVE = (*FP8, "dense", "fp8_block", "fp8_block", "dense", "dense")
NVFP4 = ("dense", "dense", "dense", "nvfp4", "nvfp4", "nvfp4", "nvfp4")
W4AFP8 = (*("fp8_block",) * 5, "w4afp8", "fp8_block", "fp8_block", "dense", "fp8_block", "w4afp8")
PUBLISHED = {
    "deepseek-v2": ("dense",) * 13,
    "deepseek-v2-lite": ("dense",) * 13,
    "deepseek-v2.5": ("dense",) * 13,
    "deepseek-coder-v2-instruct": ("dense",) * 13,
    "deepseek-coder-v2-lite": ("dense",) * 13,
    **{
        f"deepseek-{name}": NATIVE
        for name in ("v3", "r1", "v3-0324", "r1-0528", "v3.1", "v3.1-terminus", "v3.2-exp")
    },
    **{f"deepseek-{name}": NATIVE for name in ("v3.2", "v3.2-speciale", "math-v2")},
    "nvidia-deepseek-v3.1-nvfp4": (*NVFP4, "nvfp4", "nvfp4", *("dense",) * 4),
    "nvidia-deepseek-v3.2-nvfp4": (*NVFP4, "dense", "dense", *("dense",) * 4),
    "w4afp8": (*W4AFP8, "dense", "dense"),
}


def quantization(name: str) -> dict:
    found = json.loads((FIXTURES / "quant_configs.json").read_text())[name]
    return dict(found)


def loader_of(config: dict) -> QuantLoader:
    loaders = load_plugins(()).offers(FACTS).quant_loaders
    (found,) = [x for x in loaders if x.accepts(config)]  # never two
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name: str) -> None:
    config = quantization(name)
    of = loader_of(config).encodings(config)
    assert [of(place).format for place in PLACES] == list(PUBLISHED[name])


def test_a_model_of_another_layout_with_experts_alone_in_nvfp4() -> None:
    config = quantization("nvidia-deepseek-v4-flash-nvfp4")
    of = loader_of(config).encodings(config)
    assert of("layers.3.ffn.experts.7.w1").format == "nvfp4"
    assert {of(m).format for m in ("layers.3.attn.wq_a", "layers.3.ffn.shared_experts.w1")} == {
        "dense"
    }
    assert {of(m).format for m in ("head", "mtp.0.ffn.experts.0.w1")} == {"dense"}


def test_regexes_of_compressed_tensors_leave_attention_dense() -> None:
    config = quantization("reference-kimi-k2.5-int4-compressed-tensors")
    of = loader_of(config).encodings(config)
    expert = of("model.layers.5.mlp.experts.255.down_proj")
    assert (expert.format, expert.block, expert.layout) == ("int4_group", (1, 32), "words")
    dense = ("self_attn.o_proj", "mlp.shared_experts.up_proj", "mlp.gate_proj", "mlp.up_proj")
    assert {of(f"model.layers.0.{m}").format for m in dense} == {"dense"}
    assert of("lm_head").format == "dense"


def test_names_count_before_regexes_and_classes() -> None:
    """As compressed-tensors sorts targets, whatever the order of the groups."""
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    groups = {
        "a": GROUP,
        "b": {"targets": ["re:.*o_proj"], "weights": {**_INT4, "group_size": 64}},
        "c": {
            "targets": ["model.layers.1.self_attn.o_proj"],
            "weights": weights,
            "format": "int-quantized",
        },
    }
    of = compressed({**COMPRESSED, "config_groups": groups})
    kinds = ["model.layers.1.self_attn.o_proj", "model.layers.2.self_attn.o_proj", "model.x"]
    found = [of(module) for module in kinds]
    assert [e.format for e in found] == ["int8_channel", "int4_group", "int4_group"]
    assert [e.block for e in found[1:]] == [(1, 64), (1, 32)]


def test_tensors_and_shapes_of_a_real_model() -> None:
    """DeepSeek-V3.1 in NVFP4: what a checkpoint of it must hold."""
    raw = json.loads((FIXTURES / "deepseek-v3.1.json").read_text())
    raw.pop("quantization_config")
    nvfp4 = quantization("nvidia-deepseek-v3.1-nvfp4")
    config = from_hf(with_quant_file(raw, nvfp4[QUANT_FILE]))
    of = find_loader(load_plugins(()).offers(FACTS), config).encodings(config.quantization)
    modules = stored_modules(config, lambda m: of(m).format)
    found = {}
    for name in ("o_proj", "q_a_proj"):
        stored = modules[f"model.layers.5.self_attn.{name}"]
        wanted = expected(of(stored.module), stored.shape)
        assert wanted is not None
        tensors = of(stored.module).tensors
        found[name] = {tensors[c]: (w.shapes[0], w.dtypes) for c, w in wanted.items()}
    assert found["q_a_proj"] == {"weight": ((1536, 7168), ("BF16", "F16", "F32", "F64"))}
    assert found["o_proj"]["weight"] == ((7168, 8192), ("U8", "I8"))
    assert found["o_proj"]["weight_scale"] == ((7168, 1024), ("F8_E4M3",))
    assert found["o_proj"]["weight_scale_2"] == ((), ("F32",))


_INT4 = {"num_bits": 4, "type": "int", "group_size": 32}
_INT8_OF_LISTS = {"dtype": "int8", "qscheme": ["per_tensor"]}
GROUP = {"targets": ["Linear"], "weights": _INT4}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
COMPRESSED |= {"config_groups": {"g": GROUP}}
BESIDE = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "awq", "bits": 3, "group_size": 64}, "bits 3 is not supported; exp"),
        ({"quant_method": "awq", "bits": 4, "group_size": 60}, "group_size 60 is not supported"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, "'gemv' is not"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 64}, "bits 8 is not supported"),
        ({"quant_method": "w8a8_int8", "is_dynamic": False}, "is_dynamic False is not supported"),
        ({"quant_method": "blockwise_int8"}, "weight_block_size None is not supported; expected"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 0]},
            "weight_block_size [128, 0] is not supported; expected [rows, columns]",
        ),
        ({**COMPRESSED, "format": "marlin-24"}, "format 'marlin-24' is not supported; expected"),
        ({**COMPRESSED, "ignore": "lm_head"}, "ignore 'lm_head' is not supported; expected a list"),
        ({**COMPRESSED, "ignore": ["re:("]}, "ignore: '(' is no regular expression"),
        ({**COMPRESSED, "ignore": ["re:a{99999999999999999999}"]}, "the repetition number is too"),
        ({**COMPRESSED, "ignore": ["re:" + "(" * 9999]}, "maximum recursion depth"),
        (
            {**COMPRESSED, "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
            "transform_config {'config_groups': {'u': {'type': 'hadamard'}}} is not supported",
        ),
        (
            {**COMPRESSED, "config_groups": {"g": {"weights": {**_INT4, "symmetric": "no"}}}},
            "config_groups.g.weights.symmetric 'no' is not supported; expected True or False",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": ["gptq"]},
            "checkpoint_format ['gptq'] is not supported; expected 'gptq' or 'gptq_v2'",
        ),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": _INT8_OF_LISTS}},
            "qscheme ['per_tensor'] is not supported",
        ),
        (
            {**COMPRESSED, "config_groups": {"g": {**GROUP, "weights": {"num_bits": 3}}}},
            "config_groups.g.weights.num_bits 3 of type 'int' is not supported",
        ),
        ({**COMPRESSED, "config_groups": [1]}, "config_groups [1] is not supported; expected an"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int3"}}}, "'int3'"),
        ({"quant_method": "modelopt", "quant_algo": "INT7"}, "quant_algo 'INT7' is not supported"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", QUANT_FILE: BESIDE},
            "quant_algo is 'FP8' in config.json and 'NVFP4' in hf_quant_config.json",
        ),
        (
            {"quant_method": "awq", "bits": 4, QUANT_FILE: BESIDE},
            "quant_method 'awq' of config.json and quant_algo 'NVFP4' of hf_quant_config.json "
            "contradict each other",
        ),
        (
            {QUANT_FILE: {"quantization": {"quant_algo": "MIXED_PRECISION", "group_size": 64}}},
            "group_size 64 is not supported; expected None or 128",
        ),
        ({"quant_method": "exl2"}, "quant_method 'exl2'"),
        ({"bits": 4}, "quant_method 'none'"),
    ],
)
def test_what_is_not_read_is_named(config: dict, said: str) -> None:
    raw = json.loads((FIXTURES / "deepseek-v3.1.json").read_text())
    model = from_hf({**raw, "quantization_config": config})
    with pytest.raises(UnsupportedError) as caught:
        find_loader(load_plugins(()).offers(FACTS), model, "/m/config.json")
    assert str(caught.value).startswith("/m/config.json: quantization_config")
    assert said in str(caught.value)
