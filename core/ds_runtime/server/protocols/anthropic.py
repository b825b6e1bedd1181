"""POST /v1/messages: Anthropic's protocol over a chat request."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from ds_runtime.output_rules import check_budget
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
from ds_runtime.server.protocols.anthropic_format import MessagesFormat
from ds_runtime.server.protocols.edits import check_edits
from ds_runtime.server.protocols.store import KEPT, Shelf
from ds_runtime.server.protocols.translate import (
    ClientNames,
    Json,
    Pattern,
    bad,
    only,
    parts_text,
    present,
    text_in,
)

Objects = Annotated[list[dict[str, Any]], Field(max_length=MAX_ITEMS, fail_fast=True)]
_FIELDS: dict[Pattern, Pattern] = {
    ("stop",): ("stop_sequences",),
    ("response_format", "json_schema"): ("output_config", "format"),
    ("response_format",): ("output_config", "format"),
    ("reasoning_effort",): ("output_config", "effort"),
    ("thinking_token_budget",): ("thinking", "budget_tokens"),
    ("tools", int, "function", "parameters"): ("tools", int, "input_schema"),
    ("tools", int, "function"): ("tools", int),
    ("continue_final_message",): ("messages",),
}
_INSIDE: dict[Pattern, Pattern] = {
    ("tool_calls", int, "function"): ("content",),
    ("tool_call_id",): ("tool_use_id",),
}
_LOST = {"error_code": "thread_not_found"}  # Anthropic's clients then send all again


class CountRequest(Body):
    """POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[Objects, Field(min_length=1)]
    system: str | Objects | None = None
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: CacheSalt | None = None
    context_management: dict[str, Any] | None = None


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    priority: Priority | None = None
    rid: Rid | None = None
    thread: dict[str, Any] | None = None


def messages_job(service: Service, kept: Shelf, body: MessagesRequest) -> Job:
    """A conversation, translated, rendered and checked; `kept` holds those that are threads."""
    body, held = _continued(kept, body)
    chat, names = _chat(body, held)
    chat |= present(
        {
            "max_tokens": body.max_tokens,
            "stream": body.stream,
            "stop": body.stop_sequences or None,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "priority": body.priority,
            "rid": body.rid,
            "cache_salt": body.cache_salt,
        }
    )
    with names.kept():
        keep = None if body.thread is None else partial(_keep, kept, body)
        edited = body.context_management is not None
        form = MessagesFormat(body.model or service.model.name, keep, edited)
        job = chat_job(service, validate(ChatRequest, chat), form, clamp=True)
    check_edits(body.context_management, body.messages, len(job.submission.prompts[0][0].ids))
    return replace(job, names=names)


def _continued(kept: Shelf, body: MessagesRequest) -> tuple[MessagesRequest, int]:
    """The request with what its thread holds, and how many messages those are; ApiError 404 for
    a thread that is not held."""
    thread = body.thread
    if thread is not None and body.rid is not None and kept.history(body.rid) is not None:
        raise bad("rid", body.rid, "a message of this id is kept: draw a new one")
    if thread is None or thread == {"type": "create"}:
        return body, 0
    if thread.get("type") != "continue" or set(thread) != {"type", "previous_message_id"}:
        needed = '{"type": "create"} or {"type": "continue", "previous_message_id": "…"} is needed'
        raise bad("thread", thread, needed)
    name = text_in(thread, "previous_message_id", "thread")
    for field in ("system", "tools"):
        if (own := getattr(body, field)) is not None:
            raise bad(field, own, "the thread keeps the one that it was created with: leave it out")
    held: Json | None = kept.history(name)
    if held is None:
        param = "thread.previous_message_id"
        said = f"{param} {shown(name)}: no such message is kept; those of threads are, up to {KEPT}"
        raise ApiError(404, said, param=param, details=_LOST)
    messages = [*held["messages"], *body.messages]
    return body.model_copy(update=held | {"messages": messages}), len(held["messages"])


def _keep(kept: Shelf, body: MessagesRequest, message_id: str, content: list[Json]) -> None:
    """What the next request of a thread goes on from."""
    messages, before = body.messages, body.messages[-1]
    if before.get("role") == "assistant":  # the reply goes on from it
        messages, content = messages[:-1], _joined(before["content"], content)
    messages = [*messages, {"role": "assistant", "content": content or ""}]
    held = {"system": body.system, "tools": body.tools, "messages": messages}
    kept.put(message_id, None, held)


def count_tokens(service: Service, body: CountRequest) -> Json:
    """Tokens of the rendered conversation, as the route answers."""
    chat, names = _chat(body)
    with names.kept():
        count = len(chat_tokens(service, validate(ChatRequest, chat)))
    if body.context_management is None:
        return {"input_tokens": count}
    check_edits(body.context_management, body.messages, count)
    return {"input_tokens": count, "context_management": {"original_input_tokens": count}}


def _joined(begun: str | list[Json], content: list[Json]) -> list[Json]:
    """The content of a message that was begun and went on: text goes on in its block."""
    blocks = [{"type": "text", "text": begun}] if isinstance(begun, str) else list(begun)
    if blocks and content and blocks[-1].get("type") == content[0]["type"] == "text":
        text = blocks[-1]["text"] + content[0]["text"]
        return [*blocks[:-1], {"type": "text", "text": text}, *content[1:]]
    return [*blocks, *content]


