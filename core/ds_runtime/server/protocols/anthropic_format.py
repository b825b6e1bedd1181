"""How /v1/messages words an answer: whole, or as the events that build it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from pydantic_core import from_json

from ds_runtime.server.errors import ApiError
from ds_runtime.server.generate.choice import Choice, Piece
from ds_runtime.server.generate.formats import NamedEvents
from ds_runtime.server.generate.run import Run
from ds_runtime.server.protocols.blocks import Block, Blocks, blocks_of
from ds_runtime.server.protocols.translate import Json

_STOPS = {"length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}


class MessagesFormat(NamedEvents):
    """A message, whole or as the events that build it. keep: is told its id and content. edited:
    the client asked for edits of its context, of which there were none to make.
    """

    def __init__(
        self,
        model: str,
        keep: Callable[[str, list[Json]], None] | None,
        edited: bool,
    ) -> None:
        self._model, self._keep, self._edited = model, keep, edited
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
        edits = {"context_management": _NO_EDITS} if self._edited else {}
        return self._message(run, [_content(block) for block in blocks]) | _stop(choice) | edits

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
        edits = {"context_management": _NO_EDITS} if self._edited else {}
        told = {"delta": _stop(run.choices[0]), "usage": _usage(run)}
        yield {"type": "message_delta"} | told | edits
        yield {"type": "message_stop"}

    def failure(self, run: Run, error: ApiError) -> bytes:
        """The error as an event."""
        return self.event(error.body("/v1/messages"))


_NO_EDITS: Json = {"applied_edits": []}
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
    details = usage.get("completion_tokens_details", {"reasoning_tokens": 0})
    return {
        "input_tokens": usage["prompt_tokens"] - cached,  # Anthropic counts cached ones apart
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": details["reasoning_tokens"]},
    }
