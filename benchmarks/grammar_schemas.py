"""JSON schemas, one per feature, with instances that satisfy them and instances that do not.

Written for benchmarks/compare_grammars.py; jsonschema is the judge of the instances themselves.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Feature(NamedTuple):
    """One feature of JSON Schema 2020-12."""

    name: str
    schema: Any
    valid: list[Any]
    invalid: list[Any]


def _object(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    out: dict[str, Any] = {"type": "object", "properties": properties}
    if required is not None:
        out["required"] = required
    return out


_NODE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
_CLOSED = {"additionalProperties": False}

FEATURES: list[Feature] = [
    Feature("type string", {"type": "string"}, ["", 'aé\n"\\', "日本"], [1, None, {}]),
    Feature("type integer", {"type": "integer"}, [0, -17, 12345], [1.5, "1"]),
    Feature("type number", {"type": "number"}, [0, 1.5, -2e10], ["x", None]),
    Feature("type boolean", {"type": "boolean"}, [True, False], [0, "true"]),
    Feature("type null", {"type": "null"}, [None], [0, "null", False]),
    Feature("several types", {"type": ["string", "null"]}, ["x", None], [1, []]),
    Feature("anything", {}, [1, "x", [None, {"a": {}}]], []),
    Feature("anything: true", True, [1, "x", []], []),
    Feature("any object", {"type": "object"}, [{}, {"a": [1, {"b": None}]}], [1, []]),
    Feature("any array", {"type": "array"}, [[], [1, "x", {}]], [{}, 1]),
    Feature("enum", {"enum": ["red", "green", 3, None]}, ["red", 3, None], ["blue", 4]),
    Feature("enum of objects", {"enum": [{"a": 1}, [1, 2]]}, [{"a": 1}, [1, 2]], [{"a": 2}]),
    Feature("const", {"const": "exactly"}, ["exactly"], ["else", 1]),
    Feature("const object", {"const": {"a": [1]}}, [{"a": [1]}], [{"a": []}]),
    Feature(
        "required",
        _object(["a"], a={"type": "integer"}, b={"type": "string"}) | _CLOSED,
        [{"a": 1}, {"a": 1, "b": "x"}],
        [{}, {"b": "x"}],
    ),
    Feature(
        "optional properties",
        _object(None, a={"type": "integer"}, b={"type": "integer"}, c={"type": "integer"})
        | _CLOSED,
        [{}, {"a": 1}, {"b": 1}, {"a": 1, "c": 2}, {"c": 1}],
        [{"d": 1}, {"a": "x"}],
    ),
    Feature(
        "properties not required, open",
        _object(None, a={"type": "integer"}),
        [{}, {"a": 1}, {"a": 1, "z": [1]}, {"z": 2}],
        [{"a": "x"}],
    ),
    Feature(
        "additionalProperties schema",
        {"type": "object", "additionalProperties": {"type": "integer"}},
        [{}, {"x": 1, "y": 2}],
        [{"x": "s"}],
    ),
    Feature(
        "additionalProperties false", _object(["a"], a={}) | _CLOSED, [{"a": 1}], [{"a": 1, "b": 2}]
    ),
    Feature(
        "patternProperties",
        {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}} | _CLOSED,
        [{}, {"x-a": 1}],
        [{"x-a": "s"}, {"y": 1}],
    ),
    Feature(
        "propertyNames",
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}},
        [{"abc": 1}, {}],
        [{"A1": 1}],
    ),
    Feature(
        "minProperties, maxProperties",
        {"type": "object", "minProperties": 1, "maxProperties": 2},
        [{"a": 1}, {"a": 1, "b": 2}],
        [{}, {"a": 1, "b": 2, "c": 3}],
    ),
    Feature(
        "dependentRequired",
        _object(None, a={"type": "integer"}, b={"type": "integer"})
        | _CLOSED
        | {"dependentRequired": {"a": ["b"]}},
        [{}, {"b": 1}, {"a": 1, "b": 2}],
        [{"a": 1}],
    ),
    Feature(
        "items", {"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [["x"], [1, "x"]]
    ),
    Feature(
        "minItems, maxItems",
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
        [[1, 2], [1, 2, 3]],
        [[1], [1, 2, 3, 4], []],
    ),
    Feature(
        "prefixItems",
        {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "string"}],
            "items": False,
            "minItems": 2,
        },
        [[1, "x"]],
        [[1], ["x", 1], [1, "x", 2]],
    ),
    Feature("uniqueItems", {"type": "array", "uniqueItems": True}, [[1, 2]], [[1, 1]]),
    Feature(
        "contains",
        {"type": "array", "items": {"type": "integer"}, "contains": {"const": 5}},
        [[1, 5]],
        [[1, 2]],
    ),
    Feature(
        "minLength, maxLength",
        {"type": "string", "minLength": 2, "maxLength": 4},
        ["ab", "日本語"],
        ["a", "abcde"],
    ),
    Feature("pattern", {"type": "string", "pattern": "^[A-Z]{2}[0-9]+$"}, ["AB12"], ["ab12", "AB"]),
    Feature("pattern, unanchored", {"type": "string", "pattern": "b+"}, ["abbc", "b"], ["ac", ""]),
    Feature(
        "pattern and maxLength",
        {"type": "string", "pattern": "^a+$", "maxLength": 3},
        ["aaa"],
        ["aaaa", "b"],
    ),
    Feature(
        "minimum, maximum",
        {"type": "integer", "minimum": -5, "maximum": 120},
        [-5, 0, 120],
        [-6, 121, 1000],
    ),
    Feature(
        "exclusive bounds",
        {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
        [1, 9],
        [0, 10],
    ),
    Feature(
        "bounds of a number",
        {"type": "number", "minimum": 0.5, "maximum": 2.25},
        [0.5, 1, 2.25],
        [0.4, 2.3, 3],
    ),
    Feature("multipleOf", {"type": "integer", "multipleOf": 5}, [0, 15], [7]),
    Feature("format date", {"type": "string", "format": "date"}, ["2026-11-21"], ["21.11.2026"]),
    Feature(
        "format date-time",
        {"type": "string", "format": "date-time"},
        ["2026-11-21T22:00:00Z"],
        [0],  # jsonschema alone does not know the format
    ),
    Feature("format email", {"type": "string", "format": "email"}, ["a@b.org"], ["nobody"]),
    Feature(
        "format uuid",
        {"type": "string", "format": "uuid"},
        ["123e4567-e89b-42d3-a456-426614174000"],
        ["123"],
    ),
    Feature("format ipv4", {"type": "string", "format": "ipv4"}, ["10.0.0.1"], ["300.1.1.1"]),
    Feature(
        "anyOf",
        {"anyOf": [{"type": "string"}, _object(["a"], a={"type": "integer"}) | _CLOSED]},
        ["x", {"a": 1}],
        [1, {"b": 1}],
    ),
    Feature(
        "oneOf, disjoint",
        {"oneOf": [{"type": "integer"}, {"type": "string"}]},
        [1, "x"],
        [None, []],
    ),
    Feature(
        "oneOf, tagged",
        {
            "oneOf": [
                _object(["kind", "r"], kind={"const": "circle"}, r={"type": "number"}) | _CLOSED,
                _object(["kind", "w"], kind={"const": "square"}, w={"type": "number"}) | _CLOSED,
            ]
        },
        [{"kind": "circle", "r": 1.5}, {"kind": "square", "w": 2}],
        [{"kind": "circle", "w": 1}, {"kind": "oval", "r": 1}],
    ),
    Feature(
        "oneOf, overlapping",
        {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 10}]},
        [-1, 11],
        [5],
    ),
    Feature(
        "allOf",
        {
            "allOf": [
                _object(["a"], a={"type": "integer"}),
                _object(["b"], b={"type": "string"}),
            ]
        },
        [{"a": 1, "b": "x"}],
        [{"a": 1}, {"b": "x"}, {"a": 1, "b": 2}],
    ),
    Feature(
        "allOf of bounds",
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
        [3, 9],
        [2, 10],
    ),
    Feature("not", {"type": "string", "not": {"const": "no"}}, ["yes"], ["no"]),
    Feature(
        "if, then, else",
        _object(["k", "v"], k={"enum": ["s", "i"]}, v={})
        | {
            "if": {"properties": {"k": {"const": "s"}}},
            "then": {"properties": {"v": {"type": "string"}}},
            "else": {"properties": {"v": {"type": "integer"}}},
        },
        [{"k": "s", "v": "x"}, {"k": "i", "v": 1}],
        [{"k": "s", "v": 1}],
    ),
    Feature(
        "$ref to $defs",
        {
            "$defs": {"p": _object(["x"], x={"type": "number"}) | _CLOSED},
            **_object(["a", "b"], a={"$ref": "#/$defs/p"}, b={"$ref": "#/$defs/p"}),
            **_CLOSED,
        },
        [{"a": {"x": 1}, "b": {"x": 2}}],
        [{"a": {"x": 1}}, {"a": {"y": 1}, "b": {"x": 1}}],
    ),
    Feature(
        "$ref to definitions",
        {
            "definitions": {"n": {"type": "integer"}},
            "type": "array",
            "items": {"$ref": "#/definitions/n"},
        },
        [[1, 2]],
        [["x"]],
    ),
    Feature(
        "recursion",
        _NODE,
        [{"value": 1, "next": None}, {"value": 1, "next": {"value": 2, "next": None}}],
        [{"value": 1}, {"value": 1, "next": {"value": "x", "next": None}}],
    ),
    Feature(
        "recursion to #",
        _object(["c"], c={"type": "array", "items": {"$ref": "#"}}) | _CLOSED,
        [{"c": []}, {"c": [{"c": []}]}],
        [{"c": [1]}, {}],
    ),
    Feature(
        "$ref beside keywords",
        {"$defs": {"i": {"type": "integer"}}, "$ref": "#/$defs/i", "minimum": 3},
        [3, 4],
        [2, "x"],
    ),
    Feature(
        "$anchor", {"$defs": {"i": {"$anchor": "it", "type": "integer"}}, "$ref": "#it"}, [1], ["x"]
    ),
    Feature(
        "names with quotes and unicode",
        _object(['a"b', "é\n"], **{'a"b': {"type": "integer"}, "é\n": {"type": "integer"}})
        | _CLOSED,
        [{'a"b': 1, "é\n": 2}],
        [{"ab": 1}],
    ),
    Feature(
        "annotations",
        {
            "title": "T",
            "description": "d",
            "default": 1,
            "examples": [1],
            "type": "integer",
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$comment": "c",
        },
        [1],
        ["x"],
    ),
    Feature(
        "unevaluatedProperties",
        {"allOf": [_object(["a"], a={"type": "integer"})], "unevaluatedProperties": False},
        [{"a": 1}],
        [{"a": 1, "b": 1}],
    ),
]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string"},
                "city": {"type": "string"},
                "kind": {"enum": ["home", "work", "other"]},
            },
            "required": ["street", "city", "kind"],
            "additionalProperties": False,
        },
        "scores": {"type": "object", "additionalProperties": {"type": "number"}},
    },
    "required": ["name", "age", "email", "tags", "address", "scores"],
    "additionalProperties": False,
}
PERSON_INSTANCE = {
    "name": 'Ada Lovelace, countess — Größe, 日本語 "quoted"',
    "age": 36,
    "email": "ada@example.org",
    "tags": ["mathematics", "first programmer", "the analytical engine"],
    "address": {"street": "12 St. James's Square", "city": "London", "kind": "home"},
    "scores": {"algebra": 9.75, "geometry": 8, "number theory": -1.5e3},
}
TREE = _NODE
TREE_INSTANCE: Any = None
for _i in range(12):
    TREE_INSTANCE = {"value": _i * 97, "next": TREE_INSTANCE}

TIMED: dict[str, tuple[Any, Any]] = {
    "any object": ({"type": "object"}, PERSON_INSTANCE),
    "person": (PERSON, PERSON_INSTANCE),
    "list of persons": (
        {"type": "array", "items": PERSON},
        [PERSON_INSTANCE, PERSON_INSTANCE],
    ),
    "recursion": (TREE, TREE_INSTANCE),
    "60 optional": (
        {
            "type": "object",
            "properties": {f"field_{i}": {"type": ["string", "null"]} for i in range(60)},
            "additionalProperties": False,
        },
        {f"field_{i}": "some text" for i in range(0, 60, 3)},
    ),
}