def _chat(body: CountRequest, held: int = 0) -> tuple[Json, ClientNames]:
    """The chat request, and its parts' names; the first `held` messages are a thread's."""
    messages: list[Json] = []
    paths: list[str] = []
    if body.system:
        messages.append({"role": "system", "content": parts_text(body.system, "system", ("text",))})
        paths.append("system")
    for i, message in enumerate(body.messages, -held):
        path = "thread.previous_message_id" if i < 0 else f"messages[{i}]"
        for one, own in _messages(message, path):
            messages.append(one)
            paths.append(own)
    chat: Json = {"messages": messages, "model": body.model}
    if messages and messages[-1]["role"] == "assistant":
        chat["continue_final_message"] = True  # the protocol's way to begin the answer
    chat |= _tools(body) | _thinking(body) | _output(body.output_config)
    chat["chat_template_kwargs"] = body.chat_template_kwargs
    return present(chat), ClientNames(paths, _FIELDS, _INSIDE)


def _messages(message: Json, path: str) -> list[tuple[Json, str]]:
    """One message as chat's, each with its path: tool results of a user turn are messages of their
    own, before it."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad(f"{path}.role", role, "user, assistant or system is needed")
    if isinstance(content, str):
        return [({"role": role, "content": content}, path)]
    if not isinstance(content, list) or not content:
        raise bad(f"{path}.content", content, "text or a list of blocks is needed")
    texts: list[str] = []
    results: list[tuple[Json, str]] = []
    calls: list[Json] = []
    thoughts: list[str] = []
    for i, block in enumerate(content):
        where = f"{path}.content[{i}]"
        kind = block.get("type") if isinstance(block, dict) else block
        if kind == "text":
            texts.append(text_in(block, "text", where))
        elif kind == "tool_result" and role == "user":
            results.append((_result(block, where), where))
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(block, where))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(text_in(block, "thinking", where))
        elif kind != "redacted_thinking":
            allowed = "text, tool_result" if role == "user" else "text, tool_use, thinking"
            raise bad(f"{where}.type", kind, f"a {role} message may hold {allowed}")
    own: Json = {"role": role, "content": "\n".join(texts)}
    if calls:
        own["tool_calls"] = calls
    if thoughts:
        own["reasoning_content"] = "\n".join(thoughts)
    return results + ([(own, path)] if texts or calls or thoughts or not results else [])


def _result(block: Json, path: str) -> Json:
    content = block.get("content")
    said = "" if content is None else parts_text(content, f"{path}.content", ("text",))
    asked = text_in(block, "tool_use_id", path)
    return {"role": "tool", "tool_call_id": asked, "content": said}


def _call(block: Json, path: str) -> Json:
    given = block.get("input", {})
    if not isinstance(given, dict):
        raise bad(f"{path}.input", given, "an object is needed")
    function = {"name": text_in(block, "name", path), "arguments": json.dumps(given)}
    return {"id": text_in(block, "id", path), "type": "function", "function": function}


def _tools(body: CountRequest) -> Json:
    out: Json = {}
    tools = []
    for i, tool in enumerate(body.tools or ()):
        if tool.get("type") not in (None, "custom"):
            raise bad(f"tools[{i}].type", tool["type"], "only custom tools run here")
        name, schema = tool.get("name"), tool.get("input_schema")
        if not isinstance(name, str) or not name:
            raise bad(f"tools[{i}].name", name, "a name is needed")
        if not isinstance(schema, dict):
            raise bad(f"tools[{i}].input_schema", schema, "a JSON schema is needed")
        function = {"name": name, "description": tool.get("description"), "parameters": schema}
        tools.append({"type": "function", "function": present(function)})
    if tools:
        out["tools"] = tools
    if body.tool_choice is not None:
        kind = body.tool_choice.get("type")
        if kind == "tool":
            name = text_in(body.tool_choice, "name", "tool_choice")
            out["tool_choice"] = {"type": "function", "function": {"name": name}}
        elif kind in ("auto", "any", "none"):
            out["tool_choice"] = "required" if kind == "any" else kind
        else:
            raise bad("tool_choice.type", kind, "auto, any, tool or none is needed")
        if body.tool_choice.get("disable_parallel_tool_use") is True:
            out["parallel_tool_calls"] = False
    return out


def _thinking(body: CountRequest) -> Json:
    """Whether the model is to think, and how long; its reasoning is part of the answer only
    then."""
    thinking, asked = body.thinking or {}, body.chat_template_kwargs or {}
    only(thinking, "thinking", ("type", "budget_tokens", "display", "block_binding"))
    kind = thinking.get("type")
    if thinking and kind not in ("enabled", "disabled", "adaptive"):
        raise bad("thinking.type", kind, "enabled, disabled or adaptive is needed")
    enabled = kind in ("enabled", "adaptive")
    told = enabled or True in (asked.get("thinking"), asked.get("enable_thinking"))
    kind = "enabled" if enabled else "disabled"
    budget = thinking.get("budget_tokens")
    if budget is not None:
        check_budget(budget, "thinking.budget_tokens")
    return {
        "thinking": {"type": kind},
        "include_reasoning": told,
        "thinking_token_budget": budget if enabled else None,
    }


def _output(config: Json | None) -> Json:
    if not config:
        return {}
    only(config, "output_config", ("format", "effort"))
    out: Json = {}
    if config.get("effort") is not None:
        out["reasoning_effort"] = text_in(config, "effort", "output_config")
    if (wished := config.get("format")) is not None:
        if not isinstance(wished, dict) or wished.get("type") != "json_schema":
            raise bad("output_config.format", wished, 'an object of type "json_schema" is needed')
        schema = {"name": "output", "schema": wished.get("schema"), "strict": True}
        out["response_format"] = {"type": "json_schema", "json_schema": schema}
    return out
