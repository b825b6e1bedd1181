"""Adapters in a batch against checkpoints that they were merged into, in random mixed schedules."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from model_harness import CPU, Harness, decide, on_ranks, run_schedule

from ds_runtime.assembly.estimate import lora_bytes
from ds_runtime.description.adapter import adaptable_modules
from ds_runtime.description.hf import load_config
from ds_runtime.description.tree import Ranks
from ds_runtime.errors import CheckpointError, ConfigError
from ds_runtime.lora.read import Adapter
from ds_runtime.ops.binding.bound import BoundOps
from ds_runtime.parallel.world import World
from ds_runtime.weights.load import load_model
from ds_runtime_kit.models.adapters import change_adapter, merge, some_modules, write_adapter
from ds_runtime_kit.models.oracle import Oracle, compare
from ds_runtime_kit.models.tiny import write_tiny, write_tiny_fp8

KINDS = {
    "q": ("q_proj", "q_a_proj", "q_b_proj"),
    "kv_a": ("kv_a_proj_with_mqa",),
    "kv_b": ("kv_b_proj",),
    "o": ("o_proj",),
    "mlp": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "shared": ("shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj"),
    "lm_head": ("lm_head",),
}


def is_expert(module: str) -> bool:
    return ".mlp.experts." in module


def of_kind(kind: str):
    return lambda module: f".{module}".endswith(tuple(f".{end}" for end in KINDS[kind]))


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """shape → (folder, model of transformers, config), made once."""

    @cache
    def make(shape: str, fp8: bool = False):
        folder = tmp_path_factory.mktemp(shape)
        model = (write_tiny_fp8 if fp8 else write_tiny)(folder, shape, seed=3)
        return folder, model, load_config(folder)

    return make


class Tuned:
    """Adapters of one base, and an oracle for each: the base with the adapter merged into it."""

    def __init__(self, base, folder, wanted, **settings):
        self.folder, model, self.config = base
        self.names, self.oracles = [], [Oracle(model)]
        for n, (modules, values) in enumerate(wanted):
            at = folder / f"a{n}"
            deltas = write_adapter(at, self.config, modules, seed=n, **values)
            assert deltas
            merged = copy.deepcopy(model)
            merge(merged, deltas)
            self.names.append(f"a{n}={at}")
            self.oracles.append(Oracle(merged))

    def check(self, make, lengths=(70, 9, 33), largest=40, seed=0, tolerance=1e-4):
        """Every prompt with every adapter and with none, all in the same batches."""
        prompts, adapters = [], []
        for slot, oracle in enumerate(self.oracles, start=-1):
            for n, length in enumerate(lengths):
                prompts.append(oracle.draw_prompt(length, 100 * slot + n))
                adapters.append(slot)
        logits = make(prompts, seed, largest, adapters)
        for slot, oracle in enumerate(self.oracles, start=-1):
            mine = [i for i, a in enumerate(adapters) if a == slot]
            compare(oracle, [prompts[i] for i in mine], [logits[i] for i in mine], tolerance)

    def run(self, kernels="reference", **settings):
        harness = Harness(
            decide(self.folder, kernels, lora=tuple(self.names), **settings), pages=160
        )
        return lambda *args: run_schedule(harness, *args)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_module(bases, tmp_path, kind):
    """Prefill, prefixes in chunks and absorbed decode; ranks differ, one is rank-stabilised."""
    one = (of_kind(kind), {"rank": 4})
    other = (of_kind(kind), {"rank": 19, "rslora": True, "alpha": 3.0})
    tuned = Tuned(bases("v3"), tmp_path, [one, other])
    tuned.check(tuned.run("cpu"), lengths=(40,))


@pytest.mark.parametrize(
    ("shape", "kernels"), [("v3", "reference"), ("v3", "cpu"), ("v2-lite", "cpu"), ("odd", "cpu")]
)
def test_all_modules_but_experts(bases, tmp_path, shape, kernels):
    """Also without query latent, with unpaired rotated rows, and with a tied head."""
    wanted = [(lambda m: not is_expert(m), {"rank": r}) for r in (3, 16)]
    tuned = Tuned(bases(shape), tmp_path, wanted)
    tuned.check(tuned.run(kernels), lengths=(70, 9))


@pytest.mark.parametrize(("shape", "kernels"), [("v3", "reference"), ("odd", "cpu")])
def test_routed_experts(bases, tmp_path, shape, kernels):
    some = set(some_modules(bases(shape)[2], 0.5, 1))
    wanted = [(is_expert, {"rank": 2}), (lambda m: m in some, {"rank": 5})]
    tuned = Tuned(bases(shape), tmp_path, wanted)
    tuned.check(tuned.run(kernels), lengths=(40, 9))


def test_fp8_weights(bases, tmp_path):
    wanted = [(lambda m: True, {"rank": 4}), (of_kind("kv_b"), {"rank": 8})]
    tuned = Tuned(bases("v3", fp8=True), tmp_path, wanted)
    tuned.check(tuned.run("cpu"), lengths=(40,))


@pytest.mark.parametrize(
    ("shape", "kernels", "ends", "settings"),
    [
        ("v32", "reference", ("wk",), {}),
        ("v32", "cpu", ("wk",), {"fusion": ("qkv_a=off",)}),
        ("v32", "cpu", ("wq_b",), {}),
        ("glm", "cpu", ("wk", "wq_b"), {"fusion": ("index_keys=off",)}),
    ],
)
def test_an_indexer(bases, tmp_path, shape, kernels, ends, settings):
    """It changes which tokens are chosen, and nothing where all of them are: of 24 at most."""

    def wanted(module):
        return module.endswith(tuple(f".indexer.{end}" for end in ends))

    tuned = Tuned(bases(shape), tmp_path, [(wanted, {"rank": r}) for r in (4, 19)])
    tuned.check(tuned.run(kernels, **settings), lengths=(70, 24, 33))
    base, one, other = tuned.oracles
    tokens = base.draw_prompt(70, 7)
    for oracle in (one, other):
        moved = (oracle.logprobs(tokens) - base.logprobs(tokens)).abs().amax(-1)
        assert moved[:24].max() < 1e-5 and moved[24:].max() > 0.1


def test_an_indexer_beside_all_other_modules_in_fp8(bases, tmp_path):
    tuned = Tuned(bases("v32", fp8=True), tmp_path, [(lambda m: True, {"rank": 4})])
    assert any(m.endswith("indexer.wk") for m in adaptable_modules(tuned.config))
    tuned.check(tuned.run("cpu"), lengths=(50, 9))


@pytest.mark.parametrize(
    ("shape", "module"),
    [("v32", "model.layers.1.self_attn.indexer.weights_proj"),
     ("glm", "model.layers.2.self_attn.indexer.wk")],  # this layer shares: it has no indexer
)  # fmt: skip
def test_what_an_indexer_has_no_slots_for(bases, tmp_path, shape, module):
    base = bases(shape)
    write_adapter(tmp_path, base[2], lambda m: m.endswith("layers.1.self_attn.indexer.wk"))

    def rename(tensors):
        for name in list(tensors):
            half = name.rpartition(".lora_")[2]
            tensors[f"base_model.model.{module}.lora_{half}"] = tensors.pop(name)

    change_adapter(tmp_path, rename)
    with pytest.raises(CheckpointError, match=f"{module} is no Linear of this model that takes an"):
        Adapter(tmp_path, adaptable_modules(base[2]))


def test_first_projections_apart(bases, tmp_path):
    wanted = [(of_kind("q"), {}), (of_kind("kv_a"), {"rank": 2})]
    tuned = Tuned(bases("v3"), tmp_path, wanted)
    tuned.check(tuned.run("cpu", fusion=("qkv_a=off",)), lengths=(40,))


def test_two_ranks(bases, tmp_path):
    tuned = Tuned(bases("v3"), tmp_path, [(lambda m: True, {"rank": r}) for r in (4, 7)])

    def run(*args):
        def rank(world):
            assembly = decide(tuned.folder, "cpu", lora=tuple(tuned.names), tp=2)
            return run_schedule(Harness(assembly, world, pages=160), *args)

        one, two = on_ranks(2, rank)
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
        return one

    tuned.check(run, lengths=(40,))


def loaded(base, **settings):
    assembly = decide(base[0], "cpu", **settings)
    return assembly, load_model(assembly, BoundOps(assembly.binding), World.alone(), CPU)


def test_without_adapters_nothing_is_bound_or_held(bases):
    assembly, model = loaded(bases("v3"))
    assert assembly.lora is None and model.lora is None
    assert not [s for s, _ in assembly.binding.choices if s.op == "lora_delta"]
    assert loaded(bases("v3"), max_loras=0)[0].plan.digest() == assembly.plan.digest()


@pytest.mark.parametrize("tp", [1, 2])
def test_slots_take_the_memory_that_is_said(bases, tp):
    settings = {"max_loras": 3, "max_lora_rank": 5, "lora_target_modules": ("all",)}
    for shape in ("v3", "v2-lite", "odd"):
        if shape == "odd" and tp == 2:
            continue

        def rank(world, shape=shape):
            assembly = decide(bases(shape)[0], "cpu", tp=tp, **settings)
            model = load_model(assembly, BoundOps(assembly.binding), world, CPU)
            config = assembly.config
            said = lora_bytes(assembly.model, assembly.lora, config.dtype, Ranks(tp, tp))
            assert assembly.lora.rank == 16 and assembly.lora.slots == 3
            assert model.lora.nbytes == said > 0

        on_ranks(tp, rank)


def test_a_slot_is_free_again(bases, tmp_path):
    """What an adapter left in a slot does not reach the next, which has fewer modules and ranks."""
    base = bases("v3")
    write_adapter(tmp_path / "big", base[2], lambda m: not is_expert(m), rank=8)
    tuned = Tuned(base, tmp_path, [(of_kind("kv_b"), {"rank": 2})])
    settings = {"max_loras": 1, "max_lora_rank": 8}
    targets = {"lora_target_modules": ("self_attn.kv_b_proj", "o_proj", "q_b_proj", "q_a_proj")}
    targets["lora_target_modules"] += ("kv_a_proj_with_mqa", "lm_head", "mlp.gate_proj")
    targets["lora_target_modules"] += ("mlp.up_proj", "mlp.down_proj", "shared_experts.gate_proj")
    targets["lora_target_modules"] += ("shared_experts.up_proj", "shared_experts.down_proj")
    harness = Harness(decide(base[0], "cpu", **settings, **targets), pages=160)
    slots = harness.model.lora
    for name in ("big", "a0"):
        slots.put(0, slots.stage(Adapter(tmp_path / name, slots.modules)))
    tuned.check(lambda *args: run_schedule(harness, *args), lengths=(40, 9))


def test_an_adapter_that_does_not_fit_leaves_the_slots_alone(bases, tmp_path):
    base = bases("v3")
    for name, wanted, rank in (
        ("o", of_kind("o"), 4),
        ("q", of_kind("q"), 4),
        ("r", of_kind("o"), 9),
    ):
        write_adapter(tmp_path / name, base[2], wanted, rank=rank)
    write_adapter(tmp_path / "nan", base[2], of_kind("o"))
    last = "base_model.model.model.layers.2.self_attn.o_proj.lora_B.weight"
    change_adapter(tmp_path / "nan", lambda t: t[last].fill_(float("nan")))
    _, model = loaded(base, lora=(f"o={tmp_path / 'o'}",))
    slots = model.lora
    slots.put(0, slots.stage(Adapter(tmp_path / "o", slots.modules)))
    before = {n: (p.a.clone(), p.b.clone()) for n, p in slots._pairs.items()}
    for name, said in (
        ("q", r"q_a_proj has no slots in this engine: start it with --lora-target-modules"),
        ("r", r"rank 9 of \S+ is above --max-lora-rank 4"),
        ("nan", r"layers.2.self_attn.o_proj.lora_B.weight holds NaN"),
    ):
        with pytest.raises(CheckpointError, match=said):
            slots.stage(Adapter(tmp_path / name, slots.modules))
    for name, (a, b) in before.items():
        assert torch.equal(slots._pairs[name].a, a) and torch.equal(slots._pairs[name].b, b)


def test_values_too_large_for_the_dtype(bases, tmp_path):
    base = bases("v3")
    write_adapter(tmp_path / "o", base[2], of_kind("o"))
    name = "base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"
    change_adapter(tmp_path / "o", lambda t: t[name].fill_(1e6))
    _, model = loaded(base, lora=(f"o={tmp_path / 'o'}",), dtype="float16")
    with pytest.raises(CheckpointError, match=r"o_proj: a value overflows torch.float16"):
        model.lora.stage(Adapter(tmp_path / "o", model.lora.modules))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lora": ("x",)}, r"--lora 'x': write NAME=DIR"),
        ({"lora": ("x={o}", "x={o}")}, r"--lora x: named 2 times"),
        ({"lora": ("x={o}", "y={o}"), "max_loras": 1}, r"--max-loras 1: 2 adapters are given"),
        ({"lora": ("x={o}",), "max_lora_rank": 3}, r"--max-lora-rank 3: .* has rank 4"),
        ({"max_lora_rank": 3}, r"--max-lora-rank: there is no room for adapters"),
        ({"lora_target_modules": ("all",)}, r"--lora-target-modules: there is no room"),
        ({"max_loras": 1, "lora_target_modules": ("x",)}, r"--lora-target-modules x: no module"),
        ({"max_loras": -1}, r"--max-loras -1: must be from 0"),
        ({"max_loras": 1, "max_lora_rank": 0}, r"--max-lora-rank 0: must be at least 1"),
    ],
)
def test_settings_that_contradict(bases, tmp_path, settings, said):
    base = bases("v3")
    write_adapter(tmp_path, base[2], of_kind("o"))
    if "lora" in settings:
        settings = {**settings, "lora": tuple(x.format(o=tmp_path) for x in settings["lora"])}
    with pytest.raises(ConfigError, match=said):
        decide(base[0], "cpu", **settings)


def test_the_default_modules_are_all_but_the_routed_experts(bases):
    base = bases("v3")
    assembly = decide(base[0], "cpu", max_loras=2)
    known = adaptable_modules(base[2])
    assert assembly.lora.modules == {m for m in known if not is_expert(m)}
    assert assembly.lora.max_rank == 16
