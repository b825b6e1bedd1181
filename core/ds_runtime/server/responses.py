"""/v1/responses: OpenAI's later protocol over a chat request; answers are kept for a while."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Iterator
from http import HTTPStatus
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import Field

from ds_runtime.errors import shown
from ds_runtime.server.blocks import Block, Blocks, blocks_of
from ds_runtime.server.body import validate
from ds_runtime.server.choice import Choice, Piece
from ds_runtime.server.errors import ApiError
from ds_runtime.server.formats import NamedEvents
from ds_runtime.server.prepare import Job, Service, chat_job
from ds_runtime.server.protocol import MAX_ITEMS, Body, ChatRequest, Priority, Rid
from ds_runtime.server.run import Run
from ds_runtime.server.translate import Json, Names, bad, parts_text, present

Objects = Annotated[list[dict[str, Any]], Field(max_length=MAX_ITEMS, fail_fast=True)]
_KEPT = 1024  # answers
_KEPT_BYTES = 64 << 20
_FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_TEXTS = ("input_text", "output_text", "text")


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

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        (
            "user",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "service_tier",
            "max_tool_calls",
        )
    )
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {
        "background": (False,),
        "conversation": (),
        "include": ([], ["reasoning.encrypted_content"]),
        "prompt": (),
        "top_logprobs": (0,),
        "truncation": ("disabled", "auto"),
    }


class Kept:
    """Answers that may be asked for again, and the conversation up to them; oldest out first."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()
        self._bytes = 0

    def put(self, response: Json, messages: list[Json]) -> None:
        """Keep an answer and the messages that a next request goes on from."""
        self.drop(response["id"])
        entry = msgspec.json.encode(response), msgspec.json.encode(messages)
        self._answers[response["id"]] = entry
        self._bytes += sum(map(len, entry))
        while len(self._answers) > _KEPT or self._bytes > _KEPT_BYTES:
            self.drop(next(iter(self._answers)))

    def drop(self, name: str) -> bool:
        """Forget an answer; whether it was there."""
        entry = self._answers.pop(name, None)
        self._bytes -= sum(map(len, entry or ()))
        return entry is not None

    def response(self, name: str) -> bytes:
        """The answer as JSON; ApiError 404 if it is not kept."""
        return self._find(name, "response_id")[0]

    def messages(self, name: str) -> list[Json]:
        """The conversation up to and with an answer."""
        found: list[Json] = msgspec.json.decode(self._find(name, "previous_response_id")[1])
        return found

    def _find(self, name: str, param: str) -> tuple[bytes, bytes]:
        if (entry := self._answers.get(name)) is None:
            raise ApiError(
                404,
                f"{param} {shown(name)}: no such response is kept; the last {_KEPT} with store "
                "not false are",
                param=param,
                code="response_not_found",
            )
        return entry


def responses_job(service: Service, kept: Kept, body: ResponsesRequest) -> Job:
    """Input items, translated, rendered and checked."""
    messages, paths = _messages(body)
    if body.previous_response_id is not None:
        before = kept.messages(body.previous_response_id)
        messages = [*before, *messages]
        paths = ["previous_response_id"] * len(before) + paths
    context = list(messages)  # without the instructions, which count for one request
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
    with Names(paths, _FIELDS).kept():
        form = ResponsesFormat(body.model or service.model.name, body, kept, context)
        return chat_job(service, validate(ChatRequest, chat), form)


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
    "priority",
)


def _messages(body: ResponsesRequest) -> tuple[list[Json], list[str]]:
    """Chat messages and where each stood. What the assistant did in a row is one message."""
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}], ["input"]
    messages: list[Json] = []
    paths: list[str] = []
    for i, item in enumerate(body.input):
        path = f"input[{i}]"
        one = _message(item, path)
        last = messages[-1] if messages else {}
        if one["role"] == last.get("role") == "assistant" and _goes_on(last, one):
            calls = [*last.get("tool_calls", ()), *one.get("tool_calls", ())]
            last.update(one | ({"tool_calls": calls} if calls else {}))
        else:
            messages.append(one)
            paths.append(path)
    return messages, paths


