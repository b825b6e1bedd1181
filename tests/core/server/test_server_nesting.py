"""Deep JSON and large numbers in every field that may hold JSON of any form."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime.common.nesting import MAX_NESTING, too_deep
from ds_runtime.errors import RequestError
from ds_runtime.output_rules import OutputRules, ToolRules, ToolSchema

HOLE = "the hole"
ASK = {"messages": [{"role": "user", "content": "2"}], "max_tokens": 2}
LATER = {"input": "2", "max_output_tokens": 2}
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


def function(**fields):
    return [{"type": "function", "function": {"name": "f", **fields}}]


def called(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    told = {"role": "tool", "tool_call_id": "1", "content": "x"}
    return [*ASK["messages"], {"role": "assistant", "content": "", "tool_calls": [call]}, told]


# Fields that rule the output: what errors name, the route, the body.
RULES = [
    ("json_schema", CHAT, ASK | {"json_schema": HOLE}),
    ("json_schema", "/v1/completions", {"prompt": "2", "max_tokens": 2, "json_schema": HOLE}),
    ("json_schema", "/generate", {"sampling_params": {"json_schema": HOLE}}),
    ("structured_outputs.json", CHAT, ASK | {"structured_outputs": {"json": HOLE}}),
    (
        "response_format.json_schema.schema",
        CHAT,
        ASK | {"response_format": {"type": "json_schema", "json_schema": {"schema": HOLE}}},
    ),
    ("tools", CHAT, ASK | {"tools": function(parameters=HOLE), "tool_choice": "required"}),
    (
        "tools",
        CHAT,
        ASK | {"tools": function(parameters=HOLE), "response_format": {"type": "json_object"}},
    ),
    (
        "text.format.schema",
        RESPONSES,
        LATER | {"text": {"format": {"type": "json_schema", "name": "x", "schema": HOLE}}},
    ),
    (
        "tools",
        RESPONSES,
        LATER
        | {
            "tools": [{"type": "function", "name": "f", "parameters": HOLE}],
            "tool_choice": "required",
        },
    ),
    (
        "output_config.format.schema",
        "/v1/messages",
        ASK | {"output_config": {"format": {"type": "json_schema", "schema": HOLE}}},
    ),
    (
        "tools",
        "/v1/messages",
        ASK | {"tools": [{"name": "f", "input_schema": HOLE}], "tool_choice": {"type": "any"}},
    ),
]
OTHERS = [
    ("tools", CHAT, ASK | {"tools": function(parameters=HOLE)}),
    ("tool_choice", CHAT, ASK | {"tools": function(), "tool_choice": HOLE}),
    ("chat_template_kwargs.a", CHAT, ASK | {"chat_template_kwargs": {"a": HOLE}}),
    ("messages", CHAT, ASK | {"messages": called(HOLE)}),
    ("logit_bias.1", CHAT, ASK | {"logit_bias": {"1": HOLE}}),
    ("stop", CHAT, ASK | {"stop": HOLE}),
    ("metadata.a", RESPONSES, LATER | {"metadata": {"a": HOLE}}),
    ("input", RESPONSES, LATER | {"input": [{"role": "user", "content": HOLE}]}),
    (
        "tools",
        RESPONSES,
        LATER | {"tools": [{"type": "function", "name": "f", "parameters": HOLE}]},
    ),
    ("input", RESPONSES + "/input_tokens", {"input": HOLE}),
    ("messages", "/v1/messages", ASK | {"messages": [{"role": "user", "content": HOLE}]}),
    ("tools", "/v1/messages/count_tokens", ASK | {"tools": [{"name": "f", "input_schema": HOLE}]}),
    ("messages", "/tokenize", {"messages": [{"role": "user", "content": HOLE}]}),
    ("prompt", "/v1/completions", {"prompt": HOLE}),
]
DEPTHS = (MAX_NESTING + 1, 956, 960, 965, 970, 975, 980, 990, 1100, 20_000)


def send(served, path, body, value):
    if path == "/generate":
        body = {"text": "2", **body}
    raw = json.dumps(body).replace(f'"{HOLE}"', value)
    return served.http.post(path, content=raw, headers={"Content-Type": "application/json"})


def refused(reply, field, path):
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert field in error["message"] and len(error["message"]) < 700
    if not path.startswith("/v1/messages"):
        assert field in error["param"]
    return error["message"]


def deep(depth, opening, closing, inner=""):
    return opening * depth + inner + closing * depth


@pytest.mark.parametrize(("field", "path", "body"), RULES + OTHERS)
def test_deep_json_is_refused_by_its_field(parsing, field, path, body):
    for depth in DEPTHS:
        for value in (deep(depth, '{"items":', "}", "{}"), deep(depth, "[", "]")):
            said = refused(send(parsing, path, body, value), field, path)
            assert "nested too deeply" in said
    assert parsing.http.get("/health").status_code == 200


@pytest.mark.parametrize(("field", "path", "body"), RULES)
@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**400])
def test_numbers_beyond_64_bits_are_refused_by_their_field(parsing, field, path, body, number):
    for value in (f'{{"maximum": {number}}}', f'{{"anyOf": [{{}}, {{"const": [{number}]}}]}}'):
        said = refused(send(parsing, path, body, value), field, path)
        assert "2**64" in said and ("maximum" in said or "anyOf[1].const[0]" in said)


@pytest.mark.parametrize(("field", "path", "body"), RULES)
def test_the_largest_numbers_pass(parsing, field, path, body):
    value = f'{{"type": "object", "minimum": {-(2**63)}, "maximum": {2**64 - 1}}}'
    assert send(parsing, path, body, value).status_code == 200


@pytest.mark.parametrize("depth", [MAX_NESTING, 960, 5000])
def test_schemas_as_text_and_of_other_callers(depth):
    schema = text = "{}"
    for _ in range(depth):
        text = f'{{"items": {text}}}'
    with pytest.raises(RequestError, match=r"nested too deeply|no JSON") as caught:
        OutputRules(json_schema=text, field="here")
    assert caught.value.param == "here"
    schema = {}
    for _ in range(depth):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="nested too deeply"):
        OutputRules(json_schema=schema)
    tools = ToolRules(format="deepseekv31", tools=(ToolSchema("f"), ToolSchema("g", schema)))
    with pytest.raises(RequestError, match="nested too deeply") as caught:
        OutputRules(tool_calls=tools, field="tools")
    assert caught.value.param == "tools[1].function.parameters"


def test_of_two_rules_the_larger_one_is_told():
    large, small = {"description": "x" * (1 << 18)}, {"type": "object"}
    for schema, parameters, param in ((large, small, "here"), (small, large, "tools")):
        tools = ToolRules(format="deepseekv31", tools=(ToolSchema("f", parameters),))
        with pytest.raises(RequestError, match=rf"^{param} has \d+ of \d+ characters") as caught:
            OutputRules(json_schema=schema, tool_calls=tools, field="here")
        assert caught.value.param == param
    with pytest.raises(RequestError, match="takes whole numbers") as caught:
        tools = ToolRules(
            format="deepseekv31",
            tools=(ToolSchema("f", {"minimum": 1 << 70}, "tools[4].function.parameters"),),
        )
        OutputRules(json_schema=small, tool_calls=tools, field="here")
    assert caught.value.param == "tools[4].function.parameters.minimum"


def depth_of(value):
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


TEXTS = st.text('[]{}"\\:, \n', max_size=8)
TREES = st.recursive(
    TEXTS | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=30,
)


@given(tree=TREES, added=st.integers(MAX_NESTING - 8, MAX_NESTING), spaced=st.booleans())
def test_depth_is_that_of_the_brackets_outside_of_strings(tree, added, spaced):
    before = {"[" * 300: ["]" * 300, '\\"{' * 300]}
    for _ in range(added - 2):
        tree = [tree]
    whole = [before, {"field": tree}]
    raw = json.dumps(whole, indent=1).encode() if spaced else msgspec.json.encode(whole)
    assert (too_deep(raw) is not None) == (depth_of(whole) > MAX_NESTING)


def test_names_of_fields():
    many = "[" * 300
    for raw, name in [
        (many, ""),
        (f'{{"a": 1, "b": {many}', "b"),
        (f'{{"a": {{"x": 1}}, "b": {{"c": {{"d": {{"e": {many}', "b.c.d"),
        (f'{{"a": [{{"x": {many}', "a"),
        ('{"a": "' + many + f'", "b": {many}', "b"),
        (f'{{"a\\"[": {many}', 'a\\"['),
        ('{"a": "' + " " * (1 << 18) + f'", "b": {many}', ""),
    ]:
        assert too_deep(raw.encode()) == name, raw[:40]
    assert too_deep(('{"a": ' + "[]," * 400).encode()) is None
