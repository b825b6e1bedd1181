"""The shapes of an answer: chat and completion; whole or as stream chunks."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any, Protocol

import msgspec

from ds_runtime.server.errors import ApiError
from ds_runtime.server.generate.choice import Choice, Piece
from ds_runtime.server.generate.logprobs import (
    CompletionLogprobs,
    chat_logprobs,
    prompt_logprobs,
)
from ds_runtime.server.generate.run import Run
from ds_runtime.text.parsers.events import CallArguments, CallBegin, Content, Event, Reasoning
from ds_runtime.text.tokenizer import Tokenizer

Json = dict[str, Any]


class Format(Protocol):
    """How a route words its answer, and how its stream is framed. cumulative: each of its events
    tells all that there is so far.
    """

    cumulative: bool

    def reply(self, run: Run) -> Any:
        """The whole answer, when every choice has ended."""
        ...

    def chunks(self, run: Run, choice: Choice, piece: Piece) -> Iterator[Json]:
        """Stream events for one piece; none when there is nothing to tell yet."""
        ...

    def last(self, run: Run) -> Iterator[Json]:
        """Stream events after every choice has ended."""
        ...

    def event(self, value: Json) -> bytes:
        """A stream event on the wire."""
        ...

    def failure(self, run: Run, error: ApiError) -> bytes:
        """The event for an error whose status can no longer be sent."""
        ...

    @property
    def end(self) -> bytes:
        """What closes the stream."""
        ...


class UsageChunks(Enum):
    """Which chunks of a stream tell how many tokens there are: none, the last one, or every one.
    Each tells of its own choice so far, the last one of all."""

    NONE = 0
    LAST = 1
    EACH = 2


class Chunks:
    """Framing of chat's and completions' streams: data without a name, and [DONE]."""

    cumulative = False
    end = b"data: [DONE]\n\n"

    def event(self, value: Json) -> bytes:
        """A stream event on the wire."""
        return b"data: " + msgspec.json.encode(value) + b"\n\n"

    def failure(self, run: Run, error: ApiError) -> bytes:
        """The error's object, with the status that it would have had."""
        body = error.body()
        body["error"]["status"] = error.status
        return self.event(body)


class NamedEvents:
    """Framing where every event is named by its own `type`."""

    cumulative = False
    end = b""

    def event(self, value: Json) -> bytes:
        """A stream event on the wire."""
        name = str(value["type"]).encode()
        return b"event: " + name + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"


