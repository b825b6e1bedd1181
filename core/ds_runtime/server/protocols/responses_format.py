"""How /v1/responses words an answer: whole, or as the events that build it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any, Protocol

import msgspec

from ds_runtime.server.errors import ApiError, shown
from ds_runtime.server.generate.choice import Choice, Piece
from ds_runtime.server.generate.formats import NamedEvents
from ds_runtime.server.generate.run import Run
from ds_runtime.server.protocols.blocks import Block, Blocks, Kind, blocks_of
from ds_runtime.server.protocols.responses_items import messages_of
from ds_runtime.server.protocols.store import Shelf
from ds_runtime.server.protocols.translate import Json


class RequestFields(Protocol):
    """What an answer repeats of its request."""

    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any] | None
    parallel_tool_calls: bool | None
    previous_response_id: str | None
    reasoning: dict[str, Any] | None
    store: bool | None
    text: dict[str, Any] | None
    tool_choice: Any
    tools: list[dict[str, Any]] | None


class ResponsesFormat(NamedEvents):
    """A response, whole or as the events that build it."""

    def __init__(self, model: str, body: RequestFields, kept: Shelf, context: list[Json]) -> None:
        self._model, self._body = model, body
        self._kept, self._context = kept, context
        self._blocks = Blocks()
        self._events = _Events()

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
        output = [_item(run.id, block, _state(block)) for block in blocks]
        out = self._response(run, status, output)
        if status == "incomplete":
            out["incomplete_details"] = {"reason": "max_output_tokens"}
        out["usage"] = _usage(run)
        if self._body.store is not False:
            said, _ = messages_of(output)
            self._kept.put(run.id, out, [*self._context, *(said or [_SILENCE])])
        return out

    def reply(self, run: Run) -> Json:
        """The response."""
        choice = run.choices[0]
        return self._end(run, blocks_of(choice.answer, choice.cut))

    def chunks(self, run: Run, choice: Choice, piece: Piece) -> Iterator[Json]:
        """The response's begin, then its items as they grow."""
        if piece.first:
            yield from self._events.begin(self._response(run, "in_progress", []))
        for step in self._blocks.feed(piece.events):
            yield from self._events.step(run.id, *step)

    def last(self, run: Run) -> Iterator[Json]:
        """The end of the last item and of the response."""
        for step in self._blocks.end(run.choices[0].cut):
            yield from self._events.step(run.id, *step)
        yield self._events.end(self._end(run, self._blocks.every))

    def failure(self, run: Run, error: ApiError) -> bytes:
        """The response with what it has got so far, its status "failed" and the reason."""
        output = [_item(run.id, block, "incomplete") for block in self._blocks.every]
        code = "invalid_prompt" if error.status == HTTPStatus.BAD_REQUEST else "server_error"
        told = {"error": {"code": code, "message": error.message}, "usage": _usage(run)}
        failed = self._response(run, "failed", output) | told
        return self.event(self._events.one("failed", response=failed))


class _Events:
    """The events of one response, numbered."""

    def __init__(self) -> None:
        self._number = 0

    def one(self, kind: str, **fields: Any) -> Json:
        """The next event."""
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number - 1, **fields}

    def begin(self, response: Json) -> Iterator[Json]:
        """A response without output yet."""
        for kind in ("created", "in_progress"):
            yield self.one(kind, response=response)

    def end(self, response: Json) -> Json:
        """The finished one."""
        kind = "completed" if response["status"] == "completed" else "incomplete"
        return self.one(kind, response=response)

    def step(self, response_id: str, step: str, block: Block, text: str) -> Iterator[Json]:
        """What opens, grows or closes."""
        at: Json = {"output_index": block.index}
        inside = at | {"item_id": _item_id(response_id, block)}
        part = inside | {"content_index": 0}
        name = {"text": "output_text", "reasoning": "reasoning_text"}.get(block.kind)
        if step == "open":
            none: Json = {"arguments": ""} if name is None else {"content": []}
            empty = _item(response_id, block, "in_progress") | none
            yield self.one("output_item.added", **at, item=empty)
            if name is not None:
                yield self.one("content_part.added", **part, part=_part(block.kind, ""))
        elif step == "grow" and name is None:
            yield self.one("function_call_arguments.delta", **inside, delta=text)
        elif step == "grow":
            logprobs: Json = {"logprobs": []} if name == "output_text" else {}
            yield self.one(f"{name}.delta", **part, delta=text, **logprobs)
        else:
            yield from self._close(response_id, block, at, name)

    def _close(self, response_id: str, block: Block, at: Json, name: str | None) -> Iterator[Json]:
        item = _item(response_id, block, _state(block))
        inside = at | {"item_id": item["id"]}
        if name is None:
            done = {"arguments": block.text, "name": block.name}
            yield self.one("function_call_arguments.done", **inside, **done)
        else:
            part = inside | {"content_index": 0}
            logprobs: Json = {"logprobs": []} if name == "output_text" else {}
            yield self.one(f"{name}.done", **part, text=block.text, **logprobs)
            whole = _part(block.kind, block.text)
            yield self.one("content_part.done", **part, part=whole)
        yield self.one("output_item.done", **at, item=item)


