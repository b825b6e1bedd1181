"""Masks that are made beside the step: late ones, dear ones, and what they may cost."""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import pytest
from test_structured import SETTINGS, engine, run, submits

from ds_runtime import LLM, OutputRules, SamplingParams
from ds_runtime.assembly.assemble import assemble
from ds_runtime.config import EngineConfig
from ds_runtime.engine.device.runner import Runner
from ds_runtime.engine.messages import Failed, Submit
from ds_runtime.errors import RequestError
from ds_runtime.grammar import compile as compile_rules
from ds_runtime.grammar import guide
from ds_runtime.parallel.world import World


@pytest.fixture(scope="module")
def runner(tiny):
    return Runner(assemble(EngineConfig(model=str(tiny), **SETTINGS), SETTINGS), World.alone())


AMBIGUOUS = """root ::= x x x x x x x x
x ::= y y
y ::= y y | z | ""
z ::= z z | [a-z] | [a-z] [a-z] | ""
"""


@pytest.mark.parametrize("ahead", [False, True])
def test_masks_that_come_late_change_nothing(runner, monkeypatch, ahead):
    """Whatever sits steps out, and also preempted meanwhile: the same tokens."""
    asked = list(submits())
    want = run(engine(runner, ahead), asked)
    late, words = random.Random(1), guide.words

    def slowly(matcher, allowed):
        time.sleep(late.choice((0, 0, 0.002, 0.012)))
        return words(matcher, allowed)

    monkeypatch.setattr(guide, "words", slowly)
    made = engine(runner, ahead)
    assert run(made, asked) == want
    assert made.stats().late_masks > 0
    small = engine(runner, ahead)
    (pages,) = small.scheduler.holdings.groups
    pages.pool = type(pages.pool)(12)
    assert run(small, asked) == want
    assert small.scheduler.stats().preemptions > 0


@pytest.mark.parametrize("ahead", [False, True])
def test_only_the_owner_waits_for_a_mask(runner, monkeypatch, ahead):
    words, held = guide.words, 0.4

    def slowly(matcher, allowed):
        time.sleep(held)
        return words(matcher, allowed)

    made = engine(runner, ahead)
    slow = Submit(
        rid="slow", prompt=[5], params=SamplingParams(rules=OutputRules(regex="a{3}")), seed=1
    )
    assert made.submit(slow) is None
    seen = list[Any]()
    while not made.scheduler.running:
        seen += made.step()
    monkeypatch.setattr(guide, "words", slowly)
    honest = Submit(rid="honest", prompt=[7], params=SamplingParams(max_tokens=100), seed=1)
    assert made.submit(honest) is None
    begin, ends = time.monotonic(), {}
    while made.has_work:
        for message in made.step():
            seen.append(message)
            ends[message.rid] = time.monotonic() - begin
    made.close()
    assert ends["slow"] > held > ends["honest"], ends  # its 100 tokens came meanwhile
    counts = {rid: sum(len(m.tokens) for m in seen if m.rid == rid) for rid in ends}
    assert counts == {"honest": 100, "slow": 3}


def faults(made, submit):
    """What a request ends with, and how many tokens came before."""
    assert made.submit(submit) is None
    count = 0
    while made.has_work:
        for message in made.step():
            if isinstance(message, Failed):
                return message, count
            count += len(message.tokens)
    return None, count


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"MASK_SECONDS": 0.001}, "took [0-9]+ ms, the limit is 1 ms; make it less ambiguous"),
        ({"REQUEST_SECONDS": 0.01, "TOKEN_SECONDS": 0.0}, "s in all, the limit is 0.01 s and 0 ms"),
    ],
)
def test_an_ambiguous_grammar_ends_when_its_time_is_up(runner, monkeypatch, limits, said):
    for name, value in limits.items():
        monkeypatch.setattr(guide, name, value)
    made = engine(runner, False)
    rules = OutputRules(ebnf=AMBIGUOUS, field="here")
    params = SamplingParams(rules=rules, max_tokens=140, min_tokens=139, temperature=1.0)
    failed, count = faults(made, Submit(rid="a", prompt=[5], params=params, seed=1))
    assert failed is not None and (failed.kind, failed.param) == ("invalid", "here")
    assert re.search(said, failed.message) and 5 < count < 139, (failed, count)
    rules = OutputRules(choice=("fine",))
    fine = Submit(rid="b", prompt=[5], params=SamplingParams(rules=rules), seed=1)
    assert faults(made, fine) == (None, 4)
    assert made.stats().mask_seconds > 0.001
    made.close()


def test_usual_rules_stay_far_below_the_limits(runner, monkeypatch):
    monkeypatch.setattr(guide, "MASK_SECONDS", guide.MASK_SECONDS / 2)
    monkeypatch.setattr(guide, "REQUEST_SECONDS", guide.REQUEST_SECONDS / 4)
    run(engine(runner, False), list(submits()))


def test_a_first_mask_beyond_its_time_is_refused_before_the_answer(tiny, monkeypatch):
    monkeypatch.setattr(compile_rules, "MASK_SECONDS", 0.0)
    rules = OutputRules(regex="first[a-z]", field="here")
    said = r"here cannot be compiled.*less ambiguous"
    with LLM(model=str(tiny), **SETTINGS) as llm, pytest.raises(RequestError, match=said):
        llm.generate("x", SamplingParams(rules=rules))


def test_what_fails_in_a_thread_ends_its_owner_alone(runner, monkeypatch):
    def broken(matcher, allowed):
        raise OSError("no luck")

    made = engine(runner, False)
    rules = OutputRules(regex="[a-z]{9}", field="here")
    assert (
        made.submit(Submit(rid="a", prompt=[5], params=SamplingParams(rules=rules), seed=1)) is None
    )
    while not made.scheduler.running:
        made.step()
    monkeypatch.setattr(guide, "words", broken)
    seen = []
    while made.has_work:
        seen += made.step()
    assert isinstance(seen[-1], Failed) and "here" in seen[-1].message
    assert "OSError: no luck" in seen[-1].message
    made.close()


@pytest.mark.parametrize("more", [1, 31, 500])
def test_a_tokenizer_may_know_more_tokens_than_the_model(tiny, tmp_path, more):
    """Those that the model cannot draw are never allowed."""
    for file in tiny.iterdir():
        (tmp_path / file.name).symlink_to(file)
    whole = json.loads((tiny / "tokenizer.json").read_text())
    size = len(whole["model"]["vocab"])
    model = json.loads((tiny / "config.json").read_text())["vocab_size"]
    last = model + more - 1
    whole["model"]["vocab"] |= {f"{'z' * 3}{i}": i for i in range(size, last + 1)}
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    with LLM(model=str(tmp_path), **SETTINGS) as larger:
        for pattern in ("[a-z0-9]{30}", "zzz[0-9]{3}"):
            params = SamplingParams(rules=OutputRules(regex=pattern), temperature=1.5, seed=1, n=3)
            for found in larger.generate("Tell me", params)[0].outputs:
                assert re.fullmatch(pattern, found.text)
                assert max(found.token_ids) < model
