"""The engine on the accelerator that is here: the CPU's answers, no hidden wait, true captures."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ds_runtime import LLM, OutputRules, SamplingParams
from ds_runtime.assembly.assemble import assemble
from ds_runtime.config import EngineConfig
from ds_runtime.engine.device.runner import Runner
from ds_runtime.engine.engine import Engine
from ds_runtime.engine.messages import Submit, Tokens
from ds_runtime.engine.process.entry import enter
from ds_runtime.engine.step.masked_draw import MaskedDraw
from ds_runtime.parallel.world import World
from ds_runtime.platform.contract import Platform
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.plugins.select_platform import select_platform
from ds_runtime_bench import shapes
from ds_runtime_bench.checkpoints.checkpoint import make_checkpoint
from ds_runtime_kit.models.tiny import V3_HEADS

pytestmark = pytest.mark.gpu

PROMPTS = ["12+30=", "The capital of France", "def add(a, b):", "Once upon a time, there was"]
MIXED: tuple[dict[str, Any], ...] = (
    {"max_tokens": 24},
    {"max_tokens": 9, "temperature": 0.8},
    {"max_tokens": 40, "logprobs": 2},
    {"max_tokens": 17, "frequency_penalty": 0.7, "temperature": 0.5},
    {"max_tokens": 30, "min_tokens": 4, "stop_token_ids": tuple(range(2, 120))},
    {"max_tokens": 12, "logit_bias": {9: 3.0}},
    {"max_tokens": 5, "prompt_logprobs": 1},
)


@pytest.fixture(scope="module")
def platform() -> Platform:
    best, _ = select_platform(load_plugins())
    if not best.asynchronous:
        pytest.skip(f"the best platform here is {best.name}")
    enter(best)
    return best


def settings(platform: Platform, **changes) -> dict[str, Any]:
    return {
        "platform": platform.name,
        "dtype": "float32",
        "kv_memory": 3_000_000,
        "page_size": 16,
        "max_running_requests": 6,
        "chunked_prefill_size": 24,
        "max_step_tokens": 60,
        **changes,
    }


@contextmanager
def no_waiting(platform: Platform) -> Iterator[None]:
    """Whatever waits for the device raises, but for awaiting an event by name."""
    if platform.device().type != "cuda":
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_demo_answers_as_on_the_cpu(platform: Platform) -> None:
    params = SamplingParams(max_tokens=32)
    found = {}
    for name in ("cpu", platform.name):
        with LLM("demo", platform=name, dtype="float32") as llm:
            found[name] = [o.token_ids for o in llm.generate(PROMPTS, params)]
    assert found[platform.name] == found["cpu"]


def test_masks_within_captured_steps_give_the_answers_of_the_cpu(platform: Platform, monkeypatch):
    drawn, plain = [], MaskedDraw.draw

    def draw(self, count):
        drawn.append(count)
        return plain(self, count)

    monkeypatch.setattr(MaskedDraw, "draw", draw)
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    rules = (
        OutputRules(json_schema=json.dumps(schema)),
        OutputRules(regex="(a|bc|[d-k]x){9,12}"),
        OutputRules(choice=("alpha", "beta")),
    )
    params = [SamplingParams(max_tokens=40, rules=one) for one in rules]
    params.append(SamplingParams(max_tokens=40, rules=rules[1], temperature=1.0, seed=4))
    params.append(SamplingParams(max_tokens=40))
    prompts, found = [*PROMPTS, "2*3="], {}
    for name, disable_graph in (("cpu", True), (platform.name, True), (platform.name, False)):
        drawn.clear()
        with LLM("demo", platform=name, dtype="float32", disable_graph=disable_graph) as llm:
            found[name, disable_graph] = [o.text for o in llm.generate(prompts, params)]
        assert bool(drawn) is not disable_graph
    assert len(set(map(tuple, found.values()))) == 1, found
    texts = found["cpu", True]
    assert texts[0].startswith("{") and texts[2] in ("alpha", "beta")
    assert all(re.fullmatch("(a|bc|[d-k]x){9,12}", t) for t in (texts[1], texts[3]))


def submits() -> Iterator[Submit]:
    for i, params in enumerate((*MIXED, *MIXED)):
        prompt = [(i * 31 + j * 7) % 250 + 2 for j in range((1, 20, 70, 5)[i % 4])]
        yield Submit(rid=str(i), prompt=prompt, params=SamplingParams(**params), seed=i)


def run(engine: Engine) -> dict[str, list[int]]:
    asked = list(submits())
    found: dict[str, list[int]] = {s.rid: [] for s in asked}
    for submit in asked:
        assert engine.submit(submit) is None
    while engine.has_work:
        for message in engine.step():
            assert isinstance(message, Tokens)
            found[message.rid] += message.tokens
    return found


def made(tiny, platform: Platform, recorded, **changes) -> Engine:
    given = settings(platform, **changes)
    assembly = assemble(EngineConfig(model=str(tiny), **given), given, [recorded])
    runner = Runner(assembly, World.alone(), poison=True)
    runner.warm_up()
    return Engine(assembly, runner)


@pytest.fixture(scope="module")
def expected(tiny, platform, recorded):
    plain = {"disable_graph": True, "disable_overlap_schedule": True}
    return run(made(tiny, platform, recorded, **plain))


@pytest.mark.parametrize("disable_graph", [True, False])
@pytest.mark.parametrize("disable_overlap_schedule", [True, False])
def test_graphs_and_overlap_change_no_token(
    tiny, platform, recorded, expected, disable_graph, disable_overlap_schedule
):
    engine = made(
        tiny,
        platform,
        recorded,
        disable_graph=disable_graph,
        disable_overlap_schedule=disable_overlap_schedule,
    )
    assert (not engine.runner.programs.sizes) is disable_graph
    assert engine._ahead == int(not disable_overlap_schedule)
    assert run(engine) == expected


@pytest.mark.parametrize("disable_graph", [True, False])
def test_no_step_waits_for_the_device(tiny, platform, recorded, expected, disable_graph):
    """Requests that ask for log-probabilities bring an op whose reference does wait."""
    sizes = {"disable_graph": disable_graph}
    sizes["prefill_graph_sizes"] = None if disable_graph else (24, 60)  # at start
    engine = made(tiny, platform, recorded, **sizes)
    asked = [s for s in submits() if s.params.logprobs is None and not s.params.temperature]
    asked = [s for s in asked if s.params.prompt_logprobs is None]
    assert len(asked) >= 6
    found: dict[str, list[int]] = {s.rid: [] for s in asked}
    with no_waiting(platform):
        for submit in asked:
            assert engine.submit(submit) is None
        while engine.has_work:
            for message in engine.step():
                assert isinstance(message, Tokens)
                found[message.rid] += message.tokens
    assert found == {rid: expected[rid] for rid in found}


def test_two_devices_give_the_answers_of_one(tiny, platform, recorded):
    """Collectives inside captured steps, of heads and of sequences that are divided."""
    if torch.accelerator.device_count() < 2:
        pytest.skip("one device is here")
    params = SamplingParams(max_tokens=40)
    prompts = [[(i * 31 + j * 7) % 250 + 2 for j in range(n)] for i, n in enumerate((1, 20, 70, 5))]
    found = {}
    for case in ((1, True), (2, True), (2, False), (2, True, True), (2, False, True)):
        tp, disable_graph, *divided = case
        given = settings(platform, tp=tp, disable_graph=disable_graph)
        with LLM(tiny, extra_plugins=[recorded], **given, enable_dp_attention=bool(divided)) as llm:
            found[case] = [o.token_ids for o in llm.generate(prompts, params)]
    assert all(tokens == found[1, True] for tokens in found.values())


def test_replays_allocate_nothing(tiny, platform, recorded):
    engine = made(tiny, platform, recorded)
    params = SamplingParams(max_tokens=60)
    for i in range(4):
        engine.submit(Submit(rid=str(i), prompt=[3 + i], params=params, seed=0))
    for _ in range(10):
        engine.step()
    before = torch.accelerator.memory_stats()["reserved_bytes.all.current"]
    for _ in range(30):
        engine.step()
    assert torch.accelerator.memory_stats()["reserved_bytes.all.current"] == before
    engine.abort([str(i) for i in range(4)])
    while engine.has_work:
        engine.step()


@pytest.fixture(scope="module")
def wide_heads(tmp_path_factory):
    """A small model with the heads of V3: those that libraries' attention is made for."""
    shape = {
        **shapes.SHAPES["tiny-v3"],
        **V3_HEADS,
        "q_lora_rank": 128,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "SHAPES", {**shapes.SHAPES, "wide": shape})
        return make_checkpoint(tmp_path_factory.mktemp("m") / "wide", "wide", "bfloat16")


@pytest.mark.parametrize("disable_graph", [False, True])
def test_decode_attention_of_every_provider_answers_alike(
    platform: Platform, wide_heads, disable_graph
):
    """Sequences that cross pages, one and several, beside each other."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=1)
    prompts = [[(7 * i + 31 * j) % 200 + 3 for j in range(40 + 37 * i)] for i in range(9)]
    found = {}
    for provider in (None, "triton"):
        given: dict[str, Any] = {"pin": (f"mla_decode={provider}",)} if provider else {}
        with LLM(
            wide_heads, platform=platform.name, dtype="bfloat16", page_size=64,
            context_length=512, disable_graph=disable_graph, **given,
        ) as llm:  # fmt: skip
            every = [*llm.generate(prompts[:1], params), *llm.generate(prompts, params)]
        found[provider] = [
            [(e.token, e.logprob) for e in o.outputs[0].logprobs or ()] for o in every
        ]
    alike = 0
    for best, portable in zip(*found.values(), strict=True):
        for (token, logprob), (other, want) in zip(best, portable, strict=True):
            assert abs(logprob - want) < 0.1  # NaN is not
            alike += 1
            if token != other:  # of two that are nearly equal
                break
    assert alike > 40 * 10 // 2
