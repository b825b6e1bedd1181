"""The fields that say what an answer must look like, under all the names in use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ds_runtime.errors import FieldPath, RequestError
from ds_runtime.output_rules import (
    BUDGET_FIELD,
    TOOL_FORMATS,
    OutputRules,
    ToolRules,
    ToolSchema,
    check_budget,
)
from ds_runtime.server.errors import shown
from ds_runtime.server.generate.protocol import ChatRequest, OpenAIRequest, Sampling
from ds_runtime.server.protocols.fields import NOTHING, is_neutral
from ds_runtime.text.parsers.reasoning import opening
from ds_runtime.text.parsers.registry import Parsers

_ANY_OBJECT = {"type": "object"}
_STRUCTURED = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "json_object": "json_schema",
}


def plain_rules(fields: Sampling) -> OutputRules | None:
    """The rules that any generating route takes; RequestError for two at once."""
    found = list(_given(fields))
    if len(found) > 1:
        one, other = FieldPath.of(found[0].param), found[1].param
        said = (one, " and ", FieldPath.of(other), " both rule the output: send one of them")
        raise RequestError(said, other)
    return found[0] if found else None


def chat_rules(body: ChatRequest, parsers: Parsers, prompt: str) -> OutputRules | None:
    """A chat's rules: `plain_rules`, and the tool calls that tool_choice demands.

    With tool_choice "auto" the answer may be a call instead of what response_format says; where a
    call is demanded, there is no answer that response_format could rule.
    Reasoning comes first where `prompt` or the model opens it, within its budget.
    """
    plain, calls = plain_rules(body), _calls(body, parsers)
    demanded = calls is not None and body.tool_choice not in (None, "auto")
    if plain is not None and demanded and plain.param.startswith("response_format"):
        plain = None
    if plain is not None and demanded:
        raise RequestError.of(
            "tool_choice",
            " demands a call and ",
            FieldPath.of(plain.param),
            " an answer: send one of them",
        )
    budget = body.thinking_token_budget
    budget = None if budget == -1 else budget
    if budget is not None:
        check_budget(budget, BUDGET_FIELD)
    first = opening(parsers.reasoning or "deepseek-v3", prompt)
    if plain is None and not demanded:
        if budget is None or first == "none":
            return None
        return OutputRules(reasoning=first, thinking_budget=budget, field=BUDGET_FIELD)
    first = "none" if parsers.reasoning is None else first
    if first == "optional" and (body.separate_reasoning is False or _thinks_not(body)):
        first = "none"  # it would stand in the answer, or was not wished
    span: dict[str, Any] = {
        "reasoning": first,
        "thinking_budget": None if first == "none" else budget,
    }
    if plain is None:
        return OutputRules(tool_calls=calls, **span, field="tools")
    also = calls if plain.json_schema is not None else None
    kept = {name: getattr(plain, name) for name in plain.__struct_fields__}
    return OutputRules(**kept | span | {"tool_calls": also})


def _thinks_not(body: ChatRequest) -> bool:
    """Whether the client has switched thinking off; templates read either name."""
    asked = body.chat_template_kwargs or {}
    if (said := asked.get("thinking", asked.get("enable_thinking"))) is not None:
        return said is False
    if body.thinking is not None:
        return body.thinking.type == "disabled"
    return asked.get("reasoning_effort", body.reasoning_effort) == "none"


def asked_format(body: ChatRequest) -> dict[str, Any]:
    """What response_format asks, as keywords for encodings that tell the model of it."""
    wished = body.response_format or {}
    if wished.get("type") == "json_object":
        return {"json_object": True}
    named = wished.get("json_schema")
    schema = named.get("schema") if isinstance(named, Mapping) else None
    return {} if schema is None else {"response_format": schema}


def _given(fields: Sampling) -> Iterator[OutputRules]:
    if isinstance(fields, OpenAIRequest) and fields.response_format:
        yield from _response_format(fields.response_format)
    for name in ("json_schema", "regex", "ebnf"):
        if (value := getattr(fields, name)) is not None:
            yield _rules({name: value}, name)
    for key, value in (fields.structured_outputs or {}).items():
        field = f"structured_outputs.{key}"
        if key not in _STRUCTURED and is_neutral(value, NOTHING):
            continue
        if key not in _STRUCTURED:
            raise RequestError.of(field, f" is unknown: use {', '.join(_STRUCTURED)}")
        if key == "json_object" and value is not None and not isinstance(value, bool):
            raise RequestError.of(field, f" is {shown(value)}: must be true or false")
        if key == "choice" and value == []:
            raise RequestError.of(field, " is an empty list: give at least one string")
        if key == "json_object" and value:
            yield OutputRules(json_schema=_ANY_OBJECT, field=field)
        elif key != "json_object" and value is not None:
            rule = {_STRUCTURED[key]: tuple(value) if isinstance(value, list) else value}
            yield _rules(rule, field)


def _rules(rule: dict[str, Any], field: str) -> OutputRules:
    return OutputRules(**rule, field=field)


def _response_format(value: Mapping[str, Any]) -> Iterator[OutputRules]:
    match value.get("type"):
        case "text":
            return
        case "json_object":
            yield OutputRules(json_schema=_ANY_OBJECT, field="response_format")
        case "json_schema":
            named = value.get("json_schema")
            field = "response_format.json_schema"
            if not isinstance(named, Mapping):
                said = " is missing" if named is None else f" is {shown(named)}"
                raise RequestError.of(field, f"{said}: an object with a schema is needed")
            if named.get("schema") is None:
                raise RequestError.of(f"{field}.schema", " is missing: a JSON schema is needed")
            yield OutputRules(json_schema=named["schema"], field=f"{field}.schema")
        case other:
            raise RequestError.of(
                "response_format.type",
                f" is {shown(other)}: must be text, json_object or json_schema",
            )


def _calls(body: ChatRequest, parsers: Parsers) -> ToolRules | None:
    """The calls that may or must come; RequestError for a choice that cannot be."""
    choice, tools = body.tool_choice, list(_tools(body.tools or []))
    name: object = None
    match choice:
        case None | "none" | "auto":
            if choice == "none" or not tools or parsers.tool_calls not in TOOL_FORMATS:
                return None
        case "required":
            pass
        case {"type": "function", "function": {"name": name}}:
            tools = [tool for tool in tools if tool.name == name]
        case _:
            raise RequestError.of(
                "tool_choice",
                f" is {shown(choice)}: must be none, auto, required, or an object "
                'such as {"type": "function", "function": {"name": "…"}}',
            )
    if not tools:
        said = "holds no tool: send one" if name is None else f"holds no function {shown(name)}"
        said += "" if name is None else ": name one of tools"
        raise RequestError.of("tool_choice", f" demands a call, but tools {said}")
    if parsers.tool_calls is None:
        raise RequestError.of(
            "tool_choice",
            " demands a call, but the server parses none: start it with --tool-call-parser",
        )
    if parsers.tool_calls not in TOOL_FORMATS:
        raise RequestError.of(
            "tool_choice",
            f" demands a call, but calls as {parsers.tool_calls} reads them cannot be "
            f'demanded, only those of {", ".join(TOOL_FORMATS)}: use "auto"',
        )
    several = name is None and body.parallel_tool_calls is not False
    return ToolRules(format=parsers.tool_calls, tools=tuple(tools), several=several)


def _tools(tools: Sequence[Mapping[str, Any]]) -> Iterator[ToolSchema]:
    for i, tool in enumerate(tools):
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise RequestError.of(f"tools[{i}]", ": a function with a name is needed")
        yield ToolSchema(name, function.get("parameters"), f"tools[{i}].function.parameters")
