"""PEFT folders: read as PEFT reads them, and refused in sentences."""

from __future__ import annotations

import json
import os
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from ds_runtime.description.adapter import (
    AdapterSpec,
    PeftConfig,
    adaptable_modules,
    adapted_modules,
    names_module,
)
from ds_runtime.description.hf import load_config
from ds_runtime.errors import CheckpointError, ConfigError
from ds_runtime.lora.read import Adapter
from ds_runtime_kit.models.adapters import change_adapter, change_config, write_adapter
from ds_runtime_kit.models.tiny import make_model, write_tiny

Q_A = "model.layers.1.self_attn.q_a_proj"


@pytest.fixture(scope="module")
def v3(tmp_path_factory):
    """A config, and the modules that take adapters."""
    folder = tmp_path_factory.mktemp("v3")
    write_tiny(folder, "v3")
    config = load_config(folder)
    return config, adaptable_modules(config)


def is_attention(module: str) -> bool:
    return ".self_attn." in module


def test_what_peft_writes_means_what_peft_says(v3, tmp_path):
    """PEFT's own deltas, of attention, head and stacked experts, with patterns and rslora."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import LoraConfig, get_peft_model

        model = make_model("v3")
        settings = LoraConfig(
            r=4,
            lora_alpha=6,
            use_rslora=True,
            target_modules=["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj", "lm_head"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            rank_pattern={"o_proj": 2, r"layers\.2\.self_attn\.q_a_proj": 3},
            alpha_pattern={"kv_b_proj": 5},
            init_lora_weights=False,
        )
        tuned = get_peft_model(model, settings)
        tuned.save_pretrained(tmp_path)
        before = {n: p.clone() for n, p in make_model("v3").named_parameters()}
        merged = dict(tuned.merge_and_unload().named_parameters())
    adapter = Adapter(tmp_path, v3[1])
    assert adapted_modules(tmp_path, v3[1]) == adapter.pairs.keys()
    changed = {n for n in before if not torch.equal(before[n], merged[n])}
    assert {"lm_head.weight", "model.layers.1.mlp.experts.gate_up_proj"} < changed
    seen = set()
    for module in adapter.pairs:
        a, b = adapter.read(module)
        at, dot, rest = module.partition(".experts.")
        name = f"{module}.weight"
        rows = slice(None)
        if dot:
            index, _, which = rest.partition(".")
            name = f"{at}.experts.{'down_proj' if which == 'down_proj' else 'gate_up_proj'}"
            half = before[name].shape[1] // 2
            rows = {"gate_proj": slice(0, half), "up_proj": slice(half, None)}.get(which, rows)
        seen.add(name)
        old, new = (p[name][int(index)] if dot else p[name] for p in (before, merged))
        torch.testing.assert_close(old[rows] + b @ a, new[rows], atol=2e-6, rtol=1e-5)
    assert seen == changed
    adapter.close()


def test_targets_are_named_as_peft_names_them():
    module = "model.layers.3.mlp.experts.7.up_proj"
    assert names_module(["up_proj"], module) and names_module(["7.up_proj"], module)
    assert names_module(["all-linear"], module) and names_module(["all"], module)
    assert not names_module(["p_proj"], module) and not names_module(["layers.3"], module)
    assert not names_module([], module)


@pytest.mark.parametrize("text", ["", "x", "x=", "=/a", "a b=/x", "a\n=/x", "n" * 129 + "=/x"])
def test_specs_that_are_no_name_and_folder(text):
    with pytest.raises(ConfigError, match=r"NAME=DIR|adapter name"):
        AdapterSpec.parse(text)


def test_a_spec():
    assert AdapterSpec.parse("a/b:1=/x=y").name == "a/b:1"
    assert str(AdapterSpec.parse("a=/x=y").folder) == "/x=y"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported; only LORA is"),
        ({"use_dora": True}, "use_dora True is not supported; serve a merged checkpoint"),
        ({"modules_to_save": ["embed_tokens"]}, r"modules_to_save \['embed_tokens'\] is not"),
        ({"bias": "lora_only"}, "bias 'lora_only' is not supported"),
        ({"lora_bias": True}, "lora_bias True is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out True is not"),
        ({"layer_replication": [[0, 2]]}, "layer_replication .* is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "base whose weights training changed"),
        ({"a_key_of_tomorrow": 3}, "a_key_of_tomorrow 3 is not supported"),
        ({"r": 0}, "r 0: must be a whole number"),
        ({"r": "8"}, "r '8': must be a whole number"),
        ({"lora_alpha": None}, "lora_alpha None: must be a finite number"),
        ({"rank_pattern": {"(": 3}}, "rank_pattern '\\('"),
        ({"rank_pattern": [1]}, "rank_pattern .*: must be an object"),
        ({"rank_pattern": {"(?i)o_proj": 3}}, "rank_pattern '\\(\\?i\\)o_proj': global flags"),
        ({"rank_pattern": {"a{99999999999999999999}": 3}}, "rank_pattern .*: the repetition"),
        ({"rank_pattern": {"(" * 9999: 3}}, "rank_pattern .*: maximum recursion depth"),
        ({"alpha_pattern": {"o_proj": 10**400}}, "alpha_pattern 'o_proj' 1000.*: must be a fin"),
        ({"lora_alpha": 10**400}, "lora_alpha 1000.*: must be a finite number"),
        ({"use_rslora": "false"}, "use_rslora 'false': must be true or false"),
    ],
)
def test_configs_that_are_no_plain_lora(v3, tmp_path, values, said):
    write_adapter(tmp_path, v3[0], is_attention)
    change_config(tmp_path, **values)
    with pytest.raises(CheckpointError, match=said):
        Adapter(tmp_path, v3[1])


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "[" * 100000])
def test_configs_that_are_no_object(tmp_path, text):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        PeftConfig.load(tmp_path)


def test_a_config_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "adapter_config.json")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: is a pipe"):
        PeftConfig.load(tmp_path)


def _rename(old, new):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


A, B = f"base_model.model.{Q_A}.lora_A.weight", f"base_model.model.{Q_A}.lora_B.weight"


def _experts_twice():
    """Gate and up of all experts as one parameter, and up of the first alone."""
    at = "base_model.model.model.layers.1.mlp.experts"
    found = {f"{at}.lora_A.weight": (64, 64), f"{at}.lora_B.weight": (64, 64)}
    found |= {f"{at}.0.up_proj.lora_A.weight": (4, 64), f"{at}.0.up_proj.lora_B.weight": (32, 4)}
    return {name: torch.ones(shape) for name, shape in found.items()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda t: t.pop(A),
            f"{Q_A}.lora_A.weight is missing; {Q_A}.lora_B.weight is there: save the",
        ),
        (
            lambda t: t.pop(B),
            f"{Q_A}.lora_B.weight is missing; {Q_A}.lora_A.weight is there: save the",
        ),
        (lambda t: t.update({A: t[A][:3].clone()}), "shape .3, 64. found, .4, 64. expected: r "),
        (lambda t: t.update({A: t[A][:, :9].clone()}), "expected: the adapter is for another base"),
        (lambda t: t.update({B: t[B][:9].clone()}), "shape .9, 4. found, .48, 4. expected"),
        (lambda t: t.update({A: t[A].int()}), "dtype I32 found"),
        (lambda t: t.update({B: t[B].reshape(-1)}), "shape .192. found"),
        (
            lambda t: [_rename(n, n.replace("q_a_proj", "q_proj"))(t) for n in (A, B)],
            r"layers.1.self_attn.q_proj is no Linear of this model .*did you mean \S+q_b_proj",
        ),
        (
            lambda t: [_rename(n, n.replace("layers.1", "layers.9"))(t) for n in (A, B)],
            "layers.9.self_attn.q_a_proj is no Linear",
        ),
        (
            lambda t: [_rename(n, n.replace(Q_A, "model.layers.1.mlp.gate"))(t) for n in (A, B)],
            "layers.1.mlp.gate is no Linear of this model that takes an adapter",
        ),
        (
            lambda t: t.update({A.replace("lora_A.weight", "lora_magnitude_vector"): t[A][0]}),
            "lora_magnitude_vector is DoRA, which is not supported",
        ),
        (
            lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": t[A][0]}),
            "LoRA of embeddings, which is not supported",
        ),
        (lambda t: t.update({"x.weight": t[A][0]}), "tensor x.weight is not expected"),
        (
            lambda t: t.update(
                {"base_model.model.lm_head.base_layer.weight": torch.zeros(140, 64)}
            ),
            "shape .140, 64. found, .131, 64. in the base: the vocabulary was resized",
        ),
        (
            lambda t: [_rename(n, n.replace(Q_A, "model.layers.0.mlp.experts"))(t) for n in (A, B)],
            "this model has no experts there",
        ),
        (
            lambda t: [_rename(n, n.replace(Q_A, "model.layers.1.mlp.experts"))(t) for n in (A, B)],
            "mlp.experts.lora_A.weight: shape .4, 64. found, .64, 64. expected",
        ),
        (
            lambda t: [
                t.update({n.replace(Q_A, "model.layers.1.mlp.experts"): torch.tensor(1.0)})
                for n in (A, B)
            ],
            r"mlp.experts.lora_A.weight: shape \[\] found, .64, 64. expected",
        ),
        (
            lambda t: [t.update({n.removeprefix("base_model.model."): t[n]}) for n in (A, B)],
            f"{Q_A}.lora_.* is there twice, with and without base_model.model.; remove one",
        ),
        (lambda t: t.update(_experts_twice()), "experts.0.up_proj.*an adapter has one pair"),
        (lambda t: t.clear(), "nothing to add"),
    ],
)
def test_tensors_that_do_not_fit(v3, tmp_path, change, said):
    write_adapter(tmp_path, v3[0], is_attention)

    def contiguous(tensors):
        change(tensors)
        tensors.update({n: t.contiguous().clone() for n, t in tensors.items()})

    change_adapter(tmp_path, contiguous)
    with pytest.raises(CheckpointError, match=said):
        Adapter(tmp_path, v3[1])


@pytest.mark.parametrize("half", [A, B])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(v3, tmp_path, half, value):
    write_adapter(tmp_path, v3[0], is_attention)
    change_adapter(tmp_path, lambda tensors: tensors[half].view(-1)[-1:].fill_(value))
    adapter = Adapter(tmp_path, v3[1])
    with pytest.raises(CheckpointError, match=rf"{half} holds NaN or infinity"):
        adapter.read(Q_A)
    adapter.close()


def test_files_that_are_not_there_or_damaged(v3, tmp_path):
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: cannot be read"):
        Adapter(tmp_path, v3[1])
    write_adapter(tmp_path, v3[0], is_attention)
    path = tmp_path / "adapter_model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(CheckpointError, match="bytes found"):
        Adapter(tmp_path, v3[1])
    for header in (b"[1, 2]", b"3", b"{"):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(CheckpointError, match="safetensors: cannot be read"):
            adapted_modules(tmp_path, v3[1])
    path.unlink()
    with pytest.raises(CheckpointError, match="missing: is the download complete"):
        Adapter(tmp_path, v3[1])
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="only the pickled"):
        Adapter(tmp_path, v3[1])


def test_names_without_peft_prefix(v3, tmp_path):
    deltas = write_adapter(tmp_path, v3[0], is_attention, rslora=True, alpha=3.0, rank=5)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    bare = {n.removeprefix("base_model.model."): t for n, t in tensors.items()}
    save_file(bare, tmp_path / "adapter_model.safetensors")
    adapter = Adapter(tmp_path, v3[1])
    assert adapter.pairs.keys() == deltas.keys()
    a, b = adapter.read(Q_A)
    torch.testing.assert_close(b.double() @ a.double(), deltas[Q_A], atol=1e-6, rtol=1e-5)
    adapter.close()
    said = json.loads((tmp_path / "adapter_config.json").read_text())
    assert said["use_rslora"] is True
