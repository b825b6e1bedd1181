"""What an answer must look like, by its request: the types of the `openai` and `anthropic` packages
where there are some, and what the request itself asked for.
"""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import jsonschema
from anthropic import types as anthropic
from openai import types as openai
from openai.types import chat, responses
from pydantic import TypeAdapter

Json = dict[str, Any]
Events = list[tuple[str | None, Json | None]]


class Answer(NamedTuple):
    """An answer as it came."""

    status: int
    kind: str
    body: bytes

    @property
    def events(self) -> Events:
        """Name and data of each event of a stream; None for [DONE]."""
        found: Events = []
        for block in self.body.decode().split("\n\n")[:-1]:
            lines = dict(line.split(": ", 1) for line in block.split("\n"))
            data = lines["data"]
            found.append((lines.get("event"), None if data == "[DONE]" else json.loads(data)))
        return found


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def typed(kind: Any, value: Any) -> None:
    """ValidationError for what is not of a package's type."""
    _adapter(kind).validate_python(value)


def check(method: str, target: str, asked: Json, answer: Answer) -> None:
    """AssertionError or ValidationError for an answer of another shape."""
    path = target.partition("?")[0]
    if answer.status >= 400:
        _refused(path, json.loads(answer.body))
    elif asked.get("stream"):
        assert answer.kind.startswith("text/event-stream")
        _STREAMS[path](asked, answer.events)
    else:
        assert answer.kind == "application/json"
        (look,) = (f for m, p, f in _WHOLE if m == method and re.fullmatch(p, path))
        look(asked, json.loads(answer.body))


def _refused(path: str, value: Json) -> None:
    if path.startswith("/v1/messages"):
        typed(anthropic.ErrorResponse, value | {"request_id": None})
    assert isinstance(value["error"]["message"], str) and value["error"]["type"]


# ---- chats and completions ----


def _chat(asked: Json, value: Json) -> None:
    typed(chat.ChatCompletion, value)
    assert len(value["choices"]) == (asked.get("n") or 1) and value["usage"]["total_tokens"]
    for choice in value["choices"]:
        message = choice["message"]
        calls = [c["function"] for c in message.get("tool_calls", [])]
        _kept(asked, choice["finish_reason"], message["content"], calls)
        assert bool((choice["logprobs"] or {}).get("content")) == bool(asked.get("logprobs"))


def _chat_stream(asked: Json, events: Events) -> None:
    chunks = _chunks(asked, events)
    for chunk in chunks:
        typed(chat.ChatCompletionChunk, chunk)
    for own in _choices(asked.get("n") or 1, chunks):
        assert own[0]["delta"]["role"] == "assistant"
        deltas = [choice["delta"] for choice in own]
        calls: list[Json] = []
        for part in (p for d in deltas for p in d.get("tool_calls", [])):
            if part["index"] == len(calls):
                calls.append({"name": part["function"]["name"], "arguments": ""})
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
        text = "".join(d.get("content") or "" for d in deltas)
        _kept(asked, own[-1]["finish_reason"], text, calls)


def _kept(asked: Json, end: str, text: str | None, calls: list[Json]) -> None:
    """What tool_choice and response_format demand of an answer that its model has ended."""
    if end == "length":
        return
    assert end == ("tool_calls" if calls else "stop")
    choice, form = asked.get("tool_choice"), asked.get("response_format") or {}
    if choice not in (None, "auto", "none"):
        assert calls and all(isinstance(json.loads(call["arguments"]), dict) for call in calls)
        if isinstance(choice, dict):
            assert {call["name"] for call in calls} == {choice["function"]["name"]}
    elif form.get("type") == "json_schema" and not calls:
        jsonschema.validate(json.loads(text or ""), form["json_schema"]["schema"])
    elif form.get("type") == "json_object" and not calls:
        assert isinstance(json.loads(text or ""), dict)


def _completion(asked: Json, value: Json) -> None:
    typed(openai.Completion, _scored(value) if asked.get("echo") else value)
    assert len(value["choices"]) == _wished(asked) and value["usage"]["total_tokens"]
    for choice in value["choices"]:
        assert (choice["logprobs"] is None) == (asked.get("logprobs") is None)
        if asked.get("echo") and isinstance(asked["prompt"], str):
            assert choice["text"].startswith(asked["prompt"])


def _scored(value: Json) -> Json:
    """Without each first token, of which nothing can be told: the package's type knows no null."""
    rest = [
        choice | {"logprobs": {name: told[1:] for name, told in choice["logprobs"].items()}}
        for choice in value["choices"]
        if choice["logprobs"] is not None
    ]
    return value | {"choices": rest}


def _completion_stream(asked: Json, events: Events) -> None:
    for own in _choices(_wished(asked), _chunks(asked, events)):
        assert all(isinstance(choice["text"], str) for choice in own)


def _wished(asked: Json) -> int:
    prompt = asked["prompt"]
    many = isinstance(prompt, list) and not isinstance(prompt[0], int)
    return (len(prompt) if many else 1) * (asked.get("n") or 1)


