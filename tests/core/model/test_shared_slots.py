"""Shared experts as slots behind the routed ones: where, and that the model stays the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_harness import Harness, decide, on_ranks, run_schedule

from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.plan import check_against
from ds_runtime.config import EngineConfig
from ds_runtime.description.hf import load_config
from ds_runtime.description.sites import model_sites
from ds_runtime_kit.models.oracle import Oracle, compare
from ds_runtime_kit.models.tiny import write_tiny, write_tiny_fp8

LITE = Path(__file__).parent / "fixtures/deepseek-v2-lite.json"  # it has two shared experts


@pytest.fixture
def lite(tmp_path):
    """The folder of a config, made of V2-Lite's and what is given instead."""

    def make(**instead):
        text = json.dumps(json.loads(LITE.read_text()) | instead)
        (tmp_path / "config.json").write_text(text)
        return tmp_path

    return make


def shapes(sites, op, module):
    return {site.shape for site in sites if site.op == op and site.module.startswith(module)}


def slots_of(folder, format_of=lambda module: "dense", **given):
    """How many slots there are, and whether the shared experts are a SwiGLU of their own."""
    config = load_config(folder)
    sites = model_sites(config, format_of, **given)
    (routed,) = shapes(sites, "experts", "mlp.experts")
    return routed[0] - config.experts, bool(shapes(sites, "linear", "mlp.shared_experts"))


def test_shared_experts_become_slots(lite):
    assert slots_of(lite()) == (2, False)
    assert slots_of(lite(), apart=("shared_experts",)) == (0, True)


def test_another_format_stays_apart(lite):
    def mixed(module):
        return "dense" if "shared_experts" in module else "fp8_block"

    assert slots_of(lite(), mixed) == (0, True)
    assert slots_of(lite(), lambda module: "int4_group") == (0, True)


@pytest.mark.parametrize(("shared", "width", "slots"), [(2, 1408, 2), (2, 1400, 0), (1, 1400, 1)])
def test_several_slots_of_blocks_are_whole_blocks(lite, shared, width, slots):
    folder = lite(n_shared_experts=shared, moe_intermediate_size=width)
    assert slots_of(folder, lambda module: "fp8_block") == (slots, not slots)
    assert slots_of(folder) == (shared, False)


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_adapted_shared_experts_stay_apart(lite, name):
    adapted = {f"model.layers.{i}.mlp.shared_experts.{name}" for i in range(27)}
    assert slots_of(lite(), adapted=adapted) == (0, True)


@pytest.mark.parametrize(
    ("device", "given", "slots"),
    [
        ("h200", {}, 2),
        ("h200", {"quantize": "int8"}, 0),
        ("h200", {"quantize": "int8", "disable_graph": True}, 0),
        ("h200", {"fusion": ("shared_experts=on",)}, 2),
        ("h200", {"fusion": ("qkv_a=off",)}, 2),
        ("a100", {}, 2),
        ("mi300x", {}, 2),
        ("mi300x", {"fusion": ("shared_experts=off",)}, 0),
    ],
)
def test_a_plugin_may_wish_them_apart(lite, device, given, slots):
    plan = assemble(EngineConfig(model=str(lite()), **given), given, device=device).plan
    apart = any("mlp.shared_experts" in site for row in plan.rows for site in row.sites)
    assert apart == (slots == 0)
    wished = [change for change in plan.changes if change[0] == "fusion"]
    assert bool(wished) == ("quantize" in given and "fusion" not in given)


def test_a_plan_of_captured_steps_holds_for_steps_op_by_op(lite, tmp_path):
    folder, locked = str(lite()), tmp_path / "plan.json"
    captured, eager = (
        assemble(EngineConfig(model=folder, disable_graph=off), device="h200").plan
        for off in (False, True)
    )
    locked.write_text(json.dumps(captured.to_dict()))
    check_against(eager, str(locked))


@pytest.mark.parametrize(("shape", "fp8"), [("v2-lite", False), ("v3", True)])
def test_logits_are_transformers_either_way(tmp_path, shape, fp8):
    model = (write_tiny_fp8 if fp8 else write_tiny)(tmp_path, shape, seed=5)
    oracle = Oracle(model)
    prompts = [oracle.draw_prompt(n, n) for n in (70, 5, 31)]
    for apart in ((), ("shared_experts=off",)):
        harness = Harness(decide(tmp_path, "cpu", fusion=apart))
        assert bool(harness.model.blocks[-1].mlp.shared) == bool(apart)
        compare(oracle, prompts, run_schedule(harness, prompts, 4, 30), 1e-4)


def test_ranks_share_every_slot(tmp_path):
    oracle = Oracle(write_tiny(tmp_path, "v2-lite", seed=6))
    prompts = [oracle.draw_prompt(n, n) for n in (33, 8)]

    def rank(world):
        harness = Harness(decide(tmp_path, "cpu", tp=2), world)
        assert harness.model.blocks[-1].mlp.shared is None
        return run_schedule(harness, prompts, 2, 20)

    for logits in on_ranks(2, rank):
        compare(oracle, prompts, logits, 1e-4)
