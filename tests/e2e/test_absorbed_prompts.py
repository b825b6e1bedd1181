"""Short chunks behind long cached beginnings attend latents: the answers are those of expanding."""

from __future__ import annotations

import json
import random

import pytest
from test_parity_llm import check, prompts_of

from ds_runtime import LLM, SamplingParams
from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.estimate import activation_bytes, most_absorbed
from ds_runtime.engine.device.runner import Runner
from ds_runtime.kv.budget import kv_memory
from ds_runtime.ops.contracts.attention.absorbing import Absorbing
from ds_runtime.ops.kernel import Promises
from ds_runtime_kit.models.answers import check_float32
from peak import peak

SETTINGS = {"platform": "cpu", "dtype": "float32", "context_length": 256, "threads": 1}
PARAMS = SamplingParams(max_tokens=8, logprobs=2, ignore_eos=True)
CHUNKS = (1, 2, 15, 16, 17, 31, 48)
PREFIXES = (16, 64, 65, 130)  # tokens; pages are of 16


@pytest.fixture
def never(monkeypatch):
    """Every chunk expands what is cached."""

    def off():
        monkeypatch.setattr(Absorbing, "of", lambda *given: None)

    return off


def asked(llm, prompts, params=PARAMS):
    """Beginnings first, so that what is behind them finds them cached."""
    for prefix, _ in prompts:
        llm.generate(prefix, SamplingParams(max_tokens=1))
    before = llm.stats().prefill_absorbed
    outputs = llm.generate([prefix + tail for prefix, tail in prompts], params)
    return outputs, llm.stats().prefill_absorbed - before


@pytest.mark.parametrize("shape", ["v2-lite", "v3"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_chunk_behind_every_beginning(checkpoints, shape, prefix):
    folder, oracle = checkpoints(shape)
    beginnings = prompts_of(oracle, (prefix,) * len(CHUNKS), seed=prefix)
    tails = prompts_of(oracle, CHUNKS, seed=1)
    with LLM(folder, **SETTINGS) as llm:
        outputs, absorbed = asked(llm, list(zip(beginnings, tails, strict=True)))
        rule = llm._alive().scheduler.limits.absorbing
    cached = prefix // 16 * 16
    lengths = [prefix - cached + n for n in CHUNKS]
    due = [n for n in lengths if rule.pays(cached, n)]
    assert absorbed == sum(due) and due
    assert prefix != 16 or len(due) < len(lengths), "long chunks expand short beginnings"
    check(oracle, outputs)


WIDE = {"hidden_size": 512, "num_attention_heads": 32, "num_key_value_heads": 32}
WIDE |= {"kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 16, "v_head_dim": 64}


@pytest.mark.parametrize("beside", [0, 40])
def test_memory_is_kept_for_as_many_as_there_may_be(
    checkpoints, tmp_path, monkeypatch, never, beside
):
    """By what torch allocates in the steps: of absorbed chunks alone, and beside a whole prompt."""
    (folder, _), draw, steps = checkpoints("v2-lite"), random.Random(5), list[tuple[int, int]]()
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **WIDE}))
    given = {**SETTINGS, "load_format": "dummy", "max_running_requests": 8}
    given |= {"max_step_tokens": 256, "prefix_chunk": 64}
    prefix, *others = [[draw.randrange(2, 128) for _ in range(n)] for n in (192, *[32] * 8)]
    launch = Runner.launch

    def launched(runner, plan):
        handles = []
        took = peak(lambda: handles.append(launch(runner, plan)))
        steps.append((sum(work.length for work in plan.works if work.absorbed), took))
        return handles[0]

    with LLM(tmp_path, **given) as llm:
        llm.generate(prefix, SamplingParams(max_tokens=1))
        runner = llm._alive().runner
        monkeypatch.setattr(Runner, "launch", launched)
        prompts = [prefix + other for other in others]
        prompts += [[3] * beside] if beside else []
        llm.generate(prompts[-8:], SamplingParams(max_tokens=1))
    assert most_absorbed(runner.assembly) == 256, "as many as a step has"
    found, took = max(steps)
    assert found == 32 * (8 if not beside else 7)
    said = activation_bytes(runner.assembly)
    never()
    assert activation_bytes(runner.assembly) < took <= 1.01 * said, "expanding takes less"


