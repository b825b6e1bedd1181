"""Output that keeps to rules: whatever the model would rather say, other judges accept it."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from ahead import engine
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ds_runtime import LLM, OutputRules, SamplingParams
from ds_runtime.assembly.assemble import assemble
from ds_runtime.config import EngineConfig
from ds_runtime.engine.device.runner import Runner
from ds_runtime.engine.messages import Failed, Submit
from ds_runtime.errors import RequestError
from ds_runtime.parallel.world import World
from examples import examples

SETTINGS = {
    "platform": "cpu",
    "dtype": "float32",
    "kv_memory": 1_000_000,
    "threads": 1,
    "max_running_requests": 4,
    "chunked_prefill_size": 16,
    "max_step_tokens": 40,
}
POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": -9, "maximum": 99},
        "kind": {"enum": ["dot", "ring"]},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["x", "kind"],
    "additionalProperties": False,
}


def leaf():
    bounds = st.tuples(st.integers(-99, 99), st.integers(0, 99))
    return st.one_of(
        st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
        bounds.map(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[0] + b[1]}),
        st.integers(0, 4).map(lambda n: {"type": "string", "maxLength": n}),
        st.lists(st.text('ab"\\\né', max_size=4), min_size=1, max_size=3, unique=True).map(
            lambda words: {"enum": words}
        ),
        st.sampled_from(["^[ab]{1,3}$", "^[0-9]+-x$"]).map(
            lambda p: {"type": "string", "pattern": p, "maxLength": 4}
        ),
        st.integers(-50, 50).map(lambda n: {"const": n}),
    )


def inner(children):
    names = st.lists(st.text('xyz é"', min_size=1, max_size=3), max_size=3, unique=True)
    return st.one_of(
        st.tuples(names, st.lists(children, min_size=3, max_size=3), st.integers(0, 3)).map(
            lambda t: {
                "type": "object",
                "properties": dict(zip(t[0], t[1], strict=False)),
                "required": t[0][: t[2]],
                "additionalProperties": False,
            }
        ),
        st.tuples(children, st.integers(0, 2), st.integers(0, 1)).map(
            lambda t: {
                "type": "array",
                "items": t[0],
                "minItems": t[1],
                "maxItems": t[1] + t[2],
            }
        ),
        st.lists(children, min_size=1, max_size=3).map(lambda s: {"anyOf": s}),
    )


SCHEMAS = st.recursive(leaf(), inner, max_leaves=5)


@pytest.fixture(scope="module")
def llm(tiny):
    """Random weights; EOS never wins by itself, and nothing of JSON is likely."""
    with LLM(model=str(tiny), **SETTINGS) as made:
        yield made


def made(llm, params, prompt="Tell me"):
    return [(c.text, c.finish_reason) for c in llm.generate(prompt, params)[0].outputs]


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, seed=st.integers(0, 99))
def test_every_schema_is_kept_to(llm, schema, seed):
    rules = OutputRules(json_schema=schema)
    params = SamplingParams(rules=rules, max_tokens=None, temperature=1.5, seed=seed, n=2)
    for text, finish in made(llm, params):
        if finish == "stop":
            jsonschema.validate(json.loads(text), schema)
        else:  # white space, digits of a number: the context's end came first
            assert finish == "length" and len(text) > 100


@pytest.mark.parametrize(
    "pattern", ["[a-f]{3,8}", r"\d{4}-\d\d(T\d+Z?)?", "(yes|no|perhaps), [^x]{2}", "^é+ü$", "a|bc"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_expressions_match_as_a_whole(llm, pattern, temperature):
    params = SamplingParams(
        rules=OutputRules(regex=pattern), max_tokens=100, temperature=temperature, seed=3, n=3
    )
    for text, finish in made(llm, params):
        if finish == "stop":
            assert re.fullmatch(pattern, text)
        else:
            assert "+" in pattern


@settings(max_examples=examples(15), deadline=None, suppress_health_check=list(HealthCheck))
@example(words=["\x7f"])
@given(words=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=5))
def test_a_choice_is_exact(llm, words):
    words = [w.encode("utf-8", "ignore").decode() or "x" for w in words]
    params = SamplingParams(
        rules=OutputRules(choice=tuple(words)), max_tokens=100, temperature=2.0, n=2, seed=1
    )
    for text, finish in made(llm, params):
        assert finish == "stop" and text in words


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "<" [a-c]+ ">" tail\ntail ::= "!"?',
        '# of two rules\n\nroot ::= "<" [a-c]+ tail\ntail ::= ">" "!"?',
        'start: "<" /[a-c]+/ ">" "!"?',
        '?start: "<" LETTER+ _end\n_end: ">" "!"?\nLETTER: /[a-c]/\n',
        '// x ::= y\nLETTER: /[a-c]/\nstart: "<" LETTER+ ">" "!"?\n',
    ],
)
def test_grammars(llm, grammar):
    rules = OutputRules(ebnf=grammar)
    for text, finish in made(llm, SamplingParams(rules=rules, max_tokens=80, temperature=1.0, n=3)):
        assert re.fullmatch("<[abc]+>!?" if finish == "stop" else "<[abc]*", text)


@pytest.mark.parametrize(
    ("rules", "param"),
    [
        ({"json_schema": {"type": "strin"}}, "json_schema"),
        ({"json_schema": {"items": {"anyOf": [{"type": 1}]}}}, "json_schema.items.anyOf[0]"),
        ({"regex": "(a"}, "regex"),
        ({"ebnf": "root ::= what"}, "ebnf"),
        ({"json_schema": {"type": "string", "minLength": 3, "maxLength": 2}}, "json_schema"),
        ({"json_schema": {"type": "integer", "multipleOf": 999983}, "field": "here"}, "here"),
        ({"ebnf": "start: start"}, "ebnf"),
        ({"regex": r"[^\s\S]", "reasoning": "optional"}, "regex"),
        ({"ebnf": "root ::= root", "reasoning": "open"}, "ebnf"),
    ],
)
def test_what_cannot_be_compiled_is_named_and_others_go_on(llm, rules, param):
    with pytest.raises(RequestError) as caught:
        llm.generate(["ok", "bad"], [SamplingParams(), SamplingParams(rules=OutputRules(**rules))])
    assert caught.value.param == param
    assert made(llm, SamplingParams(rules=OutputRules(choice=("fine",)))) == [("fine", "stop")]


def test_without_the_library_it_says_so(llm, monkeypatch):
    why = "structured output needs the package llguidance: pip install llguidance"
    monkeypatch.setattr(llm._engine._grammars, "_why_not", why)
    with pytest.raises(RequestError, match="pip install llguidance"):
        llm.generate("x", SamplingParams(rules=OutputRules(choice=("a",))))


@pytest.fixture(scope="module")
def runner(tiny):
    return Runner(assemble(EngineConfig(model=str(tiny), **SETTINGS), SETTINGS), World.alone())


def submits():
    """Guided requests among others, with everything that moves them about."""
    rules = (
        OutputRules(json_schema=POINT),
        None,
        OutputRules(regex="[a-z]{30,40}"),
        OutputRules(choice=("alpha", "beta")),
        None,
        OutputRules(json_schema=POINT),
    )
    settings = (
        {"temperature": 1.2, "frequency_penalty": 0.5, "logprobs": 1},
        {"max_tokens": 40},
        {"temperature": 0.7, "logit_bias": {5: 9.0}},
        {"min_tokens": 30},
        {"max_tokens": 60, "temperature": 0.9},
        {"prompt_logprobs": 1, "repetition_penalty": 1.3},
    )
    for i, (rule, more) in enumerate(zip(rules, settings, strict=True)):
        prompt = [(7 * i + 11 * j) % 250 + 2 for j in range((5, 60, 33)[i % 3])]
        params = SamplingParams(rules=rule, **{"max_tokens": 90, **more})
        yield Submit(rid=str(i), prompt=prompt, params=params, seed=i)


def run(made, asked):
    found = {s.rid: [] for s in asked}
    for submit in asked:
        assert made.submit(submit) is None
    while made.has_work:
        for message in made.step():
            assert not isinstance(message, Failed), message
            found[message.rid] += message.tokens
    made.close()
    return found


def test_steps_ahead_and_preemptions_change_nothing(runner):
    """Steps launched ahead of tokens, a KV cache for two, and one request after another: the
    same tokens.
    """
    asked = list(submits())
    want = {}
    for submit in asked:
        want |= run(engine(runner, False), [submit])
    assert run(engine(runner, False), asked) == want
    assert run(engine(runner, True), asked) == want
    small = engine(runner, True)
    (pages,) = small.scheduler.holdings.groups
    pages.pool = type(pages.pool)(12)
    assert run(small, asked) == want
    assert small.scheduler.stats().preemptions > 0
    for rid in ("0", "5"):
        jsonschema.validate(json.loads(text(want[rid])), POINT)
    assert re.fullmatch("[a-z]{30,40}", text(want["2"]))
    assert text(want["3"]) in ("alpha", "beta")


def text(tokens):
    """Of the tiny model's byte tokens, 0 and 1 being BOS and EOS."""
    from tokenizers import pre_tokenizers

    from ds_runtime.text.tokenizer import _to_bytes

    letters = ["", "", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    return b"".join(_to_bytes(letters[t]) if t > 1 else b"" for t in tokens).decode()


def test_requests_may_leave_while_their_grammar_is_compiled(runner):
    made = engine(runner, False)
    asked = [s for s in submits() if s.params.rules is not None]
    for submit in asked:
        made.submit(submit)
    made.abort([s.rid for s in asked[:2]])
    left = {s.rid for s in asked[2:]}
    seen = set()
    while made.has_work:
        seen |= {m.rid for m in made.step()}
    assert seen == left
    made.close()
