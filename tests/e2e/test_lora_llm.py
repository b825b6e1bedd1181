"""Adapters through the whole engine: every token's log-probability is a merged checkpoint's."""

from __future__ import annotations

import copy

import pytest
import torch
from test_parity_llm import CACHED, check
from transformers import DeepseekV3ForCausalLM

from ds_runtime import LLM, SamplingParams
from ds_runtime.description.hf import load_config
from ds_runtime.errors import CheckpointError, RequestError
from ds_runtime_kit.models.adapters import change_config, merge, write_adapter
from ds_runtime_kit.models.oracle import Oracle
from ds_runtime_kit.models.tiny import write_tiny
from tiny_models import byte_prompts

SETTINGS = {
    "platform": "cpu",
    "dtype": "float32",
    "kv_memory": "2MB",
    "threads": 1,
    "dist_timeout": 60,
    "chunked_prefill_size": 24,
}
PARAMS = SamplingParams(max_tokens=10, logprobs=0)


def is_expert(module):
    return ".mlp.experts." in module


class Adapted:
    """Adapters a (all but experts), b (some, rank-stabilised) and e (experts too), and models that
    they are merged into; None is the base.
    """

    def __init__(self, tiny, folder):
        config = load_config(tiny)
        self.folders = {name: folder / name for name in "abe"}
        b = ("o_proj", "kv_b_proj", "lm_head", "down_proj")
        wanted = {
            "a": (lambda m: not is_expert(m), {"rank": 4}),
            "b": (lambda m: m.endswith(b) and not is_expert(m), {"rank": 7, "rslora": True}),
            "e": (lambda m: True, {"rank": 2}),
        }
        base = DeepseekV3ForCausalLM.from_pretrained(tiny, dtype="float32").eval()
        base.config._experts_implementation = "eager"
        self.models = {None: base}
        for seed, (name, (modules, values)) in enumerate(wanted.items()):
            deltas = write_adapter(self.folders[name], config, modules, seed=seed, **values)
            self.models[name] = copy.deepcopy(base)
            merge(self.models[name], deltas)

    def flags(self, names="ab"):
        return tuple(f"{name}={self.folders[name]}" for name in names)

    @torch.no_grad()
    def check(self, outputs, names):
        """Greedy tokens of the model, with its log-probabilities."""
        for output, name in zip(outputs, names, strict=True):
            ids = [*output.prompt_token_ids, *output.token_ids]
            logits = self.models[name](torch.tensor([ids])).logits[0].log_softmax(-1)
            first = len(output.prompt_token_ids) - 1
            for i, entry in enumerate(output.logprobs):
                row = logits[first + i]
                assert abs(entry.logprob - row[entry.token]) < 1e-4, (name, i)
                assert row[entry.token] > row.max() - 1e-4, (name, i)


@pytest.fixture(scope="module")
def adapted(tiny, tmp_path_factory):
    return Adapted(tiny, tmp_path_factory.mktemp("adapters"))


def prompts(count, seed=1, longest=60):
    return byte_prompts(count, seed, longest)


def names_for(count, names=(None, "a", "b")):
    return [names[i % len(names)] for i in range(count)]


