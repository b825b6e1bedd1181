"""POST /v1/messages: Anthropic's protocol over a chat request."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic_core import from_json

from ds_runtime.errors import shown
from ds_runtime.server.blocks import Block, Blocks, blocks_of
from ds_runtime.server.body import validate
from ds_runtime.server.choice import Choice, Piece
from ds_runtime.server.errors import ApiError
from ds_runtime.server.formats import NamedEvents
from ds_runtime.server.kept import KEPT, Shelf
from ds_runtime.server.prepare import Job, Service, chat_job, chat_tokens
from ds_runtime.server.protocol import MAX_ITEMS, Body, CacheSalt, ChatRequest, Priority, Rid
from ds_runtime.server.run import Run
from ds_runtime.server.translate import Json, Names, bad, only, parts_text, present

Objects = Annotated[list[dict[str, Any]], Field(max_length=MAX_ITEMS, fail_fast=True)]
_STOPS = {"length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}
_FIELDS = {
    "stop": "stop_sequences",
    r"response_format\.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    r"(messages\[\d+\])\.tool_calls\[\d+\]\.function": r"\1.content",
    r"(messages\[\d+\]\.content\[\d+\])\.tool_call_id": r"\1.tool_use_id",
    "continue_final_message": "messages",
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

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        (
            "cache_control",
            "diagnostics",
            "metadata",
            "service_tier",
            "speed",
            "user_profile_id",
            "workspace_id",
        )
    )
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {
        "container": (),
        "context_management": (),
        "mcp_servers": ([],),
        "thread": (),
        "billing_policy": (),
        "compaction": (),
        "fallbacks": (),
        "fallback_credit_token": (),
        "inference_geo": (),
    }


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

    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {
        name: allowed for name, allowed in CountRequest.ONLY.items() if name != "thread"
    }


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
        form = MessagesFormat(body.model or service.model.name, keep)
        return replace(chat_job(service, validate(ChatRequest, chat), form), names=names)


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
    name = _text(thread, "previous_message_id", "thread")
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


def count_tokens(service: Service, body: CountRequest) -> int:
    """Tokens of the rendered conversation."""
    chat, names = _chat(body)
    with names.kept():
        return len(chat_tokens(service, validate(ChatRequest, chat)))


def _joined(begun: str | list[Json], content: list[Json]) -> list[Json]:
    """The content of a message that was begun and went on: text goes on in its block."""
    blocks = [{"type": "text", "text": begun}] if isinstance(begun, str) else list(begun)
    if blocks and content and blocks[-1].get("type") == content[0]["type"] == "text":
        text = blocks[-1]["text"] + content[0]["text"]
        return [*blocks[:-1], {"type": "text", "text": text}, *content[1:]]
    return [*blocks, *content]


def _chat(body: CountRequest, held: int = 0) -> tuple[Json, Names]:
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
    chat |= _tools(body) | _thinking(body.thinking) | _output(body.output_config)
    chat["chat_template_kwargs"] = body.chat_template_kwargs
    return present(chat), Names(paths, _FIELDS)


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
            texts.append(_text(block, "text", where))
        elif kind == "tool_result" and role == "user":
            results.append((_result(block, where), where))
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(block, where))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(_text(block, "thinking", where))
        elif kind != "redacted_thinking":
            allowed = "text, tool_result" if role == "user" else "text, tool_use, thinking"
            raise bad(f"{where}.type", kind, f"a {role} message may hold {allowed}")
    own: Json = {"role": role, "content": "\n".join(texts)}
    if calls:
        own["tool_calls"] = calls
    if thoughts:
        own["reasoning_content"] = "\n".join(thoughts)
    return results + ([(own, path)] if texts or calls or thoughts or not results else [])


def _text(block: Json, name: str, path: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise bad(f"{path}.{name}", value, "text is needed")
    return value


def _result(block: Json, path: str) -> Json:
    content = block.get("content")
    said = "" if content is None else parts_text(content, f"{path}.content", ("text",))
    asked = _text(block, "tool_use_id", path)
    return {"role": "tool", "tool_call_id": asked, "content": said}


def _call(block: Json, path: str) -> Json:
    given = block.get("input", {})
    if not isinstance(given, dict):
        raise bad(f"{path}.input", given, "an object is needed")
    function = {"name": _text(block, "name", path), "arguments": json.dumps(given)}
    return {"id": _text(block, "id", path), "type": "function", "function": function}


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
            name = _text(body.tool_choice, "name", "tool_choice")
            out["tool_choice"] = {"type": "function", "function": {"name": name}}
        elif kind in ("auto", "any", "none"):
            out["tool_choice"] = "required" if kind == "any" else kind
        else:
            raise bad("tool_choice.type", kind, "auto, any, tool or none is needed")
        if body.tool_choice.get("disable_parallel_tool_use") is True:
            out["parallel_tool_calls"] = False
    return out


def _thinking(thinking: Json | None) -> Json:
    if thinking is None:
        return {}
    only(thinking, "thinking", ("type", "budget_tokens", "display", "block_binding"))
    kind = thinking.get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise bad("thinking.type", kind, "enabled, disabled or adaptive is needed")
    return {"thinking": {"type": "disabled" if kind == "disabled" else "enabled"}}


def _output(config: Json | None) -> Json:
    if not config:
        return {}
    for name in config:
        if name not in ("format", "effort"):
            raise bad(f"output_config.{name}", config[name], "only format and effort are known")
    out: Json = {}
    if config.get("effort") is not None:
        out["reasoning_effort"] = _text(config, "effort", "output_config")
    if (wished := config.get("format")) is not None:
        if not isinstance(wished, dict) or wished.get("type") != "json_schema":
            raise bad("output_config.format", wished, 'an object of type "json_schema" is needed')
        schema = {"name": "output", "schema": wished.get("schema"), "strict": True}
        out["response_format"] = {"type": "json_schema", "json_schema": schema}
    return out


class MessagesFormat(NamedEvents):
    """A message, whole or as the events that build it. keep: is told its id and content."""

    def __init__(self, model: str, keep: Callable[[str, list[Json]], None] | None = None) -> None:
        self._model, self._keep = model, keep
        self._blocks = Blocks()

    def _message(self, run: Run, content: list[Json]) -> Json:
        return {
            "id": run.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(run),
        }

    def reply(self, run: Run) -> Json:
        """The message."""
        choice = run.choices[0]
        blocks = blocks_of(choice.answer, choice.cut)
        self._ended(run, blocks)
        return self._message(run, [_content(block) for block in blocks]) | _stop(choice)

    def _ended(self, run: Run, blocks: list[Block]) -> None:
        """Keep the message; a call that was cut has no result to come."""
        if self._keep is not None and run.choices[0].finish_reason != "abort":
            said = [b for b in blocks if b.complete or b.kind != "call"]
            self._keep(run.id, [_content(block) for block in said])

    def chunks(self, run: Run, choice: Choice, piece: Piece) -> Iterator[Json]:
        """message_start first, then blocks."""
        if piece.first:
            yield {"type": "message_start", "message": self._message(run, [])}
        yield from self._steps(self._blocks.feed(piece.events))

    def _steps(self, steps: Iterator[Any]) -> Iterator[Json]:
        for step, block, text in steps:
            out: Json = {"type": f"content_block_{_STEPS[step]}", "index": block.index}
            if step == "open":
                out["content_block"] = _empty(block)
            elif step == "grow":
                if block.kind == "call" and not _is_object(block):
                    continue  # as it is told in the end
                name, field = _DELTAS[block.kind]
                out["delta"] = {"type": name, field: text}
            elif step == "close" and block.kind == "call" and block.parts and not _is_object(block):
                delta = {"type": "input_json_delta", "partial_json": json.dumps(_input(block))}
                grown = {"type": "content_block_delta", "index": block.index, "delta": delta}
                yield grown
            yield out

    def last(self, run: Run) -> Iterator[Json]:
        """The open block's end, why the message ended, and what it took."""
        yield from self._steps(self._blocks.end(run.choices[0].cut))
        self._ended(run, self._blocks.every)
        yield {"type": "message_delta", "delta": _stop(run.choices[0]), "usage": _usage(run)}
        yield {"type": "message_stop"}

    def failure(self, run: Run, error: ApiError) -> bytes:
        """The error as an event."""
        return self.event(error.body("/v1/messages"))