SHAPES = [{}, {"max_step_tokens": 64}, {"max_running_requests": 2, "prefix_chunk": 16}]
SHAPES += [{"context_length": 64}, {"disable_mla": True}, {"batch_invariant": True}]


@pytest.mark.parametrize("more", SHAPES, ids=str)
@pytest.mark.parametrize("shape", ["v2-lite", "v3"])
def test_a_plan_counts_what_the_engine_does(checkpoints, monkeypatch, shape, more):
    """From nothing but the settings, as `ds-runtime plan` has them, and the same memory."""
    seen = []

    def noted(assembly, room, context):
        seen.append((room, context, kv_memory(assembly, room, context)))
        return seen[-1][2]

    monkeypatch.setattr("ds_runtime.engine.device.runner.kv_memory", noted)
    given = {**SETTINGS, **more, "load_format": "dummy"}
    with LLM(checkpoints(shape)[0], **given) as llm:
        engine = llm._alive()
        absorbs = engine.scheduler.limits.absorbing is not None
        held, config = activation_bytes(engine.assembly), engine.assembly.config
        kernels = engine.runner.bound.stateful
    planned = assemble(config)
    assert absorbs == (not {"disable_mla", "batch_invariant"} & more.keys()) and kernels
    assert (most_absorbed(planned) > 0) == absorbs and activation_bytes(planned) == held
    ((room, context, memory),) = seen
    assert kv_memory(planned, room, context) == memory


@pytest.mark.parametrize("more", [{}, {"max_itl": 5.0}, {"tp": 2}])
def test_beside_others(checkpoints, never, more):
    """Decode steps, whole prompts and chunks of long ones in one step, in any order of arrival."""
    (folder, _), draw = checkpoints("v2-lite"), random.Random(3)
    prefix = [draw.randrange(2, 128) for _ in range(120)]
    prompts = [prefix + [draw.randrange(2, 128) for _ in range(n)] for n in (3, 40, 1, 20, 9, 25)]
    prompts[1:1] = [[draw.randrange(2, 128) for _ in range(n)] for n in (90, 5)]
    given = {**SETTINGS, **more, "max_step_tokens": 64, "chunked_prefill_size": 48}
    found = []
    for off in (False, True):
        if off:
            never()
        with LLM(folder, **given) as llm:
            llm.generate(prefix, SamplingParams(max_tokens=1))
            found.append(llm.generate(prompts, PARAMS))
            assert (llm.stats().prefill_absorbed > 0) is not off
    check_float32(*found)


def test_captured_steps_answer_alike(checkpoints, recorded, monkeypatch):
    """What this platform attends with has room for the rows of these prompts together."""
    monkeypatch.setattr(recorded, "PROMISES", Promises(many_rows=True))
    (folder, _), draw = checkpoints("v2-lite"), random.Random(4)
    prefix = [draw.randrange(2, 128) for _ in range(100)]
    prompts = [prefix + [draw.randrange(2, 128) for _ in range(n)] for n in (1, 7, 12, 20)]
    found = []
    for captured in (True, False):
        given = {**SETTINGS, "disable_prefill_graph": not captured}
        given |= {"prefill_graph_sizes": (8, 24, 60)} if captured else {}
        with LLM(folder, extra_plugins=[recorded], **given) as llm:
            llm.generate(prefix, SamplingParams(max_tokens=1))
            found.append(llm.generate(prompts, PARAMS))
            assert llm.stats().prefill_absorbed > 0
    check_float32(*found)


def test_prompts_that_are_scored(checkpoints):
    """Rows of prompts are scored, too: chunks of 20 behind those before them."""
    folder, oracle = checkpoints("v2-lite")
    params = SamplingParams(max_tokens=4, logprobs=2, prompt_logprobs=2, ignore_eos=True)
    with LLM(folder, **SETTINGS, chunked_prefill_size=20) as llm:
        outputs = llm.generate(prompts_of(oracle, (130, 61)), params)
        assert llm.stats().prefill_absorbed > 80
    check(oracle, outputs)
