"""What a request's output must look like: a schema, an expression, a choice, tool calls.

Plain data, checked for form when it is made; `ds_runtime/grammar` compiles it.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from msgspec.structs import replace

from ds_runtime.common.nesting import MAX_NESTING, too_deep
from ds_runtime.errors import RequestError, shown

MAX_RULE = 1 << 18  # characters of one rule, as JSON
MAX_CHOICES = 1024
TOOL_FORMATS = ("deepseekv3", "deepseekv31", "deepseekv32", "deepseekv4")
REASONING = ("none", "optional", "open")
BUDGET_FIELD = "thinking_token_budget"
MAX_BUDGET = 1 << 24  # tokens


class ToolSchema(msgspec.Struct, frozen=True):
    """A function that may be called. `parameters`: JSON schema of its arguments; None: none.
    `field`: what errors name.
    """

    name: str
    parameters: Any = None
    field: str = ""


class ToolRules(msgspec.Struct, frozen=True, kw_only=True):
    """Output that is tool calls, as `format` writes them; `several`: one or more, else one."""

    format: str
    tools: tuple[ToolSchema, ...]
    several: bool = True


class OutputRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rule that the generated text keeps to; set exactly one of the first five fields, or
    json_schema and tool_calls for either, or thinking_budget, alone or with them.

    json_schema: a schema, as an object, boolean or JSON text ({"type": "object"} is "any JSON
    object"). regex: in Rust's syntax, matched as a whole, with
    ASCII's digits and words for `\\d` and `\\w`. ebnf: a GBNF (`root ::= …`) or
    Lark (`start: …`) grammar. choice: one of these strings. tool_calls: calls, and nothing else.

    reasoning: "none"; "optional": a `<think> … </think>` span may come first; "open": the prompt
    has opened the span. The rule begins after it. thinking_budget: tokens that the span may have,
    before it is closed; None: any number. `field`: what errors name.

    Raises RequestError for no rule, two rules, or one of a wrong form.
    """

    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None
    choice: tuple[str, ...] = ()
    tool_calls: ToolRules | None = None
    reasoning: str = "none"
    thinking_budget: int | None = None
    field: str = ""

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, ())]
        alone = not given and self.thinking_budget is not None
        if len(given) != 1 and given != ["json_schema", "tool_calls"] and not alone:
            said = " and ".join(given) or "nothing"
            raise RequestError(
                f"the output's rules hold {said}: give exactly one of {', '.join(_KINDS)}",
                self.field or (given[-1] if given else "rules"),
            )
        if self.reasoning not in REASONING:
            raise RequestError.of(
                "reasoning", f" is {shown(self.reasoning)}: must be {', '.join(REASONING)}"
            )
        if self.thinking_budget is not None:
            check_budget(self.thinking_budget, self.budget_param)
        for name in given:
            _FORMS[name](
                getattr(self, name), self.tools_param if name == "tool_calls" else self.param
            )
        if len(self.key) > MAX_RULE:
            sizes = {self.param: len(msgspec.json.encode(getattr(self, self.kind)))}
            if self.tool_calls is not None:
                sizes[self.tools_param] = len(msgspec.json.encode(self.tool_calls))
            largest = max(sizes, key=sizes.__getitem__)
            raise RequestError.of(
                largest,
                f" has {sizes[largest]} of {len(self.key)} characters: at most "
                f"{MAX_RULE} are compiled",
            )

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        kinds = (name for name in _KINDS if getattr(self, name) not in (None, ()))
        return next(kinds, "thinking_budget")

    @property
    def param(self) -> str:
        """The field that errors name."""
        return self.field or self.kind

    @property
    def budget_param(self) -> str:
        """The field that errors name for the budget."""
        return self.param if self.kind == "thinking_budget" else BUDGET_FIELD

    @property
    def tools_param(self) -> str:
        """The field that errors name for the tools."""
        return self.param if self.kind == "tool_calls" else "tools"

    @property
    def key(self) -> str:
        """Equal for rules that compile to the same grammar."""
        calls = self.tool_calls
        if calls is not None:
            tools = tuple(ToolSchema(tool.name, tool.parameters) for tool in calls.tools)
            calls = replace(calls, tools=tools)
        value = (None if self.kind == "tool_calls" else getattr(self, self.kind), calls)
        span = f"{self.reasoning} {self.thinking_budget}"
        return f"{self.kind} {span} {msgspec.json.encode(value).decode()}"


def check_budget(budget: Any, param: str) -> None:
    """RequestError for what is no number of tokens that reasoning may have."""
    if not isinstance(budget, int) or isinstance(budget, bool) or not 0 <= budget <= MAX_BUDGET:
        raise RequestError.of(
            param,
            f" is {shown(budget)}: a number of tokens from 0 to {MAX_BUDGET} is needed, "
            "or none for no limit",
        )


def _check_schema(schema: Any, param: str) -> None:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as e:
            raise RequestError.of(param, f" is no JSON: {e}") from e
    if not isinstance(schema, dict | bool):
        raise RequestError.of(param, f" is {shown(schema)}: a schema is an object or a boolean")
    if schema is False:
        raise RequestError.of(param, " is false: nothing satisfies it")
    _check_json(schema, param)


def _check_json(value: Any, param: str) -> None:
    """RequestError for what is not JSON, or JSON that this runtime does not pass on."""
    try:
        msgspec.msgpack.encode(value)  # as it travels; knows whole numbers of 64 bits
        written = msgspec.json.encode(value)
    except RecursionError as e:
        raise _too_deep(param) from e
    except OverflowError as e:
        path, number = _large(value, param)
        raise RequestError.of(
            path, f" is {shown(number)}: a schema takes whole numbers from -2**63 to 2**64 - 1"
        ) from e
    except (TypeError, UnicodeEncodeError) as e:
        raise RequestError.of(param, f" cannot be written as JSON: {e}") from e
    if too_deep(written) is not None:
        raise _too_deep(param)


def _too_deep(param: str) -> RequestError:
    return RequestError.of(
        param, f" is nested too deeply: {MAX_NESTING} levels are the most; refer to $defs instead"
    )


def _large(value: Any, path: str) -> tuple[str, int]:
    """The first whole number beyond 64 bits, and its path, of JSON that has one."""
    left = [(path, value)]
    while left:
        path, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{path}.{name}", child) for name, child in reversed(value.items())]
        elif isinstance(value, list | tuple):
            left += [(f"{path}[{i}]", child) for i, child in reversed([*enumerate(value)])]
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            return path[:200], value
    raise AssertionError("a whole number beyond 64 bits was seen")


def _check_text(text: Any, param: str) -> None:
    if not isinstance(text, str) or not text:
        raise RequestError.of(param, f" is {shown(text)}: must be a text that is not empty")


def _check_regex(text: Any, param: str) -> None:
    _check_text(text, param)
    if (len(text) - len(text.rstrip("\\"))) % 2:  # it would escape what follows, in the grammar
        raise RequestError.of(param, ": ends in a backslash: write two for one")


def _check_choice(choice: Any, param: str) -> None:
    if not isinstance(choice, tuple | list) or not all(isinstance(c, str) and c for c in choice):
        raise RequestError.of(param, f" is {shown(choice)}: must be strings, none of them empty")
    if len(choice) > MAX_CHOICES:
        raise RequestError.of(param, f" holds {len(choice)} strings: at most {MAX_CHOICES} fit")


def _check_tools(rules: Any, param: str) -> None:
    if not isinstance(rules, ToolRules) or not rules.tools:
        raise RequestError.of(param, ": give ToolRules with at least one tool")
    if rules.format not in TOOL_FORMATS:
        raise RequestError.of(
            param, f": format {shown(rules.format)} must be one of {', '.join(TOOL_FORMATS)}"
        )
    for i, tool in enumerate(rules.tools):
        _check_json(tool.parameters, tool.field or f"{param}[{i}].function.parameters")


_KINDS = ("json_schema", "regex", "ebnf", "choice", "tool_calls")
_FORMS = {
    "json_schema": _check_schema,
    "regex": _check_regex,
    "ebnf": _check_text,
    "choice": _check_choice,
    "tool_calls": _check_tools,
}
