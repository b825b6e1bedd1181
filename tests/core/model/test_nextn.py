"""Where a draft layer may lie, and what is said where there is none."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from ds_runtime import LLM, SamplingParams
from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.estimate import needed_bytes
from ds_runtime.assembly.site_list import with_w4afp8_experts
from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime.checkpoint.tensors import EXPORTED
from ds_runtime.common.speculation import Speculation
from ds_runtime.config import EngineConfig
from ds_runtime.description.sites import DRAFT_HEAD
from ds_runtime.engine.device.runner import Runner
from ds_runtime.errors import CheckpointError, ConfigError, DsRuntimeError, UnsupportedError
from ds_runtime.parallel.world import World
from ds_runtime.weights import loader
from ds_runtime_bench import shapes
from ds_runtime_bench.checkpoints.checkpoint import make_checkpoint
from ds_runtime_kit.models.tiny import write_tiny

SETTINGS = {
    "platform": "cpu",
    "dtype": "float32",
    "context_length": 64,
    "kv_memory": 4_000_000,
    "max_running_requests": 2,
}
NEXTN = {**SETTINGS, "speculative_algorithm": "NEXTN"}


def load(**settings):
    assembly = assemble(EngineConfig(**settings), settings)
    return Runner(assembly, World.alone())


def tensors_of(folder):
    return {
        k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()
    }


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """The demo model without its draft layer, and that layer as it is exported."""
    demo = resolve_model("demo")
    model, draft = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("draft")
    tensors = tensors_of(demo)
    layer = {k: v for k, v in tensors.items() if k.startswith("model.layers.5.")}
    save_file({k: v for k, v in tensors.items() if k not in layer}, model / "model.safetensors")
    config = json.loads((demo / "config.json").read_text())
    for folder, changes in (
        (model, {"num_nextn_predict_layers": 0}),
        (draft, {"num_hidden_layers": 1}),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
    renamed = {k.replace("layers.5.", "layers.0."): v.clone() for k, v in layer.items()}
    embedding = tensors["model.embed_tokens.weight"]
    renamed["model.layers.0.embed_tokens.weight"] = embedding.clone()
    renamed["model.layers.0.shared_head.head.weight"] = embedding.clone()
    save_file(renamed, draft / EXPORTED)
    return model, draft


def test_a_draft_layer_that_lacks_what_makes_it_one_is_named(tmp_path):
    demo = resolve_model("demo")
    tensors = {k: v for k, v in tensors_of(demo).items() if "eh_proj" not in k}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((demo / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"model\.layers\.5\.eh_proj\.weight would be there"):
        load(**NEXTN, model=str(tmp_path))


def test_the_plan_the_estimate_and_the_caches_have_one_layer_more():
    plain = assemble(EngineConfig(**SETTINGS), SETTINGS)
    runner = load(**NEXTN)
    assembly = runner.assembly
    drafted = [s for s, _ in assembly.binding.choices if s.role == "draft"]
    assert {s.layer for s in drafted} == {5} and {"eh_proj", "nextn"} <= {s.module for s in drafted}
    verify = [s for s, _ in assembly.binding.choices if s.phase == "verify"]
    assert len(verify) == 6 and len(list(runner.caches)) == 6
    more = needed_bytes(assembly) - needed_bytes(plain)
    assert more == pytest.approx(runner.draft.packed_bytes, rel=0.02)


def test_a_folder_of_its_own_holds_the_same_layer(split):
    model, draft = split
    ours = load(**NEXTN)
    theirs = load(**NEXTN, model=str(model), speculative_draft_model_path=str(draft))
    for name in ("join", "norm", "embedding_norm"):
        a, b = (getattr(r.draft, name) for r in (ours, theirs))
        a, b = ((x.packed.tensors["weight"] if hasattr(x, "packed") else x.weight) for x in (a, b))
        assert a.equal(b)


def test_a_checkpoint_without_the_layer_is_refused(split, tmp_path):
    model, _draft = split
    with pytest.raises(
        UnsupportedError, match=r"NEXTN.*num_nextn_predict_layers.*draft-model-path"
    ):
        assemble(EngineConfig(**NEXTN, model=str(model)))
    with pytest.raises(CheckpointError, match="--speculative-draft-model-path /nowhere: no such"):
        assemble(EngineConfig(**NEXTN, model=str(model), speculative_draft_model_path="/nowhere"))
    for path, said in ((str(tmp_path), f"path {tmp_path}: "), ("", "path '': is empty")):
        with pytest.raises(
            (CheckpointError, ConfigError), match=f"^--speculative-draft-model-{said}"
        ):
            assemble(EngineConfig(**NEXTN, model=str(model), speculative_draft_model_path=path))


@pytest.mark.parametrize(
    ("model", "draft", "said"),
    [
        ("demo-v32", "demo", r"has no indexer \(DeepseekV3For\w+\), the model has one"),
        ("demo", "demo-v32", r"has an indexer \(DeepseekV32For\w+\), the model has none"),
    ],
)
def test_a_layer_with_another_attention_is_refused(model, draft, said):
    settings = {**NEXTN, "model": model, "speculative_draft_model_path": draft}
    with pytest.raises(ConfigError, match=rf"draft-model-path \S+: its draft layer {said}"):
        assemble(EngineConfig(**settings))


def test_a_layer_whose_number_in_its_folder_is_that_of_one_that_shares(tmp_path, monkeypatch):
    """Draft layers always have an indexer."""

    def make(name, layers, **more):
        raw = {**shapes.SHAPES["tiny-v32"], "num_hidden_layers": layers, **more}
        monkeypatch.setattr(shapes, "SHAPES", {**shapes.SHAPES, name: raw})
        return make_checkpoint(tmp_path / name, name, "float32")

    model = make("six", 6, index_topk_pattern="FFSSFS")
    for layers in (2, 3):  # there that layer chooses, or shares
        draft = make(f"draft{layers}", layers, num_nextn_predict_layers=1)
        settings = {**NEXTN, "model": str(model), "speculative_draft_model_path": str(draft)}
        groups = {laid.group.name: laid.group.layers for laid in load(**settings).assembly.caches}
        assert groups["index"] == (0, 1, 4, 6)


def test_a_layer_of_another_model_or_with_holes_is_refused(split, tmp_path):
    model, draft = split
    other = tmp_path / "other"
    shutil.copytree(draft, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "hidden_size": 128}))
    settings = {**NEXTN, "model": str(model), "speculative_draft_model_path": str(other)}
    with pytest.raises(ConfigError, match="hidden is 128, the model's is 256"):
        assemble(EngineConfig(**settings))
    (other / "config.json").write_text(json.dumps(config))
    tensors = load_file(other / EXPORTED)
    del tensors["model.layers.0.eh_proj.weight"]
    save_file(tensors, other / EXPORTED)
    with pytest.raises(CheckpointError, match=r"model.layers.0.eh_proj.weight is missing"):
        load(**settings)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"speculative_num_steps": 2}, "num-steps 2: needs --speculative-algorithm"),
        ({"speculative_draft_model_path": "x"}, "draft-model-path x: needs"),
        ({"speculative_algorithm": "MEDUSA"}, "'MEDUSA': must be one of NEXTN, EAGLE"),
        ({"speculative_algorithm": "EAGLE", "speculative_num_steps": 0}, "must be at least 1"),
        (
            {
                "speculative_algorithm": "EAGLE",
                "speculative_num_steps": 2,
                "speculative_num_draft_tokens": 5,
            },
            "it is 3: a chain has one draft per step",
        ),
        ({"speculative_algorithm": "NEXTN", "speculative_num_draft_tokens": 65}, "must be 2 to 64"),
        (
            {"speculative_algorithm": "NEXTN", "speculative_num_steps": 64},
            "num-steps 64: must be at",
        ),
        (
            {
                "speculative_algorithm": "EAGLE",
                "speculative_eagle_topk": 4096,
                "speculative_num_steps": 1,
            },
            "--speculative-eagle-topk 4096: must be at most 63",
        ),
        ({"speculative_draft_quantize": "fp8"}, "--speculative-draft-quantize fp8: needs"),
        ({"speculative_draft_quantize": "int8"}, "--speculative-draft-quantize .int8.: must be"),
        ({"speculative_adaptive": True}, "--speculative-adaptive: needs --speculative-algorithm"),
        (
            {
                "speculative_algorithm": "EAGLE",
                "speculative_eagle_topk": 2,
                "speculative_num_steps": 2,
                "speculative_num_draft_tokens": 9,
            },
            "has 7 tokens",
        ),
        (
            {
                "speculative_algorithm": "EAGLE",
                "speculative_eagle_topk": 9,
                "speculative_num_steps": 9,
            },
            "72 tokens after its first level, and at most 64 are possible",
        ),
        ({"speculative_algorithm": "NEXTN", "max_step_tokens": 3}, "one request verifies 4 tokens"),
    ],
)
def test_settings_that_do_not_go_together(given, said):
    with pytest.raises(DsRuntimeError, match=said):
        EngineConfig(**given)


def test_what_is_left_out_follows_from_the_rest():
    def settled(**given):
        found = Speculation.of(EngineConfig(speculative_algorithm="EAGLE", **given))
        return found.steps, found.topk, found.tokens

    assert settled() == (3, 1, 4)
    assert settled(speculative_num_steps=1) == (1, 1, 2)
    assert settled(speculative_num_draft_tokens=6) == (5, 1, 6)
    assert settled(speculative_eagle_topk=2, speculative_num_steps=2) == (2, 2, 7)


def test_trees_go_to_kernels_that_take_their_mask():
    found = assemble(EngineConfig(**NEXTN, speculative_eagle_topk=2)).binding.decisions
    trees = [d for d in found if d.site.phase == "tree"]
    assert len(trees) == 6 and {d.op for d in trees} == {"mla_decode"}
    said = dict(trees[0].refused)
    assert said["flash_mla.MlaDecode"] == "does not serve the tree phase"
    assert sum(d.op == "cache_move" for d in found) == 5, "the draft layer keeps no branch"
    pinned = (*NEXTN.items(), ("pin", ("mla_decode=flash_mla",)))
    with pytest.raises(ConfigError, match="refused at"):
        assemble(EngineConfig(**dict(pinned), speculative_eagle_topk=2))


def test_drafts_alone_are_rounded_where_the_device_multiplies_fp8():
    """What the checkpoint has in 16 bits, and no more than drafts are made by."""

    def formats(device=None, **given):
        given = {
            "speculative_algorithm": "NEXTN",
            **({"platform": "cpu"} if not device else {}),
            **given,
        }
        assembly = assemble(EngineConfig(**given), tuple(given), device=device)
        sites = [site for site, _ in assembly.binding.choices if site.op == "linear"]
        return {s.module: s.weight_format for s in sites if s.layer in (5, -1)}

    for found in (formats(), formats("sm90", speculative_draft_quantize="none")):
        assert found["eh_proj"] == found["lm_head"] == "dense" and DRAFT_HEAD not in found
    for found in (formats("sm90"), formats(speculative_draft_quantize="fp8")):
        assert found["eh_proj"] == found[DRAFT_HEAD] == "fp8_block" and found["lm_head"] == "dense"
    assert formats("sm90", dtype="float32")["eh_proj"] == "dense"
    found = formats("sm90", quantize="int8")  # nothing of 16 bits is left
    assert found["eh_proj"] == found["lm_head"] == "int8_channel" and DRAFT_HEAD not in found
    with pytest.raises(ConfigError, match="the head is int8_channel already"):
        formats("sm90", quantize="int8", speculative_draft_quantize="fp8")
    with pytest.raises(ConfigError, match=r"fp8: .* would hold the copy of the head in bfloat16"):
        formats("sm80", speculative_draft_quantize="fp8")
    pinned = formats("sm90", pin=("linear=triton.linear_dense",))
    assert pinned["eh_proj"] == "dense" and DRAFT_HEAD not in pinned


def test_the_draft_layer_s_experts_may_be_rounded_to_int4():
    def formats(device=None, **given):
        given = {"speculative_algorithm": "NEXTN", "dtype": "bfloat16", **given}
        given |= {} if device else {"platform": "cpu"}
        given |= {"speculative_draft_quantize": "w4afp8"}
        binding = assemble(EngineConfig(**given), tuple(given), device=device).binding
        return {(s.layer, s.module): s.weight_format for s, _ in binding.choices if s.weight_format}

    found = formats("sm90")
    assert found[5, "mlp.experts"] == "w4afp8" and found[5, DRAFT_HEAD] == "fp8_block"
    assert found[4, "mlp.experts"] == "dense" and found[-1, "lm_head"] == "dense"
    assert "w4afp8" not in {form for (layer, _), form in found.items() if layer != 5}
    found = formats()
    assert found[5, "mlp.experts"] in ("w4afp8", "int4_group") and (5, DRAFT_HEAD) not in found
    found = formats(quantize="int8")  # the checkpoint's own are rounded, once
    assert found[5, "mlp.experts"] in ("w4afp8", "int4_group")
    assert found[4, "mlp.experts"] == "int8_channel"
    few = with_w4afp8_experts(lambda _: "dense", lambda _: "nvfp4", True)
    assert few("model.layers.5.eh_proj") == "dense"
    said = "w4afp8: model.layers.5.mlp.experts.0.up_proj is nvfp4 already, and is not rounded again"
    with pytest.raises(ConfigError, match=said):
        few("model.layers.5.mlp.experts.0.up_proj")


def test_a_draft_layer_without_experts_has_none_to_round(tmp_path):
    write_tiny(tmp_path, "v3")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"num_nextn_predict_layers": 1, "first_k_dense_replace": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = {**NEXTN, "model": str(tmp_path), "speculative_draft_quantize": "w4afp8"}
    with pytest.raises(ConfigError, match="w4afp8: the draft layer has no routed experts"):
        assemble(EngineConfig(**given), tuple(given))


def test_answers_are_the_model_s_whatever_drafts_are_rounded_to():
    prompts = [[1, 2, 3, 4, 5], list(range(7, 40))]
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)

    def answers(**given):
        with LLM(**SETTINGS, **given) as llm:
            return [o.token_ids for o in llm.generate(prompts, params)]

    drafting = {"speculative_algorithm": "NEXTN", "speculative_draft_quantize": "w4afp8"}
    assert answers(**drafting) == answers()


def test_a_rounded_head_is_the_model_s_nearly_and_is_counted(monkeypatch):
    monkeypatch.setattr(loader, "_ROUNDED", 256)  # in several pieces, the last one short
    settings = {**NEXTN, "dtype": "bfloat16"}
    own, rounded = load(**settings), load(**settings, speculative_draft_quantize="fp8")
    assert own.model.draft_head is own.model.lm_head
    hidden = torch.randn(7, own.model.config.hidden).to(torch.bfloat16)
    exact, found = own.model.draft_logits(hidden), rounded.model.draft_logits(hidden)
    assert torch.equal(exact, own.model.logits(hidden))
    assert torch.equal(rounded.model.logits(hidden), exact)
    error = ((found - exact).norm() / exact.norm()).item()
    assert 0.001 < error < 0.06  # e4m3 has four bits of significand
    head = found.shape[1] * own.model.config.hidden
    more = rounded.model.packed_bytes - own.model.packed_bytes
    assert head <= more <= 1.2 * head
    estimated = needed_bytes(rounded.assembly) - needed_bytes(own.assembly)
    assert abs(estimated - more) < 0.6 * own.model.config.hidden**2 * 2 + 0.2 * head
