"""Rules that wait to be compiled: by turns, no more than a share each, and only while somebody
waits for them.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ds_runtime
from ds_runtime.errors import QueueFullError, RequestError
from ds_runtime.grammar.check import Checker
from ds_runtime.grammar.library import WAITING, Grammars
from ds_runtime.output_rules import MAX_CHOICES, OutputRules
from ds_runtime.text.tokenizer import Tokenizer

DEMO = Path(ds_runtime.__file__).parent / "demo"


class Gate:
    """Stands for the child that compiles first: lets rules pass once it is opened."""

    def __init__(self):
        self.opened, self.seen, self.begun = threading.Event(), [], threading.Event()

    def check(self, checker, rules):
        self.seen.append(rules.choice[0])
        self.begun.set()
        assert self.opened.wait(30)
        if rules.choice[0] == "bad":
            raise RequestError("bad", rules.param)

    def fill(self, grammars):
        """One rule that is being compiled, so that all others wait."""
        first = grammars.ask(rule("first"), "someone")
        assert self.begun.wait(10)
        return first


@pytest.fixture(scope="module")
def grammars():
    made = Grammars(DEMO, 2048, [1])
    yield made
    made.close()


@pytest.fixture
def gate(monkeypatch, grammars):
    one = Gate()
    monkeypatch.setattr(Checker, "check", lambda self, rules: one.check(self, rules))
    yield one
    one.opened.set()
    while grammars.waiting:
        time.sleep(0.001)
    grammars.ask(rule("last")).result(10)
    grammars._compiled.clear()


def rule(text):
    return OutputRules(choice=(text,))


def test_what_nobody_waits_for_is_not_compiled(grammars, gate):
    first = gate.fill(grammars)
    abandoned = [grammars.ask(rule(f"left {i}"), "a") for i in range(60)]
    kept = grammars.ask(rule("kept"), "a")
    twice = [grammars.ask(rule("twice"), client) for client in ("a", "b")]
    assert twice[0] is twice[1] and grammars.waiting == 63
    for asked in [*abandoned, twice[0]]:
        grammars.leave(asked)
    assert grammars.waiting == 3
    again = grammars.ask(rule("left 7"), "a")
    gate.opened.set()
    for asked in (first, kept, twice[1], again):
        assert any(asked.result(10).mask)
    assert sorted(gate.seen) == ["first", "kept", "left 7", "twice"]
    assert grammars.waiting == 0


def test_an_honest_rule_waits_for_one_of_anothers(grammars, gate):
    gate.fill(grammars)
    many = [grammars.ask(rule(f"many {i}"), "a") for i in range(20)]
    grammars.ask(rule("honest"), "b")
    gate.opened.set()
    many[-1].result(10)
    assert gate.seen.index("honest") <= 2


@settings(max_examples=25, deadline=None)
@given(asked=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=25))
def test_clients_take_turns(grammars, asked):
    gate = Gate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checker, "check", lambda self, rules: gate.check(self, rules))
        waiting = [gate.fill(grammars)]
        waiting += [grammars.ask(rule(f"{client} {number}"), client) for client, number in asked]
        gate.opened.set()
        for one in waiting:
            one.result(10)
        grammars._compiled.clear()
    seen = gate.seen[1:]
    assert sorted(seen) == sorted({f"{client} {number}" for client, number in asked})  # each once
    place = dict[str, int]()
    turns = list[int]()  # the n-th of its client
    for name in seen:
        place[name[0]] = place.get(name[0], 0) + 1
        turns.append(place[name[0]])
    assert turns == sorted(turns)
    for client in place:  # in the order of asking
        own = list(dict.fromkeys(f"{c} {n}" for c, n in asked if c == client))
        assert [name for name in seen if name[0] == client] == own


def test_a_client_has_a_share_of_the_queue(grammars, gate):
    gate.fill(grammars)
    for i in range(WAITING):
        grammars.ask(rule(f"a {i}"), "a")
    with pytest.raises(QueueFullError, match=r"64 rules .* try again later") as caught:
        grammars.ask(rule("one more"), "a")
    assert caught.value.retry_after > 0
    for i in range(WAITING // 2):  # others still have theirs
        grammars.ask(rule(f"b {i}"), "b")
    with pytest.raises(QueueFullError, match="your share of the queue is 32"):
        grammars.ask(rule("one more"), "b")
    known = grammars.ask(rule("a 63"), "a")  # waits already
    for i in range(2 * WAITING):  # this process itself
        grammars.ask(rule(f"own {i}"))
    gate.opened.set()
    assert any(known.result(20).mask)
    assert any(grammars.ask(rule("one more"), "a").result(20).mask)


def test_one_rule_of_several_clients_is_compiled_once(grammars, gate):
    gate.fill(grammars)
    asked = [grammars.ask(rule("same"), client) for client in "abcabc"]
    gate.opened.set()
    assert len({id(one.result(10)) for one in asked}) == 1
    assert grammars.ask(rule("after"), "c").result(10)
    assert gate.seen.count("same") == 1


def test_a_rule_that_failed_is_tried_again(grammars, gate):
    gate.opened.set()
    for _ in range(2):
        with pytest.raises(RequestError, match="bad"):
            grammars.ask(rule("bad"), "a").result(10)
    assert gate.seen == ["bad", "bad"]


def test_what_is_compiled_for_one_tenant_is_no_others(grammars):
    """Else the time that it takes would tell who asked for the same."""
    one = grammars.ask(rule("shared"), "a", "salt of a")
    assert grammars.ask(rule("shared"), "b", "salt of a") is one
    assert grammars.ask(rule("shared"), "b", "salt of b") is not one
    assert one.result(10)


def test_a_tokenizer_that_rules_cannot_follow_serves_without_them(tmp_path):
    """One of its patterns is too large for the library of rules."""
    whole = json.loads((DEMO / "tokenizer.json").read_text())
    split = {
        "type": "Split",
        "pattern": {"Regex": "(?:a{900}){900}"},
        "behavior": "Isolated",
        "invert": False,
    }
    whole["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, whole["pre_tokenizer"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    made = Grammars(tmp_path, 2048, [1])
    with pytest.raises(RequestError, match="the tokenizer cannot be followed by rules"):
        made.ask(rule("x")).result(1)
    made.close()


@pytest.mark.parametrize("count", [1000, MAX_CHOICES])
def test_as_many_choices_as_are_taken_are_followed(grammars, count):
    words = [f"{n * 7919 % 100_003} and more" for n in range(count)]
    start = grammars.ask(OutputRules(choice=tuple(words))).result(30)
    guide = grammars.guide(OutputRules(choice=tuple(words)), start)
    tokens = Tokenizer.load(DEMO).encode(words[-1])
    for token in tokens:
        assert not guide.follow([token], [], []).fault
