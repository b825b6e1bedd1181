"""Keywords that restrict nothing pass, whatever they are; others hold or are refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from ds_runtime.errors import RequestError
from ds_runtime.grammar.compile import Compiler
from ds_runtime.grammar.keywords import without_idle
from ds_runtime.output_rules import OutputRules, ToolRules, ToolSchema
from examples import examples

IDLE = [  # pieces that may stand in any schema
    {"deprecated": True},
    {"title": "x", "description": "y", "default": {"uniqueItems": True}, "examples": [1]},
    {"readOnly": True, "writeOnly": False, "$comment": "z"},
    {"x-order": 3, "discriminator": {"propertyName": "kind"}},
    {"uniqueItems": False},
    {"uniqueItems": True, "maxItems": 1, "type": "array"},
    {"propertyNames": {"type": "string"}},
    {"propertyNames": {}},
    {"propertyNames": True},
    {"propertyNames": {"type": ["null", "string"], "description": "a name"}},
    {"propertyNames": {"minLength": 0}},
    {"propertyNames": {"type": "string", "minLength": 0, "pattern": ".*", "format": "name"}},
    {"propertyNames": {"pattern": "^.*", "maxItems": 2}},
    {"minProperties": 0, "minItems": 0, "minLength": 0},
    {"$recursiveAnchor": True},
    {"unevaluatedProperties": True},
    {"unevaluatedItems": {}},
    {"contains": {"type": "integer"}, "minContains": 0},
    {"minContains": 3},
    {"maxContains": 3},
    {"not": False},
    {"not": {"not": {}}},
    {"if": {"type": "string"}},
    {"if": {"type": "string"}, "then": True, "else": {"title": "x"}},
    {"then": False},
    {"else": {"type": "null"}},
    {"dependentRequired": {}},
    {"dependentRequired": {"a": []}},
    {"dependentSchemas": {"a": True, "b": {"description": "b"}}},
    {
        "contentMediaType": "text/html",
        "contentEncoding": "base64",
        "contentSchema": {"type": "null"},
    },
]
FORMATS = [
    "password",
    "markdown",
    "uri-reference",
    "regex",
    "json-pointer",
    "idn-email",
    "int32",
    "",
]
FOREIGN = {  # for schemas of one type, keywords of the others
    "string": [{"uniqueItems": True}, {"propertyNames": {"maxLength": 1}}, {"minContains": 2}],
    "integer": [{"contains": {}}, {"dependentRequired": {"a": ["b"]}}, {"format": "email"}],
    "boolean": [{"unevaluatedItems": False}, {"unevaluatedProperties": False}],
    "object": [{"uniqueItems": True}, {"contains": False}],
    "array": [{"propertyNames": False}, {"dependentSchemas": {"a": False}}],
}
SIMPLE = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "maxLength": 3},
        {"type": "integer", "minimum": 0},
        {"type": "boolean"},
        {"enum": ["a", 3, None]},
        {"const": {"format": "zz", "deprecated": 1}},
    ]
)


def larger(inner):
    return st.one_of(
        st.builds(lambda one: {"type": "array", "items": one, "minItems": 1}, inner),
        st.builds(
            lambda a, b: {"type": "object", "properties": {"a": a, "not": b}, "required": ["a"]},
            inner,
            inner,
        ),
        st.builds(lambda a: {"anyOf": [a, {"type": "null"}]}, inner),
    )


SCHEMAS = st.recursive(SIMPLE, larger, max_leaves=4)
VALUES = st.recursive(
    st.sampled_from(["", "a", "abcd", 3, -1, True, None, {"format": "zz", "deprecated": 1}]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["a", "not", "b"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@st.composite
def decorated(draw, schema):
    """The schema with words in it, at any depth, that ask for nothing."""
    if not isinstance(schema, dict):
        return schema
    out = {}
    for name, value in schema.items():
        if name == "properties":
            value = {key: draw(decorated(child)) for key, child in value.items()}
        elif name == "anyOf":
            value = [draw(decorated(child)) for child in value]
        elif name == "items":
            value = draw(decorated(value))
        out[name] = value
    pieces = IDLE + FOREIGN.get(schema.get("type"), [])
    if "format" not in schema:
        pieces = pieces + [{"format": name} for name in FORMATS]
    for piece in draw(st.lists(st.sampled_from(pieces), max_size=2)):
        if "type" in piece and piece["type"] != schema.get("type"):
            continue
        if not piece.keys() & (out.keys() - {"type"}) and _separate(piece, out):
            out = {**piece, **out}
    return out


def _separate(piece, schema):
    """Whether a piece does not lend another its meaning."""
    together = ({"if", "then", "else"}, {"contains", "minContains", "maxContains"})
    bounded = piece.get("maxItems") == 1
    return not bounded and not any(piece.keys() & g and schema.keys() & g for g in together)


@pytest.fixture(scope="module")
def compiler(bpe_folder):
    return Compiler(bpe_folder, 512, [1])


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_what_restricts_nothing_passes(compiler, data):
    schema = data.draw(SCHEMAS)
    dressed = data.draw(decorated(schema))
    plain, judge = Draft202012Validator(schema), Draft202012Validator(dressed)
    for value in data.draw(st.lists(VALUES, max_size=8)):
        assert plain.is_valid(value) == judge.is_valid(value)
    bare = without_idle(dressed)
    assert without_idle(bare) == bare
    for rules in (
        OutputRules(json_schema=dressed),
        OutputRules(json_schema=json.dumps(dressed)),
        OutputRules(tool_calls=calls({"type": "object", "properties": {"x": dressed}})),
    ):
        compiler.compile(rules)
    kept = Draft202012Validator(bare)
    for value in data.draw(st.lists(VALUES, max_size=8)):
        assert plain.is_valid(value) == kept.is_valid(value)


@pytest.mark.parametrize("piece", IDLE, ids=json.dumps)
@pytest.mark.parametrize("kind", [*FOREIGN, None])
def test_each_of_them(compiler, piece, kind):
    schema = piece if kind is None or "type" in piece else {"type": kind, **piece}
    compiler.compile(OutputRules(json_schema={"type": "object", "properties": {"x": schema}}))


@pytest.mark.parametrize("form", ["deepseekv3", "deepseekv31", "deepseekv32"])
def test_formats_that_nobody_knows(compiler, form):
    properties = {name or "none": {"type": "string", "format": name} for name in FORMATS}
    schema = {"type": "object", "properties": properties}
    compiler.compile(OutputRules(tool_calls=calls(schema, form)))
    compiler.compile(OutputRules(json_schema=schema))


RESTRICT = [
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {"type": "null"}},
    {"type": "array", "contains": {}, "minContains": 0, "maxContains": 2},
    {"propertyNames": {"maxLength": 3}},
    {"propertyNames": {"type": "null"}},
    {"not": {"type": "null"}},
    {"if": {"type": "string"}, "then": {"maxLength": 1}},
    {"if": {"type": "string"}, "else": False},
    {"dependentRequired": {"a": ["b"]}},
    {"dependentSchemas": {"a": {"required": ["b"]}}},
    {"type": "object", "unevaluatedProperties": False},
]


@pytest.mark.parametrize("schema", RESTRICT, ids=json.dumps)
def test_what_restricts_and_is_not_known_is_refused(compiler, schema):
    whole = {"type": "object", "properties": {"x": schema}}
    with pytest.raises(RequestError, match="cannot be compiled") as caught:
        compiler.compile(OutputRules(json_schema=whole))
    assert caught.value.param == "json_schema.properties.x"


def calls(schema, form="deepseekv31", *before):
    return ToolRules(format=form, tools=(*before, ToolSchema("f", schema)), several=True)


@pytest.mark.parametrize("beside", [None, {"type": "object"}])
@pytest.mark.parametrize("schema", RESTRICT, ids=json.dumps)
def test_a_fault_in_a_tool_s_schema_names_the_tool(compiler, schema, beside):
    """Beside a response_format, too."""
    tools = calls({"type": "object", "properties": {"x": schema}}, "deepseekv31", ToolSchema("g"))
    with pytest.raises(RequestError) as caught:
        compiler.compile(OutputRules(json_schema=beside, tool_calls=tools, field="response_format"))
    param = "tools[1].function.parameters.properties.x"
    assert caught.value.param == param and f"{param} (of 'f') cannot be" in str(caught.value)


def test_a_fault_beside_tools_names_the_schema(compiler):
    rules = OutputRules(json_schema=RESTRICT[0], tool_calls=calls({"type": "object"}))
    with pytest.raises(RequestError) as caught:
        compiler.compile(rules)
    assert caught.value.param == "json_schema"


def test_references_into_words_that_are_no_keywords(compiler):
    item = {"type": "array", "items": {"type": "string", "format": "zz"}, "uniqueItems": False}
    schema = {
        "type": "object",
        "properties": {"x": {"$ref": "#/components/schemas/Item"}},
        "components": {"schemas": {"Item": item}},
    }
    compiler.compile(OutputRules(json_schema=schema))


@pytest.mark.parametrize("path", [["a"], ["a", "b"]])
def test_a_field_that_nothing_can_fill_is_named_once(compiler, path):
    schema = False
    for name in reversed(path):
        schema = {"type": "object", "properties": {name: schema}, "required": [name]}
    with pytest.raises(RequestError) as caught:
        compiler.compile(OutputRules(json_schema=schema, field="text.format.schema"))
    where = "text.format.schema" + "".join(f".properties.{name}" for name in path)
    assert caught.value.param == where
    assert str(caught.value) == f"{where} cannot be compiled: it is false: nothing satisfies it"