def _chunks(asked: Json, events: Events) -> list[Json]:
    """The chunks of a stream, whose usage is where stream_options says."""
    assert events[-1] == (None, None) and all(name is None for name, _ in events)
    chunks = [data for _, data in events if data is not None]
    assert len(chunks) == len(events) - 1
    options = asked.get("stream_options") or {}
    last, each = options.get("include_usage"), options.get("continuous_usage_stats")
    usages = [chunk.get("usage") for chunk in chunks]
    if last:
        assert chunks[-1]["choices"] == [] and usages.pop()["total_tokens"]
    assert all((usage is not None) == bool(last and each) for usage in usages)
    return chunks


def _choices(count: int, chunks: list[Json]) -> list[list[Json]]:
    """The entries of each choice; its last alone has a finish reason."""
    entries = [entry for chunk in chunks for entry in chunk["choices"]]
    found = [[e for e in entries if e["index"] == index] for index in range(count)]
    assert sum(map(len, found)) == len(entries)
    for own in found:
        assert [e["finish_reason"] is not None for e in own] == [False] * (len(own) - 1) + [True]
    return found


# ---- responses ----


def _response(asked: Json, value: Json) -> None:
    typed(responses.Response, value)
    assert value["status"] in ("completed", "incomplete")
    if asked.get("tool_choice") not in (None, "auto", "none") and value["status"] == "completed":
        assert "function_call" in [item["type"] for item in value["output"]]


def _response_stream(asked: Json, events: Events) -> None:
    for name, data in events:
        assert data is not None and data["type"] == name
        typed(responses.ResponseStreamEvent, data)
    numbers = [data["sequence_number"] for _, data in events if data]
    assert numbers == list(range(len(events)))
    assert events[0][0] == "response.created"
    assert events[-1][0] in ("response.completed", "response.incomplete")
    _response(asked, events[-1][1]["response"])


# ---- messages ----


def _message(asked: Json, value: Json) -> None:
    typed(anthropic.Message, value)
    called = "tool_use" in [block["type"] for block in value["content"]]
    if value["stop_reason"] != "max_tokens":
        assert called == (value["stop_reason"] == "tool_use")
        if (asked.get("tool_choice") or {}).get("type") in ("any", "tool"):
            assert called


def _message_stream(asked: Json, events: Events) -> None:
    for name, data in events:
        assert data is not None and data["type"] == name
        if name != "ping":
            typed(anthropic.RawMessageStreamEvent, data)
    names = [name for name, _ in events]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    assert names.count("content_block_start") == names.count("content_block_stop")
    assert events[-2][1]["delta"]["stop_reason"]


# ---- the native route, and what tells about the server ----


def _generated(asked: Json, value: Any) -> None:
    one = value if isinstance(value, dict) else value[0]
    assert isinstance(one["text"], str)
    meta, params = one["meta_info"], asked["sampling_params"]
    assert meta["prompt_tokens"] > 0
    if params.get("ignore_eos"):
        assert meta["completion_tokens"] == params["max_new_tokens"]


def _generate_stream(asked: Json, events: Events) -> None:
    assert events[-1] == (None, None)
    values = [data for _, data in events[:-1]]
    _generated(asked, values[-1])
    counts = [value["meta_info"]["completion_tokens"] for value in values]
    assert counts == sorted(counts)
    for before, after in pairwise(values):
        assert after["text"].startswith(before["text"])  # all so far, not what is new


def _has(*names: str) -> Any:
    def look(asked: Json, value: Json) -> None:
        assert set(names) <= value.keys()

    return look


_STREAMS = {
    "/v1/chat/completions": _chat_stream,
    "/v1/completions": _completion_stream,
    "/v1/responses": _response_stream,
    "/v1/messages": _message_stream,
    "/generate": _generate_stream,
}
_WHOLE = (
    ("POST", "/v1/chat/completions", _chat),
    ("POST", "/v1/completions", _completion),
    ("POST", "/v1/responses", _response),
    ("GET", "/v1/responses/[^/]+", _response),
    ("DELETE", "/v1/responses/[^/]+", _has("id", "deleted")),
    ("POST", "/v1/messages", _message),
    ("POST", "/v1/messages/count_tokens", _has("input_tokens")),
    ("GET", "/v1/models", _has("data", "object", "first_id", "has_more")),
    ("GET", "/v1/models/[^/]+", _has("id", "object", "created", "type", "display_name")),
    ("POST", "/generate", _generated),
    ("POST", "/tokenize", _has("tokens", "count")),
    ("POST", "/detokenize", _has("prompt")),
    ("GET", "/tokenizer_info", _has("eos_token", "bos_token", "chat_template")),
    ("GET", "/model_info", _has("model_path", "tokenizer_path")),
    ("GET", "/(get_)?server_info", _has("version")),
    ("GET", "/health", _has("status")),
    ("POST", "/flush_cache", _has("pages_freed")),
)
