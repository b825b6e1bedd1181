"""Messages and tools of a chat, checked and as templates expect them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from ds_runtime.errors import RequestError
from ds_runtime.server.errors import shown
from ds_runtime.server.generate.protocol import ChatMessage
from ds_runtime.text.parsers.tool_calls import MAX_NAME

Plain = dict[str, Any]
# Prompts and calls delimit a name by what is left out here.
_NAME = re.compile(rf"[^\s\"'`<>{{}}｜]{{1,{MAX_NAME}}}")


def plain_messages(messages: Sequence[ChatMessage], knows_developer: bool) -> list[Plain]:
    """Parts of contents joined, absent fields absent, tool results in the order of their calls.

    RequestError names the message and field: content that is missing, calls without a function,
    a tool result without a call.
    """
    out: list[Plain] = []
    for i, message in enumerate(messages):
        plain = _plain(message, f"messages[{i}]", knows_developer)
        if message.role == "tool":
            _check_result(plain, out, f"messages[{i}]")
        out.append(plain)
    return _in_call_order(out)


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """RequestError for the first tool that is not a function with a name."""
    for i, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
            raise RequestError.of(
                f"tools[{i}]",
                f' is {shown(tool)}: only {{"type": "function", "function": {{…}}}} is supported',
            )
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RequestError.of(
                f"tools[{i}].function.name",
                f" is {shown(name)}: a name is needed, of up to "
                f"{MAX_NAME} characters, without white space, quotes and brackets",
            )
        if parameters is not None and not isinstance(parameters, Mapping):
            raise RequestError.of(
                f"tools[{i}].function.parameters",
                f" is {shown(parameters)}: a JSON schema is needed",
            )


def _plain(message: ChatMessage, path: str, knows_developer: bool) -> Plain:
    out: Plain = dict(message.model_extra or {})
    out["role"] = message.role
    if message.role == "developer" and not knows_developer:
        out["role"] = "system"
    if not out.get("tool_calls"):
        out.pop("tool_calls", None)  # null and [] say the same as nothing
    else:
        _check_calls(out["tool_calls"], message.role, path)
    _name_reasoning(out, path)
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    if content is None and "tool_calls" not in out:
        if message.role != "assistant":
            raise RequestError.of(
                f"{path}.content", f" is missing: a {message.role} message needs content"
            )
        content = ""
    out["content"] = content
    return out


def _name_reasoning(out: Plain, path: str) -> None:
    """`reasoning` and `reasoning_content` are one field under two names."""
    for name in ("reasoning", "reasoning_content"):
        value = out.pop(name, None)
        if value is not None and not isinstance(value, str):
            raise RequestError.of(f"{path}.{name}", f" is {shown(value)}: text is needed")
        if value is not None:
            out["reasoning_content"] = value


def _check_calls(calls: Any, role: str, path: str) -> None:
    if role != "assistant":
        raise RequestError.of(f"{path}.tool_calls", ": only an assistant message calls tools")
    if not isinstance(calls, list):
        raise RequestError.of(f"{path}.tool_calls", f" is {shown(calls)}: a list is needed")
    for i, call in enumerate(calls):
        where = f"{path}.tool_calls[{i}].function"
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise RequestError.of(where, ": a function with a name is needed")
        if not isinstance(call.get("id"), str | None):
            raise RequestError.of(
                f"{path}.tool_calls[{i}].id", f" is {shown(call['id'])}: text is needed"
            )
        if not isinstance(function.get("arguments", ""), str | Mapping):
            raise RequestError.of(
                f"{where}.arguments", f" is {shown(function['arguments'])}: JSON text is needed"
            )


def _check_result(result: Plain, before: Sequence[Plain], path: str) -> None:
    calls = next((m for m in reversed(before) if m["role"] != "tool"), {}).get("tool_calls")
    if not calls:
        raise RequestError.of(
            path,
            " is a tool result, but no assistant message with tool_calls is before it: send "
            "that message, too",
        )
    asked, known = result.get("tool_call_id"), [c.get("id") for c in calls]
    if not isinstance(asked, str | None):
        raise RequestError.of(f"{path}.tool_call_id", f" is {shown(asked)}: text is needed")
    since = takewhile(lambda m: m["role"] == "tool", reversed(before))
    if asked is not None and any(m.get("tool_call_id") == asked for m in since):
        raise RequestError.of(
            f"{path}.tool_call_id", f" is {shown(asked)}: that call has a result already"
        )
    if asked is not None and None not in known and asked not in known:
        raise RequestError.of(
            f"{path}.tool_call_id",
            f" is {shown(asked)}: the calls before it are {', '.join(map(shown, known))}",
        )


def _in_call_order(messages: list[Plain]) -> list[Plain]:
    """Results of one turn as their calls stand: the prompt has no ids to tell them apart by."""
    out: list[Plain] = []
    ids: list[Any] = []
    run: list[Plain] = []
    for message in [*messages, {"role": "end"}]:
        if message["role"] == "tool":
            run.append(message)
            continue
        if all(m.get("tool_call_id") in ids for m in run):
            run.sort(key=lambda m: ids.index(m["tool_call_id"]))
        out += run
        out.append(message)
        run, ids = [], [c.get("id") for c in message.get("tool_calls", ())]
    return out[:-1]