def replay(response: Json) -> Iterator[Json]:
    """The events that a finished response might have come as, each item in one piece."""
    events = _Events()
    none: Json = {"output": [], "usage": None, "incomplete_details": None}
    yield from events.begin(response | none | {"status": "in_progress"})
    for index, item in enumerate(response["output"]):
        kind = _KINDS[item["type"]]
        call = item.get("call_id", ""), item.get("name", "")
        text = item["arguments"] if kind == "call" else item["content"][0]["text"]
        block = Block(index, kind, *call, [text], item["status"] == "completed")
        for step, said in (("open", ""), ("grow", text), ("close", "")):
            if step != "grow" or text:
                yield from events.step(response["id"], step, block, said)
    yield events.end(response)


def as_stream(response: bytes, query: Mapping[str, str]) -> bytes | None:
    """`replay` of a response in JSON as it goes over the wire, if the query asks for that.

    query: `stream`, "true" or "false", and `starting_after`, the number of the last event of such a
    replay that the client has seen; the end always comes. ApiError 400 for other values.
    """
    stream, after = query.get("stream", "false").lower(), query.get("starting_after", "-1")
    if stream not in ("true", "false"):
        raise ApiError(400, f"stream is {shown(stream)}: must be true or false", param="stream")
    if not re.fullmatch(r"-1|\d{1,9}", after, re.ASCII):
        said = f"starting_after is {shown(after)}: the number of an event is needed"
        raise ApiError(400, said, param="starting_after")
    if stream == "false":
        return None
    events = list(replay(msgspec.json.decode(response)))
    frame = NamedEvents().event
    rest = [e for e in events if e["sequence_number"] > int(after)]
    return b"".join(map(frame, rest or events[-1:]))


_KINDS: dict[str, Kind] = {"reasoning": "reasoning", "message": "text", "function_call": "call"}


def _state(block: Block) -> str:
    return "completed" if block.complete else "incomplete"


def _part(kind: str, text: str) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


_SILENCE = {"role": "assistant", "content": ""}
_IDS = {"reasoning": "rs", "text": "msg", "call": "fc"}


def _item_id(response_id: str, block: Block) -> str:
    return f"{_IDS[block.kind]}_{response_id.removeprefix('resp_')}_{block.index}"


def _item(response_id: str, block: Block, status: str) -> Json:
    """One block as an output item."""
    own = _item_id(response_id, block)
    match block.kind:
        case "reasoning":
            return {
                "id": own,
                "type": "reasoning",
                "summary": [],
                "content": [_part("reasoning", block.text)],
                "status": status,
            }
        case "text":
            return {
                "id": own,
                "type": "message",
                "role": "assistant",
                "content": [_part("text", block.text)],
                "status": status,
            }
        case "call":
            return {
                "id": own,
                "type": "function_call",
                "call_id": block.call_id,
                "name": block.name,
                "arguments": block.text,
                "status": status,
            }


def _usage(run: Run) -> Json:
    usage = run.usage()
    details = usage.get("completion_tokens_details", {"reasoning_tokens": 0})
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": details,
        "total_tokens": usage["total_tokens"],
    }
