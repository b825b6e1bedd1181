"""Keywords of JSON schemas that restrict nothing: the compiler need not know them.

Those that it does not know are refused, since what they ask for would not hold. Annotations ask for
nothing, nor does a keyword with a value like `uniqueItems: false`, or one for another type than the
schema's. Words that JSON Schema has not are no keywords; a `$ref` may point into them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

# Formats whose texts are kept to. Others pass: JSON Schema leaves all of them to its readers.
_FORMATS = {
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
    "unknown",
}
_BY_NAME = {
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
    "dependencies",
}
_LISTED = {"anyOf", "oneOf", "allOf", "prefixItems"}
_OF_TYPE: Mapping[str, set[str]] = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {
        "items",
        "additionalItems",
        "prefixItems",
        "minItems",
        "maxItems",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "unevaluatedItems",
    },
    "object": {
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "minProperties",
        "maxProperties",
        "propertyNames",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedProperties",
    },
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}
_ALWAYS = {"type", "enum", "const", "not", "if", "then", "else"}
_REFERENCES = {"$ref", "$dynamicRef", "$recursiveRef"}
_RESTRICT = _ALWAYS.union(_REFERENCES, _LISTED, *_OF_TYPE.values())
_NOTES = {"deprecated", "contentSchema", "$vocabulary", "$dynamicAnchor", "$recursiveAnchor"}
_DATA = {"const", "enum", "default", "examples", "example", "required"}


def without_idle(schema: Any) -> Any:
    """The schema without what restricts nothing, at every depth. What is no schema stays."""
    if not isinstance(schema, Mapping):
        return schema
    own = {name: _inside(name, value) for name, value in schema.items() if name not in _NOTES}
    types = _types(own)
    for kind, names in _OF_TYPE.items():
        if types is not None and kind not in types:
            own = {name: value for name, value in own.items() if name not in names}
    return {name: value for name, value in own.items() if not _is_idle(name, value, own)}


def _inside(name: str, value: Any) -> Any:
    if name in _BY_NAME and isinstance(value, Mapping):
        return {key: without_idle(child) for key, child in value.items()}
    if (name in _LISTED or name == "items") and isinstance(value, list):
        return [without_idle(child) for child in value]
    return value if name in _DATA else without_idle(value)


def _types(schema: Schema) -> set[str] | None:
    """The types that may come; None where any may, or nobody knows."""
    said = schema.get("type")
    found = [said] if isinstance(said, str) else said
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        return None
    return {"number" if one == "integer" else one for one in found}


def _is_idle(name: str, value: Any, schema: Schema) -> bool:
    """Whether a keyword restricts nothing in this schema, whose parts are without what does."""
    match name:
        case "format":
            return isinstance(value, str) and value not in _FORMATS
        case "minLength" | "minItems" | "minProperties":
            return value == 0 and not isinstance(value, bool)
        case "pattern":
            return value in ("", "^", "$", ".*", "^.*")  # somewhere in the text
        case "uniqueItems":
            most = schema.get("maxItems")
            return value is False or (type(most) is int and most <= 1)
        case "propertyNames":
            return _is_any(value) or _is_any_text(value)
        case "unevaluatedProperties" | "unevaluatedItems":
            return _is_any(value)
        case "contains":
            return schema.get("minContains") == 0 and "maxContains" not in schema
        case "minContains" | "maxContains":
            least = schema.get("minContains") == 0 and "maxContains" not in schema
            return "contains" not in schema or least
        case "not":
            return value is False or (isinstance(value, Mapping) and _is_any(value.get("not")))
        case "then" | "else":
            return "if" not in schema or _is_any(value)
        case "if":
            return all(_is_any(schema.get(branch, True)) for branch in ("then", "else"))
        case "dependentRequired":
            return isinstance(value, Mapping) and all(one == [] for one in value.values())
        case "dependentSchemas":
            return isinstance(value, Mapping) and all(map(_is_any, value.values()))
        case "dependencies":
            return isinstance(value, Mapping) and all(
                one == [] or _is_any(one) for one in value.values()
            )
    return False


def _is_any(schema: Any) -> bool:
    """Whether a schema takes everything."""
    return schema is True or (isinstance(schema, Mapping) and not schema.keys() & _RESTRICT)


def _is_any_text(schema: Any) -> bool:
    """Whether a schema takes every text."""
    if not isinstance(schema, Mapping):
        return False
    own = without_idle({"type": "string", **schema})
    types = _types(own)
    return own.keys() & _RESTRICT == {"type"} and types is not None and "string" in types
