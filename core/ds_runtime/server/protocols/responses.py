"""/v1/responses: requests of OpenAI's later protocol, as chat requests."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from ds_runtime.server.errors import ApiError, shown
from ds_runtime.server.generate.prepare import Job, Service, chat_job, chat_tokens
from ds_runtime.server.generate.protocol import (
    MAX_ITEMS,
    Body,
    CacheSalt,
    ChatRequest,
    Priority,
    Rid,
)
from ds_runtime.server.http.body import validate
from ds_runtime.server.protocols.responses_format import ResponsesFormat
from ds_runtime.server.protocols.responses_items import messages_of
from ds_runtime.server.protocols.store import KEPT, Shelf
from ds_runtime.server.protocols.translate import (
    ClientNames,
    Json,
    Pattern,
    bad,
    only,
    present,
    text_in,
)

Objects = Annotated[list[dict[str, Any]], Field(max_length=MAX_ITEMS, fail_fast=True)]
_FIELDS: dict[Pattern, Pattern] = {
    ("messages",): ("input",),
    ("max_tokens",): ("max_output_tokens",),
    ("max_completion_tokens",): ("max_output_tokens",),
    ("response_format", "json_schema"): ("text", "format"),
    ("response_format",): ("text", "format"),
    ("reasoning_effort",): ("reasoning", "effort"),
    ("tools", int, "function"): ("tools", int),
}
_INSIDE: dict[Pattern, Pattern] = {
    ("tool_call_id",): ("call_id",),
    ("tool_calls", int, "function"): (),
}


class ResponsesRequest(Body):
    """POST /v1/responses."""

    model: str | None = None
    input: str | Annotated[Objects, Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Objects | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    seed: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Priority | None = None
    rid: Rid | None = None
    cache_salt: CacheSalt | None = None


class InputTokensRequest(ResponsesRequest):
    """POST /v1/responses/input_tokens."""

    input: str | Annotated[Objects, Field(min_length=1)] | None = None  # type: ignore[assignment]


def responses_job(service: Service, kept: Shelf, body: ResponsesRequest) -> Job:
    """Input items, translated, rendered and checked."""
    if body.rid is not None and body.store is not False and kept.answer(body.rid) is not None:
        raise bad("rid", body.rid, "a response of this id is kept: draw a new one")
    for name, value in (body.metadata or {}).items():
        if not isinstance(value, str):
            raise bad(f"metadata.{name}", value, "text is needed")
    chat, names, context = _chat(kept, body)
    with names.kept():
        form = ResponsesFormat(body.model or service.model.name, body, kept, context)
        return replace(chat_job(service, validate(ChatRequest, chat), form), names=names)


def count_input(service: Service, kept: Shelf, body: InputTokensRequest) -> int:
    """Tokens of the rendered conversation."""
    if body.input is None and body.previous_response_id is None:
        raise bad("input", None, "text or items are needed, or previous_response_id")
    chat, names, _ = _chat(kept, body)
    with names.kept():
        return len(chat_tokens(service, validate(ChatRequest, chat)))


def kept_response(kept: Shelf, name: str, param: str = "response_id") -> bytes:
    """A response as JSON; ApiError 404 if it is not kept."""
    if (found := kept.answer(name)) is None:
        remedy = ": send the whole conversation as input" * (param == "previous_response_id")
        raise ApiError(
            404,
            f"{param} {shown(name)}: no such response is kept. A request with store: false keeps "
            f"none, and {KEPT} are kept at most{remedy}",
            param=param,
            code="response_not_found",
        )
    return found


def _chat(kept: Shelf, body: ResponsesRequest) -> tuple[Json, ClientNames, list[Json]]:
    """(chat request, names of its parts, the conversation without the instructions, which count
    for one request)."""
    messages, paths = _messages(body.input)
    if body.previous_response_id is not None:
        kept_response(kept, body.previous_response_id, "previous_response_id")
        before: list[Json] = kept.history(body.previous_response_id)
        messages = [*before, *messages]
        paths = ["previous_response_id"] * len(before) + paths
    context = list(messages)
    if body.instructions is not None:
        messages = [{"role": "system", "content": body.instructions}, *messages]
        paths = ["instructions", *paths]
    chat = present(
        {
            "messages": messages,
            "model": body.model,
            "stream": body.stream,
            "max_completion_tokens": body.max_output_tokens,
            "tools": _tools(body.tools or ()) or None,
            "tool_choice": _tool_choice(body.tool_choice),
            "chat_template_kwargs": body.chat_template_kwargs,
            "rid": body.rid or f"resp_{uuid.uuid4().hex}",
        }
        | {name: getattr(body, name) for name in _SAME}
        | _reasoning(body.reasoning)
        | _text_format(body.text)
    )
    return chat, ClientNames(paths, _FIELDS, _INSIDE), context


_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "seed",
    "parallel_tool_calls",
    "thinking_token_budget",
    "priority",
    "cache_salt",
)


def _messages(given: str | list[Json] | None) -> tuple[list[Json], list[str]]:
    """Chat messages and where each stood."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}], ["input"]
    return messages_of(given or ())


def _tools(tools: Any) -> list[Json]:
    out: list[Json] = []
    for i, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise bad(f"tools[{i}].type", tool.get("type"), "only functions are supported")
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise bad(f"tools[{i}].name", tool.get("name"), "a name is needed")
        if not isinstance(tool.get("parameters", {}), dict | None):
            raise bad(f"tools[{i}].parameters", tool["parameters"], "a JSON schema is needed")
        fields = ("name", "description", "parameters", "strict")
        function = present({name: tool.get(name) for name in fields})
        out.append({"type": "function", "function": function})
    return out


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            raise bad("tool_choice.type", choice.get("type"), "only functions are supported")
        return {"type": "function", "function": {"name": text_in(choice, "name", "tool_choice")}}
    return choice


def _reasoning(reasoning: Json | None) -> Json:
    known = ("effort", "summary", "generate_summary", "context", "mode")
    only(reasoning or {}, "reasoning", known)
    effort = (reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise bad("reasoning.effort", effort, "text is needed")
    return {"reasoning_effort": effort}


def _text_format(text: Json | None) -> Json:
    only(text or {}, "text", ("format", "verbosity"))
    wished = (text or {}).get("format")
    if wished is None:
        return {}
    if not isinstance(wished, dict):
        raise bad("text.format", wished, "an object is needed")
    if wished.get("type") == "json_schema":
        schema = {name: wished.get(name) for name in ("name", "description", "schema", "strict")}
        return {"response_format": {"type": "json_schema", "json_schema": present(schema)}}
    return {"response_format": wished}