_STEPS = {"open": "start", "grow": "delta", "close": "stop"}
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _empty(block: Block) -> Json:
    match block.kind:
        case "text":
            return {"type": "text", "text": "", "citations": None}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _content(block: Block) -> Json:
    out = _empty(block)
    match block.kind:
        case "text":
            out["text"] = block.text
        case "reasoning":
            out["thinking"] = block.text
        case "call":
            out["input"] = _input(block)
    return out


def _is_object(block: Block) -> bool:
    """Whether a call's arguments begin as an object."""
    return next((p.lstrip()[0] for p in block.parts if p.strip()), "") == "{"


def _input(block: Block) -> Json:
    """A call's arguments; of one that was cut what is there, in the object that it began. What is
    no object, or holds what JSON cannot say again, is the text in an object's place."""
    partial: Any = False if block.complete else "trailing-strings"
    with contextlib.suppress(ValueError):
        found = from_json(block.text or "{}", allow_inf_nan=False, allow_partial=partial)
        if isinstance(found, dict):
            json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
            return found
    return {"arguments": block.text}


def _stop(choice: Choice) -> Json:
    reason = _STOPS.get(choice.finish_reason or "", "end_turn")
    matched = choice.stop_reason if isinstance(choice.stop_reason, str) else None
    if matched is not None and choice.finish_reason == "stop":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": matched}


def _usage(run: Run) -> Json:
    usage = run.usage()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,  # Anthropic counts cached ones apart
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }
