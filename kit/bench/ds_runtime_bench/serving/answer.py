"""What came of one request: its events as they are decoded, and what they add up to."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import msgspec


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # newer name of the same
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    message: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None


class Chunk(msgspec.Struct):
    """A stream's event or a whole answer, as far as it is looked at."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    prompt_token_ids: list[int] | None = None


decode = msgspec.json.Decoder(Chunk).decode


@dataclass(slots=True)
class Answer:
    """What came of one request. Times in seconds of time.perf_counter.

    `events` are (time, tokens so far) of the events that brought output; tokens are None where the
    server counts them only at the end. `late`: seconds that the client sent it after its time.
    `choices`: whether there were any; without, it is no completion. `cached_tokens`: of the prompt,
    None where the server does not say. `prompt_ids`, `output_ids`: empty where it returns none.
    `session` and `turn` count from 0.
    """

    begin: float
    late: float = 0.0
    end: float = 0.0
    status: int = 0
    error: str | None = None
    events: list[tuple[float, int | None]] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, str]] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    choices: bool = False
    session: int = 0
    turn: int = 0

    @property
    def text(self) -> str:
        """Reasoning and answer, as they came."""
        return "".join(self.parts)

    @property
    def has_ids(self) -> bool:
        """Whether all ids of prompt and answer came."""
        return (len(self.prompt_ids), len(self.output_ids)) == (
            self.prompt_tokens,
            self.output_tokens,
        )

    def take(self, chunk: Chunk, now: float) -> None:
        """Add what an event, or a whole answer, brings."""
        self.choices = self.choices or bool(chunk.choices)
        self.prompt_ids = chunk.prompt_token_ids or self.prompt_ids
        count = self._usage(chunk.usage)
        found = False
        for choice in chunk.choices:
            found = self._choice(choice) or found
        if found:
            self.events.append((now, count))

    def message(self) -> dict[str, Any]:
        """The assistant's message, for the next turn. Calls are in it if all are whole."""
        out: dict[str, Any] = {"role": "assistant", "content": "".join(self.content)}
        if self.reasoning:
            out["reasoning_content"] = "".join(self.reasoning)
        if calls := self.whole_calls():
            out["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in calls
            ]
        return out

    def whole_calls(self) -> list[dict[str, str]]:
        """Its tool calls; none where one of them was cut."""
        for call in self.calls:
            try:
                whole = isinstance(json.loads(call["arguments"]), dict)
            except ValueError:
                whole = False
            if not (whole and call["id"] and call["name"]):
                return []
        return self.calls

    def _usage(self, usage: _Usage | None) -> int | None:
        if usage is None:
            return None
        self.prompt_tokens, self.output_tokens = usage.prompt_tokens, usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens
        return usage.completion_tokens

    def _choice(self, choice: _Choice) -> bool:
        """Keep what it brings; whether there was output at all."""
        self.finish_reason = choice.finish_reason or self.finish_reason
        self.prompt_ids = choice.prompt_token_ids or self.prompt_ids
        self.output_ids += choice.token_ids or ()
        delta = choice.delta or choice.message
        if delta is None:
            self.parts += [choice.text] if choice.text else []
            return bool(choice.text or choice.token_ids)
        reasoning = delta.reasoning_content or delta.reasoning
        for text, kept in ((reasoning, self.reasoning), (delta.content, self.content)):
            if text:
                self.parts.append(text)
                kept.append(text)
        for place, call in enumerate(delta.tool_calls or ()):
            self._call(place if call.index is None else call.index, call)
        return bool(reasoning or delta.content or delta.tool_calls or choice.token_ids)

    def _call(self, index: int, call: _Call) -> None:
        """Parts of a call come one by one; a new index begins a new one."""
        if not 0 <= index <= len(self.calls):
            index = len(self.calls)
        if index == len(self.calls):
            self.calls.append({"id": "", "name": "", "arguments": ""})
        kept, function = self.calls[index], call.function or _Function()
        kept["id"] = call.id or kept["id"]
        kept["name"] = function.name or kept["name"]
        kept["arguments"] += function.arguments or ""