def test_several_adapters_in_a_batch_with_prefixes_that_only_their_own_may_read(tiny, adapted):
    with LLM(tiny, **SETTINGS, lora=adapted.flags()) as llm:
        asked = prompts(6)
        names = names_for(6)
        adapted.check(llm.generate(asked, PARAMS, lora=names), names)
        shared = prompts(1, seed=2)[0] + list(range(2, 50))
        for name in (None, "a", "b"):
            cached = []
            for _ in range(2):
                (output,) = llm.generate(shared, PARAMS, lora=name)
                adapted.check([output], [name])
                cached.append(output.usage.cached_tokens)
            assert cached == [0, (len(shared) - 1) // 16 * 16]
        scored = SamplingParams(max_tokens=2, logprobs=0, prompt_logprobs=0)
        outputs = llm.generate(asked[:3], scored, lora=names[:3])
        for output, name in zip(outputs, names, strict=False):
            ids = torch.tensor([output.prompt_token_ids])
            rows = adapted.models[name](ids).logits[0].log_softmax(-1)
            for i, entry in enumerate(output.prompt_logprobs[1:]):
                assert abs(entry.logprob - rows[i, entry.token]) < 1e-4


def test_an_adapter_of_an_indexer_alone(tmp_path):
    """Where attention is sparse: keys that the adapter changed are cached for its requests only."""
    base = write_tiny(tmp_path / "v32", "v32", seed=11)
    merged, folder = copy.deepcopy(base), tmp_path / "keys"
    wanted = load_config(tmp_path / "v32")
    merge(merged, write_adapter(folder, wanted, lambda m: m.endswith(".indexer.wk"), rank=4))
    oracles = {None: Oracle(base), "keys": Oracle(merged)}
    asked = {name: oracle.draw_prompt(70, 1) for name, oracle in oracles.items()}
    with LLM(tmp_path / "v32", **SETTINGS, lora=(f"keys={folder}",)) as llm:
        for _ in range(2):  # then from the prefix cache
            told = llm.generate(list(asked.values()), CACHED, lora=list(asked))
            for output, oracle in zip(told, oracles.values(), strict=True):
                check(oracle, [output])
        assert [o.usage.cached_tokens for o in told] == [64, 64]
        (plain,) = llm.generate(asked["keys"], CACHED)
    assert plain.token_ids != told[1].token_ids


def test_routed_experts_and_preemption(tiny, adapted):
    settings = {**SETTINGS, "kv_memory": 90_000, "context_length": 80}
    names = names_for(6, (None, "e"))
    with LLM(tiny, **settings, lora=adapted.flags("e")) as llm:
        long = SamplingParams(max_tokens=24, logprobs=0)
        adapted.check(llm.generate(prompts(6, longest=40), long, lora=names), names)
        assert llm.stats().preemptions > 0


def test_captured_steps_serve_adapters_that_are_loaded_later(tiny, adapted, recorded):
    settings = {**SETTINGS, "platform": "recorded", "plugins": (), "max_running_requests": 4}
    with LLM(
        tiny, extra_plugins=[recorded], **settings, lora=adapted.flags("a"), max_loras=2,
        max_lora_rank=8,
    ) as llm:  # fmt: skip
        backend = llm._assembly.platform.backend
        names = names_for(4, (None, "a"))
        adapted.check(llm.generate(prompts(4), PARAMS, lora=names), names)
        llm.load_lora_adapter("b", adapted.folders["b"])
        names = names_for(4)
        adapted.check(llm.generate(prompts(4, seed=3), PARAMS, lora=names), names)
        assert sum(count > 0 for count in backend.replays) >= 2  # without masks, of 2 and 4 rows


def test_adapters_of_routed_experts_are_not_captured_and_the_plan_says_so(tiny, adapted, recorded):
    settings = {**SETTINGS, "platform": "recorded", "plugins": (), "max_running_requests": 4}
    with LLM(tiny, extra_plugins=[recorded], **settings, lora=adapted.flags("e")) as llm:
        assert not llm._engine.runner.programs.sizes
        assert any("one by one" in change[-1] for change in llm.plan.changes)
        adapted.check(llm.generate(prompts(2), PARAMS, lora="e"), ["e", "e"])


def test_two_ranks_load_at_run_time_or_neither_does(tiny, adapted, tmp_path):
    with LLM(
        tiny, **SETTINGS, tp=2, lora=adapted.flags("a"), max_loras=2, max_lora_rank=8
    ) as llm:  # fmt: skip
        bad = tmp_path / "bad"
        bad.mkdir()
        for file in adapted.folders["b"].iterdir():
            (bad / file.name).write_bytes(file.read_bytes())
        change_config(bad, r=5)
        with pytest.raises(RequestError, match=r"expected: r .*says rank 5"):
            llm.load_lora_adapter("b", bad)
        llm.load_lora_adapter("b", adapted.folders["b"])
        names = names_for(5)
        adapted.check(llm.generate(prompts(5), PARAMS, lora=names), names)


def test_loading_and_unloading_while_others_run(tiny, adapted):
    with LLM(tiny, **SETTINGS, lora=adapted.flags("a"), max_loras=2, max_lora_rank=8) as llm:
        llm.load_lora_adapter("b", str(adapted.folders["b"]))
        prompt = prompts(1, seed=4)[0] + [7] * 20
        (expected,) = llm.generate(prompt, PARAMS, lora="a")
        stream = llm.stream(prompt, PARAMS, lora="a")
        text = next(stream)
        with pytest.raises(RequestError, match="'a' is in use by 1 requests: wait"):
            llm.unload_lora_adapter("a")
        with pytest.raises(RequestError, match="'a' is loaded already, from "):
            llm.load_lora_adapter("a", adapted.folders["b"])
        with pytest.raises(RequestError, match=r"all 2 slots are in use \(--max-loras\), by a, b"):
            llm.load_lora_adapter("c", adapted.folders["b"])
        (output,) = llm.generate(prompt, PARAMS, lora="b")
        adapted.check([output], ["b"])
        llm.unload_lora_adapter("b")
        with pytest.raises(RequestError, match="adapter 'b' is not loaded; loaded are: a"):
            llm.generate(prompt, PARAMS, lora="b")
        with pytest.raises(RequestError, match=r"mlp.experts.\d+.\w+ has no slots"):
            llm.load_lora_adapter("b", adapted.folders["e"])
        # The same name, the other's weights, the same prompt: nothing cached may be read.
        llm.load_lora_adapter("b", adapted.folders["b"])
        assert text + "".join(stream) == expected.text
        llm.unload_lora_adapter("a")
        llm.load_lora_adapter("a", adapted.folders["b"])
        (output,) = llm.generate(prompt, PARAMS, lora="a")
        assert output.usage.cached_tokens == 0
        adapted.check([output], ["b"])


def test_what_cannot_start(tiny, adapted, tmp_path):
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: cannot be read"):
        LLM(tiny, **SETTINGS, lora=(f"x={tmp_path}",))
    with LLM(tiny, **SETTINGS) as llm:
        with pytest.raises(RequestError, match="no room for adapters: start it with --max-loras"):
            llm.load_lora_adapter("a", adapted.folders["a"])
        with pytest.raises(RequestError, match="not loaded; loaded are: none"):
            llm.generate([5, 6], lora="a")
        with pytest.raises(RequestError, match="2 adapters for 1 prompts"):
            llm.generate([5, 6], lora=["a", "b"])
