"""One rank's runner on a tiny checkpoint: warm-up, poisoned caches, launch and collect apart."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from ds_runtime import LLM, SamplingParams
from ds_runtime.assembly.assemble import assemble
from ds_runtime.config import EngineConfig
from ds_runtime.engine.device.runner import Runner
from ds_runtime.engine.engine import Engine, eos_tokens
from ds_runtime.engine.messages import Failed, Submit
from ds_runtime.engine.step.plan import RowInit, StepPlan, Work
from ds_runtime.errors import CheckpointError, ConfigError
from ds_runtime.kv.budget import KvMemory
from ds_runtime.parallel.group import SoloCommunicator
from ds_runtime.parallel.mesh import Mesh
from ds_runtime.parallel.world import World

SETTINGS = {"platform": "cpu", "dtype": "float32", "kv_memory": 2_000_000, "threads": 1}


def make(tiny, poison=True, comm=None, **settings):
    config = EngineConfig(model=str(tiny), **{**SETTINGS, **settings})
    return Runner(
        assemble(config, SETTINGS), World(Mesh(), comm or SoloCommunicator()), poison=poison
    )


@pytest.fixture(scope="module")
def runner(tiny):
    return make(tiny)


def run(engine, submits):
    for submit in submits:
        assert engine.submit(submit) is None
    found = {s.rid: [] for s in submits}
    while engine.has_work:
        for message in engine.step():
            found[message.rid] += message.tokens
    return found


def test_warm_up_leaves_no_trace(tiny):
    runner = make(tiny)
    runner.warm_up()
    own = [cache[: runner.num_pages] for cache in runner.caches]  # of the sequences
    assert all(torch.isnan(cache).all() for cache in own)
    assert runner.last_tokens.eq(0).all()
    assert all(row is None for row in runner.sampler.rows)


def test_unwritten_pages_are_never_read(runner, tiny):
    prompts = [[7] * 3, list(range(2, 70)), list(range(30, 47))]
    params = SamplingParams(max_tokens=20)
    engine = Engine(runner.assembly, runner)
    submits = [Submit(rid=str(i), prompt=p, params=params, seed=0) for i, p in enumerate(prompts)]
    found = run(engine, submits)
    with LLM(tiny, **SETTINGS) as llm:
        expected = [o.token_ids for o in llm.generate(prompts, params)]
    assert [found[str(i)] for i in range(3)] == expected


def test_a_step_can_be_launched_before_the_last_one_is_collected(runner):
    init = RowInit(row=3, params=SamplingParams(max_tokens=9), seed=0, choice=0, prompt=[9, 8, 7])

    def plan(step, **work):
        init_now = [init] if step == 0 else []
        return StepPlan(step=step, works=[Work(rid="r", row=3, **work)], init=init_now)

    plans = [plan(0, start=0, length=3, pages=[5], tokens=[9, 8, 7])]
    plans += [plan(i, start=2 + i, length=1, pages=[5]) for i in range(1, 4)]
    apart = [runner.collect(runner.launch(p)).works[0].tokens for p in plans]
    handles = [runner.launch(p) for p in plans]
    assert [runner.collect(h).works[0].tokens for h in handles] == apart


def test_prompt_scores_hold_a_slice_of_logits_at_a_time(runner, monkeypatch):
    """Of 158 scored positions and three draws, with two numbers of alternatives, as of float64."""
    draw = random.Random(4)
    prompts = [[draw.randrange(2, 258) for _ in range(n)] for n in (96, 60, 5)]
    model, heads, head = runner.model, [], runner.model.logits
    hidden = []

    def watched(rows, *rest):
        heads.append(rows.shape[0])
        return head(rows)

    def forward(batch, caches, every=False):
        hidden.append(type(model).forward(model, batch, caches))
        return hidden[-1]

    monkeypatch.setattr(model, "logits", watched)
    monkeypatch.setattr(model, "forward", forward)
    works, init = [], []
    for row, (prompt, wanted) in enumerate(zip(prompts, (3, 3, 1), strict=True)):
        init.append(RowInit(row=row, params=SamplingParams(), seed=0, choice=0, prompt=prompt))
        pages = list(range(row * 8, row * 8 + 8))
        works.append(
            Work(
                rid=str(row),
                row=row,
                start=0,
                length=len(prompt),
                pages=pages,
                tokens=prompt,
                prompt_logprobs=wanted,
            )
        )
    result = runner.collect(runner.launch(StepPlan(step=0, works=works, init=init)))
    assert heads == [3, 64, 64, 30]  # the draws, then slices of the scores
    exact = torch.log_softmax(head(hidden[0]).double(), -1)
    first = 0
    for prompt, wanted, work in zip(prompts, (3, 3, 1), result.works, strict=True):
        rows = exact[first : first + len(prompt)]
        first += len(prompt)
        assert work.tokens == [rows[-1].argmax()]
        assert [e.token for e in work.prompt_logprobs] == prompt[1:]
        for entry, row in zip(work.prompt_logprobs, rows, strict=False):
            assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
            assert [v for _, v in entry.top] == pytest.approx(
                row.sort(descending=True).values[:wanted].tolist(), abs=1e-4
            )


def test_ranks_agree_on_the_fewest_pages(tiny):
    class Pair(SoloCommunicator):
        """Another rank that has room for 40 pages only."""

        def gather_objects(self, value):
            if isinstance(value, KvMemory):
                return [value, replace(value, pages=40)]
            if value is None:  # it only waits
                return [None, None]
            return [value, ("elsewhere", *value[1:])]

    assert make(tiny).num_pages > 40
    assert make(tiny, comm=Pair()).num_pages == 40


def test_ranks_on_one_device_share_its_memory(tiny):
    class Quad(SoloCommunicator):
        def gather_objects(self, value):
            return [value] * 4

    alone = make(tiny).memory.free
    assert make(tiny, comm=Quad()).memory.free == pytest.approx(alone / 4, rel=0.3)
    config = EngineConfig(model=str(tiny), **SETTINGS)
    second = Runner(assemble(config, SETTINGS), World.alone(), 1, 2)  # of two engines
    assert second.memory.free == pytest.approx(alone / 2, rel=0.3)


def test_a_cache_below_one_context_is_refused(tiny):
    with pytest.raises(ConfigError, match="one context of 160 tokens needs"):
        make(tiny, kv_memory=5000)


def test_observers_see_steps_and_ends_and_a_raising_one_is_dropped(runner, capsys):
    seen = []

    class Watcher:
        def on_step(self, stats):
            seen.append(("step", stats.steps))

        def on_finish(self, tokens):
            seen.append(("finish", tokens.rid, tokens.finish))

    class Broken:
        def on_step(self, stats):
            raise ValueError("oh")

    class Plugins:
        def call(self, hook, config):
            return [("a", None), ("w", Watcher()), ("b", Broken())]

        def implementing(self, hook):
            return []

    assembly = replace(runner.assembly, plugins=Plugins())
    engine = Engine(assembly, runner)
    run(engine, [Submit(rid="x", prompt=[3], params=SamplingParams(max_tokens=2), seed=0)])
    assert seen == [("step", 1), ("step", 2), ("finish", "x", "length")]
    assert capsys.readouterr().err.count("plugin b: observer dropped: ValueError: oh") == 1


def test_refusals_are_messages(runner):
    engine = Engine(runner.assembly, runner)
    failed = engine.submit(Submit(rid="e", prompt=[], params=SamplingParams(), seed=0))
    assert isinstance(failed, Failed) and failed.kind == "invalid" and "empty" in failed.message


def test_eos_ids_come_from_both_files(runner, tmp_path):
    model = runner.assembly.model
    assert eos_tokens(tmp_path, model) == (1,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 1, 100000]}')
    assert eos_tokens(tmp_path, model) == (4, 1)
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        eos_tokens(tmp_path, model)


@pytest.mark.parametrize("value", ['"x"', "1.5", "[1, null]", "true", "{}"])
def test_an_end_token_that_is_no_number_is_named(runner, tmp_path, value):
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id .*token id"):
        eos_tokens(tmp_path, runner.assembly.model)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.self_attn.o_proj.weight"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_give_nan_are_refused_at_the_start(tiny, tmp_path, name, value):
    tensors = load_file(tiny / "model.safetensors")
    tensors[name][5, 5] = value
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=f"^{tmp_path}: the first step gave NaN: a weight"):
        make(tmp_path, allow_nan_weights=True).warm_up()


def test_more_requests_than_memory_has_page_tables_for(tiny, monkeypatch):
    for limit in ("values.MOST_REQUESTS", "fields._MOST"):
        monkeypatch.setattr(f"ds_runtime.config.{limit}", 10**12)
    with pytest.raises(
        ConfigError, match=r"--max-running-requests 10{12}: page tables .* need 40\.0 TB"
    ):
        make(tiny, max_running_requests=10**12)