class ChatFormat(Chunks):
    """chat.completion and chat.completion.chunk. ids: token ids are next to the text."""

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        logprobs: bool,
        usage: UsageChunks,
        ids: bool,
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._logprobs, self._usage, self._ids = logprobs, usage, ids

    def _head(self, run: Run, kind: str) -> Json:
        return {"id": run.id, "object": kind, "created": run.created, "model": self._model}

    def _content(self, entries: Any) -> Json | None:
        if not self._logprobs:
            return None
        return {"content": chat_logprobs(entries, self._tokenizer), "refusal": None}

    def reply(self, run: Run) -> Json:
        """A chat.completion."""
        out = self._head(run, "chat.completion")
        out["choices"] = [
            {
                "index": c.index,
                "message": _message(c),
                "logprobs": self._content(c.logprobs),
                "finish_reason": c.finish_reason,
                "stop_reason": c.stop_reason,
                **(_all_ids(c, c.tokens) if self._ids else {}),
            }
            for c in run.choices
        ]
        out["usage"] = run.usage()
        first = run.choices[0]
        if first.params.prompt_logprobs is not None:
            out["prompt_logprobs"] = prompt_logprobs(first.prompt_logprobs, self._tokenizer)
        return out

    def _chunk(self, run: Run, choices: list[Json], usage: Json | None) -> Json:
        out = self._head(run, "chat.completion.chunk")
        out["choices"] = choices
        if self._usage is not UsageChunks.NONE:
            out["usage"] = usage
        return out

    def chunks(self, run: Run, choice: Choice, piece: Piece) -> Iterator[Json]:
        """The role first, then text, then the finish reason."""
        entry: Json = {"index": choice.index, "logprobs": None, "finish_reason": None}
        used = run.usage(choice) if self._usage is UsageChunks.EACH else None
        more = piece.first or piece.finish_reason or self._logprobs or self._ids
        if len(piece.events) == 1 and not more:  # nearly always
            if (delta := _delta(piece.events[0])) is not None:
                entry["delta"] = delta
                yield self._chunk(run, [entry], used)
            return
        if piece.first:
            begin = {"role": "assistant", "content": ""}
            prompt = {"prompt_token_ids": choice.prompt.ids} if self._ids else {}
            began = [entry | {"delta": begin} | prompt]
            head = self._chunk(run, began, used and _before(used))
            if choice.params.prompt_logprobs is not None:
                head["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs, self._tokenizer)
            yield head
        logprobs = self._content(piece.logprobs) if piece.logprobs else None
        deltas = [delta for e in piece.events if (delta := _delta(e)) is not None]
        ids = {"token_ids": piece.tokens} if self._ids and piece.tokens else {}
        bare = logprobs or (ids and piece.finish_reason is None)
        for delta in deltas or ([{"content": ""}] if bare else []):
            yield self._chunk(run, [entry | {"delta": delta, "logprobs": logprobs} | ids], used)
            logprobs, ids = None, {}
        if piece.finish_reason is not None:
            end: Json = {"delta": {}, "finish_reason": piece.finish_reason}
            stop = {"stop_reason": piece.stop_reason}
            yield self._chunk(run, [entry | end | stop | ids], used)

    def last(self, run: Run) -> Iterator[Json]:
        """The usage chunk, with no choices."""
        if self._usage is not UsageChunks.NONE:
            yield self._chunk(run, [], run.usage())


def _before(used: Json) -> Json:
    """Token counts as if no token had been made."""
    none = {"completion_tokens": 0, "total_tokens": used["prompt_tokens"]}
    if "completion_tokens_details" in used:
        none["completion_tokens_details"] = {"reasoning_tokens": 0}
    return used | none


def _all_ids(choice: Choice, tokens: list[int]) -> Json:
    """The prompt's ids and the answer's `tokens`."""
    return {"prompt_token_ids": choice.prompt.ids, "token_ids": tokens}


def _message(choice: Choice) -> Json:
    """The assistant's message; reasoning under both names, as clients know the one or the other.
    A call that was cut is in it, as in a stream: its finish reason tells so."""
    answer = choice.answer
    calls = answer.all_calls if choice.cut else answer.calls
    out: Json = {"role": "assistant", "content": answer.content, "refusal": None}
    if reasoning := answer.reasoning:
        out |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if calls:
        out["content"] = answer.content or None
        out["tool_calls"] = [c.as_json for c in calls]
    return out


def _delta(event: Event) -> Json | None:
    """An event as the `delta` of a chunk; None for what the protocol has no word for."""
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallBegin(call, call_id, name):
            function: Json = {"name": name, "arguments": ""}
            begin = {"index": call, "id": call_id, "type": "function", "function": function}
            return {"tool_calls": [begin]}
        case CallArguments(call, text):
            return {"tool_calls": [{"index": call, "function": {"arguments": text}}]}
    return None


class CompletionFormat(Chunks):
    """text_completion, whole and streamed. `echo` puts the prompt before the text; `alone`: instead
    of it, as if no token had been made. ids: token ids are next to the text."""

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        logprobs: bool,
        usage: UsageChunks,
        echo: bool,
        alone: bool,
        ids: bool,
    ) -> None:
        self._model, self._tokenizer, self._ids = model, tokenizer, ids
        self._logprobs, self._usage, self._echo, self._alone = logprobs, usage, echo, alone
        self._streams: dict[int, CompletionLogprobs] = {}

    def _head(self, run: Run) -> Json:
        return {
            "id": run.id,
            "object": "text_completion",
            "created": run.created,
            "model": self._model,
        }

    def _prefix(self, choice: Choice) -> str:
        if not self._echo:
            return ""
        text = choice.prompt.text
        skip = choice.params.skip_special_tokens
        return self._tokenizer.decode(choice.prompt.ids, skip) if text is None else text

    def _start(self, choice: Choice) -> CompletionLogprobs:
        state = CompletionLogprobs(self._tokenizer, choice.params.skip_special_tokens)
        if self._echo:
            state.add_prompt(choice.prompt.ids, choice.prompt_logprobs)
        return state

    def reply(self, run: Run) -> Json:
        """A text_completion."""
        choices: list[Json] = []
        for c in run.choices:
            logprobs = None
            if self._logprobs:
                state = self._start(c)
                state.add([] if self._alone else c.logprobs)
                logprobs = state.take()
            text = self._prefix(c) + ("" if self._alone else c.text)
            ids = _all_ids(c, [] if self._alone else c.tokens) if self._ids else {}
            choices.append(self._choice(c, text, logprobs, c.finish_reason) | ids)
        return self._head(run) | {"choices": choices, "usage": self._used(run)}

    def _used(self, run: Run, only: Choice | None = None) -> Json:
        used = run.usage(only)
        if self._alone:
            return _before(used)
        return used

    def _choice(
        self, choice: Choice, text: str, logprobs: Json | None, finish_reason: str | None
    ) -> Json:
        if self._alone and finish_reason is not None:
            finish_reason = "length"
        out: Json = {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if finish_reason is not None:
            out["stop_reason"] = None if self._alone else choice.stop_reason
            if choice.params.prompt_logprobs is not None:
                out["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs, self._tokenizer)
        return out

    def _chunk(self, run: Run, choices: list[Json], usage: Json | None) -> Json:
        out = self._head(run) | {"choices": choices}
        return out if self._usage is UsageChunks.NONE else out | {"usage": usage}

    def chunks(self, run: Run, choice: Choice, piece: Piece) -> Iterator[Json]:
        """One chunk per piece that has text, or ids where they are wanted, or ends the choice."""
        if self._alone:
            piece = piece._replace(text="", tokens=[], logprobs=[])
        text = self._prefix(choice) + piece.text if piece.first else piece.text
        logprobs = None
        if self._logprobs:
            if piece.first:
                self._streams[choice.index] = self._start(choice)
            state = self._streams[choice.index]
            state.add(piece.logprobs)
            logprobs = state.take()
        ids: Json = {"token_ids": piece.tokens} if self._ids and piece.tokens else {}
        if self._ids and piece.first:
            ids = _all_ids(choice, piece.tokens)
        if text or logprobs or ids or piece.finish_reason is not None:
            used = self._used(run, choice) if self._usage is UsageChunks.EACH else None
            entry = self._choice(choice, text, logprobs, piece.finish_reason)
            yield self._chunk(run, [entry | ids], used)

    def last(self, run: Run) -> Iterator[Json]:
        """The usage chunk, with no choices."""
        if self._usage is not UsageChunks.NONE:
            yield self._chunk(run, [], self._used(run))