def _goes_on(last: Json, one: Json) -> bool:
    """Whether two items belong to one turn: reasoning, then text, then calls."""
    if "reasoning_content" in one:
        return False
    return "content" not in one or ("content" not in last and "tool_calls" not in last)


def _message(item: Json, path: str) -> Json:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise bad(f"{path}.role", role, "user, assistant, system or developer is needed")
        return {"role": role, "content": parts_text(item.get("content"), f"{path}.content", _TEXTS)}
    if kind == "function_call":
        function = {
            "name": _text(item, "name", path),
            "arguments": _text(item, "arguments", path),
        }
        call = {"id": _text(item, "call_id", path), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        said = parts_text(item.get("output"), f"{path}.output", _TEXTS)
        return {"role": "tool", "tool_call_id": _text(item, "call_id", path), "content": said}
    if kind == "reasoning":
        content = item.get("content")
        said = parts_text(content, f"{path}.content", ("reasoning_text",)) if content else ""
        return {"role": "assistant", "reasoning_content": said}
    raise bad(
        f"{path}.type", kind, "message, function_call, function_call_output or reasoning is needed"
    )


def _text(item: Json, name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad(f"{path}.{name}", value, "text is needed")
    return value


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
        return {"type": "function", "function": {"name": _text(choice, "name", "tool_choice")}}
    return choice


def _reasoning(reasoning: Json | None) -> Json:
    effort = (reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise bad("reasoning.effort", effort, "text is needed")
    return {"reasoning_effort": effort}


def _text_format(text: Json | None) -> Json:
    wished = (text or {}).get("format")
    if wished is None:
        return {}
    if not isinstance(wished, dict):
        raise bad("text.format", wished, "an object is needed")
    if wished.get("type") == "json_schema":
        schema = {name: wished.get(name) for name in ("name", "description", "schema", "strict")}
        return {"response_format": {"type": "json_schema", "json_schema": present(schema)}}
    return {"response_format": wished}


class ResponsesFormat(NamedEvents):
    """A response, whole or as the events that build it."""

    def __init__(self, model: str, body: ResponsesRequest, kept: Kept, context: list[Json]) -> None:
        self._model, self._body = model, body
        self._kept, self._context = kept, context
        self._blocks = Blocks()
        self._number = 0

    def _response(self, run: Run, status: str, output: list[Json]) -> Json:
        body = self._body
        return {
            "id": run.id,
            "object": "response",
            "created_at": run.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None} | (body.reasoning or {}),
            "store": body.store is not False,
            "temperature": run.choices[0].params.temperature,
            "text": {"format": {"type": "text"}} | (body.text or {}),
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
            "top_logprobs": 0,
            "top_p": run.choices[0].params.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _end(self, run: Run, blocks: list[Block]) -> Json:
        """The finished response; kept, unless the client does not want that."""
        choice = run.choices[0]
        status = {"length": "incomplete", "abort": "cancelled"}.get(
            choice.finish_reason or "", "completed"
        )
        output = [_item(run, block, _state(block, status)) for block in blocks]
        out = self._response(run, status, output)
        if status == "incomplete":
            out["incomplete_details"] = {"reason": "max_output_tokens"}
        out["usage"] = _usage(run)
        if self._body.store is not False:
            self._kept.put(out, [*self._context, *_history(blocks)])
        return out

    def reply(self, run: Run) -> Json:
        """The response."""
        return self._end(run, blocks_of(run.choices[0].answer))

    def _event(self, kind: str, **fields: Any) -> Json:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number - 1, **fields}

    def chunks(self, run: Run, choice: Choice, piece: Piece) -> Iterator[Json]:
        """The response's begin, then its items as they grow."""
        if piece.first:
            for kind in ("created", "in_progress"):
                yield self._event(kind, response=self._response(run, "in_progress", []))
        for step, block, text in self._blocks.feed(piece.events):
            yield from self._step(run, step, block, text)

    def _step(self, run: Run, step: str, block: Block, text: str) -> Iterator[Json]:
        item = _item(run, block, "in_progress")
        at: Json = {"output_index": block.index}
        inside = at | {"item_id": item["id"]}
        part = inside | {"content_index": 0}
        name = {"text": "output_text", "reasoning": "reasoning_text"}.get(block.kind)
        if step == "open":
            none: Json = {"arguments": ""} if name is None else {"content": []}
            empty = item | none
            yield self._event("output_item.added", **at, item=empty)
            if name is not None:
                yield self._event("content_part.added", **part, part=_part(block.kind, ""))
        elif step == "grow" and name is None:
            yield self._event("function_call_arguments.delta", **inside, delta=text)
        elif step == "grow":
            logprobs: Json = {"logprobs": []} if name == "output_text" else {}
            yield self._event(f"{name}.delta", **part, delta=text, **logprobs)
        else:
            yield from self._close(run, block, at, name)

    def _close(self, run: Run, block: Block, at: Json, name: str | None) -> Iterator[Json]:
        item = _item(run, block, _state(block, "completed"))
        inside = at | {"item_id": item["id"]}
        if name is None:
            done = {"arguments": block.text, "name": block.name}
            yield self._event("function_call_arguments.done", **inside, **done)
        else:
            part = inside | {"content_index": 0}
            logprobs: Json = {"logprobs": []} if name == "output_text" else {}
            yield self._event(f"{name}.done", **part, text=block.text, **logprobs)
            whole = _part(block.kind, block.text)
            yield self._event("content_part.done", **part, part=whole)
        yield self._event("output_item.done", **at, item=item)

    def last(self, run: Run) -> Iterator[Json]:
        """The end of the last item and of the response."""
        for step, block, text in self._blocks.end():
            yield from self._step(run, step, block, text)
        response = self._end(run, self._blocks.every)
        kind = "incomplete" if response["status"] == "incomplete" else "completed"
        yield self._event(kind, response=response)

    def failure(self, run: Run, error: ApiError) -> bytes:
        """The response with what it has got so far, its status "failed" and the reason."""
        output = [_item(run, block, "incomplete") for block in self._blocks.every]
        code = "invalid_prompt" if error.status == HTTPStatus.BAD_REQUEST else "server_error"
        told = {"error": {"code": code, "message": error.message}, "usage": _usage(run)}
        failed = self._response(run, "failed", output) | told
        return self.event(self._event("failed", response=failed))


def _state(block: Block, status: str) -> str:
    return "completed" if block.complete and status == "completed" else "incomplete"


def _part(kind: str, text: str) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(run: Run, block: Block, status: str) -> Json:
    """One block as an output item."""
    own = f"{run.id.removeprefix('resp_')}_{block.index}"
    match block.kind:
        case "reasoning":
            return {
                "id": f"rs_{own}",
                "type": "reasoning",
                "summary": [],
                "content": [_part("reasoning", block.text)],
                "status": status,
            }
        case "text":
            return {
                "id": f"msg_{own}",
                "type": "message",
                "role": "assistant",
                "content": [_part("text", block.text)],
                "status": status,
            }
        case "call":
            return {
                "id": f"fc_{own}",
                "type": "function_call",
                "call_id": block.call_id,
                "name": block.name,
                "arguments": block.text,
                "status": status,
            }


def _history(blocks: list[Block]) -> list[Json]:
    """The assistant's message as a next request has to render it."""
    out: Json = {"role": "assistant", "content": ""}
    for block in blocks:
        if block.kind == "text":
            out["content"] += block.text
        elif block.kind == "reasoning":
            out["reasoning_content"] = out.get("reasoning_content", "") + block.text
        elif block.complete:
            function = {"name": block.name, "arguments": block.text}
            call = {"id": block.call_id, "type": "function", "function": function}
            out.setdefault("tool_calls", []).append(call)
    return [out]


def _usage(run: Run) -> Json:
    usage = run.usage()
    details = usage.get("completion_tokens_details", {"reasoning_tokens": 0})
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": details,
        "total_tokens": usage["total_tokens"],
    }
