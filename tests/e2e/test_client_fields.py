"""Clients send every field that they know: what asks for nothing is accepted on every route."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import httpx
import pytest
from anthropic.types import (
    message_count_tokens_params,
    message_create_params,
)
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_create_params
from served import serving

from peer_fields import SGLANG, SGLANG_SAMPLING, VLLM

SAID = [{"role": "user", "content": "1 + 1 = ?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 1},
    "/v1/completions": {"prompt": "1", "max_tokens": 1},
    "/v1/responses": {"input": "1 + 1 = ?", "max_output_tokens": 1},
    "/v1/responses/input_tokens": {"input": "1 + 1 = ?"},
    "/v1/messages": {"messages": SAID, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": SAID},
    "/generate": {"text": "1", "sampling_params": {"max_new_tokens": 1}},
    "/tokenize": {"prompt": "1"},
}
REQUESTS = {
    "/v1/chat/completions": [chat_create_params.CompletionCreateParamsNonStreaming],
    "/v1/completions": [completion_create_params.CompletionCreateParamsNonStreaming],
    "/v1/responses": [response_create_params.ResponseCreateParamsNonStreaming],
    "/v1/responses/input_tokens": [input_token_count_params.InputTokenCountParams],
    "/v1/messages": [
        message_create_params.MessageCreateParamsNonStreaming,
        beta_create_params.MessageCreateParamsNonStreaming,
    ],
    "/v1/messages/count_tokens": [
        message_count_tokens_params.MessageCountTokensParams,
        beta_count_tokens_params.MessageCountTokensParams,
    ],
}
NEEDED = {"input"}  # unless a stored prompt stands in for it
# What the protocols' documents name as defaults, beside null and false.
DEFAULTS: dict[str, list[Any]] = {
    "frequency_penalty": [0, 0.0],
    "logit_bias": [{}],
    "n": [1],
    "presence_penalty": [0],
    "temperature": [1, 1.0],
    "top_p": [1],
    "best_of": [1],
    "top_logprobs": [0],
    "parallel_tool_calls": [True],
    "tool_choice": ["auto", "none"],
    "function_call": ["none", "auto"],
    "response_format": [{"type": "text"}],
    "modalities": [["text"]],
    "truncation": ["disabled"],
    "service_tier": ["auto"],
    "store": [True],
    "verbosity": ["medium"],
    "metadata": [{}],
    "suffix": [""],
    "text": [{"format": {"type": "text"}}, {}],
    "reasoning": [{}, {"effort": None, "summary": None}],
    "thinking": [{"type": "disabled"}],
    "stream_options": [{}, {"include_usage": False, "include_obfuscation": False}],
    "context_management": [{}, {"edits": []}],
}


@pytest.fixture(scope="module")
def http():
    with (
        serving("demo", "--context-length", "512", "--threads", "1") as server,
        httpx.Client(base_url=server.wait_url(), timeout=60) as client,
    ):
        yield client


def accepted(http, path: str, tries: Iterable[tuple[str, dict[str, Any]]]) -> int:
    refused, count = [], 0
    for what, body in tries:
        answer = http.post(path, json=body)
        count += 1
        if answer.status_code != 200:
            refused.append((what, answer.text))
    assert not refused
    return count


def options(hint: Any) -> Iterator[Any]:
    """The types that a hint allows, whatever they are wrapped in."""
    if get_origin(hint) in (Union, types.UnionType):
        for one in get_args(hint):
            yield from options(one)
    elif get_origin(hint) in (Annotated, Required, NotRequired):
        yield from options(get_args(hint)[0])
    else:
        yield hint


def optional(kind: Any) -> dict[str, list[Any]]:
    """The fields of a TypedDict that may be left out, each with the types of its values."""
    hints = get_type_hints(kind, include_extras=True)
    free = NotRequired if kind.__total__ else None
    return {
        name: [*options(hint)]
        for name, hint in hints.items()
        if get_origin(hint) is not Required and (free is None or get_origin(hint) is free)
    }


def nothings(name: str, kinds: Sequence[Any], anthropic: bool) -> list[Any]:
    """What a field of these types may say that asks for nothing."""
    out: list[Any] = [None]
    if bool in kinds:
        out.append(False)
    if any(get_origin(kind) in (list, Iterable, Sequence) for kind in kinds):
        out.append([])
    known = [] if anthropic and name == "tool_choice" else DEFAULTS.get(name, [])
    return out + [value for value in known if _fits(value, kinds)]


def _fits(value: Any, kinds: Sequence[Any]) -> bool:
    """Whether a default may stand for a field that protocols give several types."""
    has_object = any(is_typeddict(k) or get_origin(k) in (dict, Mapping) for k in kinds)
    return has_object or not isinstance(value, dict)


@pytest.mark.parametrize("path", REQUESTS)
def test_fields_of_the_clients_own_types(http, path):
    tries = [
        (f"{name} = {value!r}", BODIES[path] | {name: value})
        for kind in REQUESTS[path]
        for name, kinds in optional(kind).items()
        if name not in NEEDED
        for value in nothings(name, kinds, "messages" in path)
    ]
    assert accepted(http, path, tries) > 10


@pytest.mark.parametrize("path", sorted(VLLM.keys() | SGLANG.keys()))
def test_fields_of_other_servers(http, path):
    tries = [
        (f"{name} = {value!r}", BODIES[path] | {name: value})
        for fields in (VLLM.get(path, {}), SGLANG.get(path, {}))
        for name, default in fields.items()
        for value in {repr(v): v for v in (default, None)}.values()
        if (name, value) != ("sampling_params", None)
    ]
    assert accepted(http, path, tries) > 3


def test_sampling_params_of_the_native_route(http):
    for fields in ([{name: v} for name, v in SGLANG_SAMPLING.items()], [SGLANG_SAMPLING]):
        for own in fields:
            nulls = dict.fromkeys(own)
            for given in (own, nulls):
                params = {**given, "max_new_tokens": 1}
                tries = [(str(given), {"text": "1", "sampling_params": params})]
                assert accepted(http, "/generate", tries) == 1


@pytest.mark.parametrize("path", BODIES)
def test_all_of_them_on_every_route_at_once(http, path):
    """Nulls of every field that any client or server knows, none of which this route needs."""
    names = {name for kinds in REQUESTS.values() for kind in kinds for name in optional(kind)}
    names |= {name for table in (VLLM, SGLANG) for fields in table.values() for name in fields}
    nulls = dict.fromkeys(names | SGLANG_SAMPLING.keys())
    assert accepted(http, path, [("all", nulls | BODIES[path])]) == 1
    # What is their default somewhere, on routes that have no such field.
    table = {**VLLM["/v1/chat/completions"], **SGLANG["/v1/chat/completions"]}
    only = {"tool_choice", "max_tokens", "n", "stop", "prompt"}
    tries = [
        (f"{name} = {value!r}", BODIES[path] | {name: value})
        for name, value in table.items()
        if name not in only
    ]
    assert accepted(http, path, tries) > 50


TOOL = {"type": "object", "properties": {}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def nested() -> Iterator[tuple[str, str, Any, Any]]:
    """(path, what, the type of a part, the body with a part)."""
    from anthropic import types as a
    from openai.types import chat, responses, shared_params

    def chatting(message):
        return lambda part: {"messages": [*SAID, message | part, *SAID], "max_tokens": 1}

    for role, kind in (
        ("user", chat.ChatCompletionUserMessageParam),
        ("system", chat.ChatCompletionSystemMessageParam),
        ("assistant", chat.ChatCompletionAssistantMessageParam),
    ):
        said = {"role": role, "content": "x"}
        yield "/v1/chat/completions", role, kind, chatting(said)
    text = {"type": "text", "text": "x"}
    yield (
        "/v1/chat/completions",
        "text",
        chat.ChatCompletionContentPartTextParam,
        lambda part: {
            "messages": [{"role": "user", "content": [text | part]}],
            "max_tokens": 1,
        },
    )
    yield (
        "/v1/chat/completions",
        "function",
        shared_params.FunctionDefinition,
        lambda part: (
            BODIES["/v1/chat/completions"]
            | {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": TOOL} | part}
                ]
            }
        ),
    )
    yield (
        "/v1/chat/completions",
        "stream_options",
        chat.ChatCompletionStreamOptionsParam,
        lambda part: BODIES["/v1/chat/completions"] | {"stream": True, "stream_options": part},
    )
    for name, kind in (
        ("reasoning", shared_params.Reasoning),
        ("text", responses.ResponseTextConfigParam),
    ):
        yield (
            "/v1/responses",
            name,
            kind,
            lambda part, name=name: BODIES["/v1/responses"] | {name: part},
        )
    own = {"type": "function", "name": "f", "parameters": TOOL, "strict": False}
    yield (
        "/v1/responses",
        "tool",
        responses.FunctionToolParam,
        lambda part: BODIES["/v1/responses"] | {"tools": [own | part]},
    )

    def items(item):
        return lambda part: {
            "input": [*SAID, item | part, {"role": "user", "content": "1"}],
            "max_output_tokens": 1,
        }

    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    yield "/v1/responses", "call", responses.ResponseFunctionToolCallParam, items(called)
    thought = {"type": "reasoning", "id": "r", "summary": []}
    yield "/v1/responses", "reasoning item", responses.ResponseReasoningItemParam, items(thought)

    def blocks(role, block, *before):
        return lambda part: {
            "messages": [*SAID, *before, {"role": role, "content": [block | part]}, *SAID],
            "max_tokens": 1,
        }

    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    yield "/v1/messages", "text block", a.TextBlockParam, blocks("user", text)
    yield "/v1/messages", "tool use", a.ToolUseBlockParam, blocks("assistant", use)
    result = {"type": "tool_result", "tool_use_id": "c", "content": "2"}
    asked = {"role": "assistant", "content": [use]}
    yield "/v1/messages", "result", a.ToolResultBlockParam, blocks("user", result, asked)
    base = BODIES["/v1/messages"]
    for name, kind, least in (
        ("output_config", a.beta.BetaOutputConfigParam, {}),
        ("thinking", a.beta.BetaThinkingConfigEnabledParam, {"type": "enabled"}),
        ("tool_choice", a.ToolChoiceAutoParam, {"type": "auto"}),
        ("context_management", a.beta.BetaContextManagementConfigParam, {}),
    ):
        yield (
            "/v1/messages",
            name,
            kind,
            lambda part, name=name, least=least: base | {name: least | part},
        )
    tool = {"name": "f", "input_schema": TOOL}
    for kind in (a.ToolParam, a.beta.BetaToolParam):
        yield (
            "/v1/messages",
            "tool",
            kind,
            lambda part: base | {"tools": [tool | part]},
        )


def test_parts_of_requests(http):
    count = 0
    for path, what, kind, body in nested():
        tries = [
            (f"{what}.{name} = {value!r}", body({name: value}))
            for name, kinds in optional(kind).items()
            for value in ([None, False] if bool in kinds else [None])
        ]
        count += accepted(http, path, tries)
    assert count > 50


def test_what_would_change_the_answer_is_refused(http):
    for path, field, value, said in (
        ("/v1/chat/completions", "use_beam_search", True, "leave it out or send false"),
        ("/v1/chat/completions", "bad_words", ["x"], "leave it out"),
        ("/v1/completions", "skip_special_tokens_", True, "did you mean 'skip_special_tokens'?"),
        ("/v1/completions", "max_new_tokens", 5, "did you mean 'max_tokens'?"),
        ("/v1/responses", "skip_special_tokens", False, "leave it out or send true"),
        ("/v1/messages", "n", 2, "leave it out or send 1"),
        ("/v1/messages", "mcp_servers", [{"url": "x"}], "leave it out"),
        ("/generate", "image_data", "http://x/y.png", "leave it out"),
        ("/generate", "colour", "red", "remove it"),
    ):
        answer = http.post(path, json=BODIES[path] | {field: value})
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and field in message and said in message, message
        assert ("did you mean" in message) == ("did you mean" in said), message
        if path != "/v1/messages":
            assert answer.json()["error"]["param"] == field
