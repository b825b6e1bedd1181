"""Random weights from config.json alone: complete, alike on all ranks, and of use for measuring."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections import Counter

import pytest
import torch
from model_harness import Harness, Sequence_, decide
from published_kinds import KINDS, write_kind
from test_hybrid_config import TINY
from test_v4_formats import FP8 as V4_FP8

from ds_runtime import LLM, SamplingParams
from ds_runtime.assembly.assemble import find_loader
from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.cli import main
from ds_runtime.config import EngineConfig
from ds_runtime.description.hf import load_config
from ds_runtime.description.structure import stored_modules
from ds_runtime.errors import DsRuntimeError
from ds_runtime.ops.contract import DeviceInfo, Dims, Facts
from ds_runtime.ops.reference.matrices import moe
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.weights.check import check_checkpoint
from ds_runtime.weights.dummy import DummyCheckpoint
from ds_runtime.weights.quant import PartRequest, Quant
from ds_runtime_bench.checkpoints.checkpoint import plan_tensors
from ds_runtime_bench.record import environment
from ds_runtime_bench.shapes import config_of
from parts import mostly_slow

FACTS = Facts(DeviceInfo("cpu", "", ""), Dims({}), dtype="float32")
SMALL = {"dtype": "float32", "platform": "cpu", "threads": 1, "kv_memory": 1 << 22}


def configured(folder, shape, dtype="bfloat16", **changes):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config_of(shape, dtype), **changes}))
    return folder


@pytest.fixture(scope="module")
def kind_of(tmp_path_factory):
    """A folder with nothing but the config files of a published kind, and the real one beside."""
    made = {}

    def get(kind):
        if kind not in made:
            real, bare = (tmp_path_factory.mktemp(name) for name in ("real", "bare"))
            write_kind(real, kind)
            for file in ("config.json", "hf_quant_config.json"):
                if (real / file).is_file():
                    shutil.copy(real / file, bare)
            made[kind] = bare, real
        return made[kind]

    return get


def opened(folder):
    config = load_config(folder)
    quant = Quant.open(find_loader(load_plugins(()).offers(FACTS), config), config.quantization)
    modules = stored_modules(config, quant.format_of)
    return DummyCheckpoint(folder, config, quant, modules.values()), config, quant, modules


@pytest.mark.parametrize("kind", KINDS)
def test_every_published_kind_is_made_whole(kind_of, kind):
    """Of a real checkpoint's tensors the dummy has each that is needed, in its shape; decoded
    weights keep the size of what goes in; any part is what the whole has there."""
    bare, real = kind_of(kind)
    dummy, config, quant, modules = opened(bare)
    places = check_checkpoint(dummy, config, quant, modules)
    stored = Checkpoint(real).entries
    for name, entry in dummy.entries.items():
        assert stored[name].shape == entry.shape or math.prod(entry.shape) == 1, name
    draw = random.Random(kind)
    for module, found in modules.items():
        if not found.format:
            continue
        rows, cols = found.shape

        def part(r, c, module=module):
            request = PartRequest(
                dummy, quant.quantization, module, quant.encoding(module), places[module], r, c
            )
            return quant.read(request).dequantise()

        whole = part(slice(0, rows), slice(0, cols))
        head = module == "lm_head"
        want = math.sqrt(max(1, 2 * (math.log(config.vocab_size) - 4)) if head else 1) / cols**0.5
        assert bool(torch.isfinite(whole).all())
        std = float(whole.std())
        few = math.prod(places[module].shape) < 64 * 128 * 128  # blocks: half are halved
        assert abs(std / want - 1) < (0.45 if few else 0.25), (module, std, want)
        assert abs(float(whole.mean())) < 0.1 * want, module
        if draw.random() < 0.2:
            a, b = sorted(draw.sample(range(rows + 1), 2))
            if quant.encoding(module).format != "int4_actorder":
                torch.testing.assert_close(part(slice(a, b), slice(0, cols)), whole[a:b])


@pytest.mark.parametrize("kind", ["fp8", "awq", "gptq act-order", "ct int8", "modelopt nvfp4"])
def test_formats_generate_from_the_config_alone(kind_of, kind):
    bare, _ = kind_of(kind) if kind in KINDS else pytest.fail(kind)
    with LLM(str(bare), load_format="dummy", **SMALL) as llm:
        (found,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(found.outputs[0].token_ids) == 4


def test_ranks_and_runs_have_the_same_weights(tmp_path):
    """Several ranks cut one model: their answers are those of one rank, run after run."""
    folder = configured(tmp_path / "m", "tiny-v3", "fp8")
    prompt, params = [[5, 6, 7, 8, 9]], SamplingParams(max_tokens=8, ignore_eos=True)
    answers = []
    for flags in ({}, {}, {"tp": 2}):
        with LLM(str(folder), load_format="dummy", **SMALL, **flags) as llm:
            answers.append(llm.generate(prompt, params)[0].outputs[0].token_ids)
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("own", [True, False])
def test_drafts_are_made_too(tmp_path, own):
    model = configured(tmp_path / "m", "tiny-v3", num_nextn_predict_layers=int(own))
    flags = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 2}
    if not own:
        flags["speculative_draft_model_path"] = str(
            configured(tmp_path / "d", "tiny-v3", num_nextn_predict_layers=1)
        )
    prompt, params = [[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True)
    answers = []
    for drafting in ({}, flags):
        with LLM(str(model), load_format="dummy", **SMALL, **drafting) as llm:
            answers.append(llm.generate(prompt, params)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("tie", mostly_slow([False, True], 1))
def test_sixty_four_layers_stay_finite_even_and_undecided(tmp_path, tie, monkeypatch):
    """Every expert is chosen, none by more than a few times its share; the next token's entropy is
    between 2 and 6 nats."""
    folder = configured(
        tmp_path / "m",
        "tiny-v3",
        num_hidden_layers=64,
        vocab_size=8192,
        tie_word_embeddings=tie,
        max_position_embeddings=4096,
    )
    chosen, route = Counter(), moe.route

    def counted(logits, bias, routing):
        weights, ids = route(logits, bias, routing)
        chosen.update(i for i in ids.reshape(-1).tolist() if i < 16)  # the last slot is shared
        return weights, ids

    monkeypatch.setattr(moe, "route", counted)
    harness = Harness(decide(folder, load_format="dummy"), pages=160)
    draw = random.Random(0)
    tokens = [draw.randrange(8192) for _ in range(1024)]
    sequence = Sequence_(tokens, list(range(64)))
    harness.step([(sequence, 1024)])
    logits = torch.cat(sequence.logits)
    assert bool(torch.isfinite(logits).all())
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert 2 < float(entropy.mean()) < 6
    assert float(((entropy > 2) & (entropy < 6)).float().mean()) > 0.95
    share = sum(chosen.values()) / 16
    assert len(chosen) == 16 and max(chosen.values()) < 1.5 * share
    assert min(chosen.values()) > 0.5 * share


def test_what_make_checkpoint_writes_is_what_the_dummy_has(tmp_path):
    raw = config_of("tiny-v3", "fp8")
    folder = configured(tmp_path / "m", "tiny-v3", "fp8")
    dummy, *_ = opened(folder)
    written = {p.name: (p.dtype, p.shape) for p in plan_tensors(raw)}
    assert {n: (e.dtype, e.shape) for n, e in dummy.entries.items()}.items() <= written.items()


def test_a_layout_that_only_its_loader_knows_is_refused(tmp_path):
    types = {"model.layers.0.self_attn.o_proj": "Q4_K"}
    quantization = {"quant_method": "gguf", "types": types}
    folder = configured(tmp_path / "m", "tiny-v3", quantization_config=quantization)
    with pytest.raises(DsRuntimeError, match=r"--load-format dummy: .*which only its loader"):
        LLM(str(folder), load_format="dummy", **SMALL)


def test_records_and_the_start_say_dummy(tmp_path, capfd):
    folder = configured(tmp_path / "m", "tiny-v3")
    assert main(["generate", "hello", "--model", str(folder), "--load-format", "dummy"]) == 0
    assert environment()["weights"] == "DUMMY"
    assert EngineConfig(load_format="dummy").load_format == "dummy"
    capfd.readouterr()


def test_every_tensor_of_v4_is_made(tmp_path):
    """Experts by token are distinct, and the model answers with numbers."""
    raw = {**TINY, "hidden_size": 128, "moe_intermediate_size": 64, "quantization_config": V4_FP8}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    dummy, config, quant, modules = opened(tmp_path)
    check_checkpoint(dummy, config, quant, modules)
    table = dummy.read("layers.1.ffn.gate.tid2eid")
    assert table.shape == (256, 2) and bool((table[:, 0] != table[:, 1]).all())
    assert int(table.min()) >= 0 and int(table.max()) < 8
    with LLM(str(tmp_path), load_format="dummy", platform="cpu", kv_memory="50MB") as llm:
        params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=0)
        (found,) = llm.generate([list(range(140))], params)
        assert all(math.isfinite(x.logprob) for x in found.outputs[0].logprobs)
