"""Reasoning and tool calls through the chat endpoint, as the `openai` client sees them."""

from __future__ import annotations

import json

import pytest
from server_harness import serving

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
CALLS = CALL.format('{"city": "Rome"}', "") + "<｜tool▁calls▁end｜>"


def ask(client, text, **kwargs):
    messages = [{"role": "user", "content": f"[say {text}]"}]
    return client.chat.completions.create(model="fake", messages=messages, **kwargs)


def test_reasoning_has_both_names(client):
    answer = ask(client, "<think>two and two</think>4")
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("4", "two and two")
    assert message.reasoning == message.reasoning_content
    assert answer.choices[0].finish_reason == "stop" and message.tool_calls is None
    details = answer.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens < answer.usage.completion_tokens


def test_streamed_reasoning(client):
    deltas = [c.choices[0].delta for c in ask(client, "<think>two</think>4", stream=True)]
    thought = [d.reasoning_content for d in deltas if getattr(d, "reasoning_content", None)]
    assert "".join(thought) == "two" and len(thought) > 1
    assert thought == [d.reasoning for d in deltas if getattr(d, "reasoning", None)]
    assert "".join(d.content or "" for d in deltas) == "4"


def test_reasoning_on_request(client):
    text = "<think>two</think>4"
    message = ask(client, text, extra_body={"separate_reasoning": False}).choices[0].message
    assert message.content == text and not hasattr(message, "reasoning_content")
    chunks = ask(client, text, stream=True, extra_body={"stream_reasoning": False})
    deltas = [c.choices[0].delta for c in chunks]
    thought = [d.reasoning_content for d in deltas if getattr(d, "reasoning_content", None)]
    assert thought == ["two"] and "".join(d.content or "" for d in deltas) == "4"
    said = [bool(d.content) for d in deltas if d.content or getattr(d, "reasoning_content", None)]
    assert said == sorted(said)  # first what it thought


def test_tool_calls(client):
    choice = ask(client, "Let me see." + CALLS, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.id.startswith("call_")
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Rome"}


def test_streamed_tool_calls(client):
    two = CALL.format('{"city": "Rome"}', "") + CALLS.removeprefix("<｜tool▁calls▁begin｜>")
    chunks = list(ask(client, two, tools=TOOLS, stream=True))
    parts = [t for c in chunks for t in c.choices[0].delta.tool_calls or []]
    for index in (0, 1):
        own = [p for p in parts if p.index == index]
        assert [p.function.name for p in own if p.function.name] == ["get_weather"]
        assert own[0].id and own[0].type == "function" and own[0].function.arguments == ""
        assert not any(p.id or p.type or p.function.name for p in own[1:])
        text = "".join(p.function.arguments or "" for p in own)
        assert json.loads(text) == {"city": "Rome"} and len(own) > 3
    assert len({p.id for p in parts if p.id}) == 2
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not any(c.choices[0].delta.content for c in chunks)


def test_each_choice_has_a_parser_of_its_own(client):
    answer = ask(client, CALLS, tools=TOOLS, n=2)
    calls = [c.message.tool_calls for c in answer.choices]
    assert [len(c) for c in calls] == [1, 1] and calls[0][0].id != calls[1][0].id
    assert all(c.finish_reason == "tool_calls" for c in answer.choices)


def test_a_cut_call_ends_where_the_text_did(client, parsing):
    limit = len(parsing.tokenizer.encode(CALLS[: CALLS.index("me")]))
    whole = ask(client, CALLS, tools=TOOLS, max_tokens=limit).choices[0]
    assert whole.finish_reason == "length"
    (call,) = whole.message.tool_calls
    chunks = list(ask(client, CALLS, tools=TOOLS, max_tokens=limit, stream=True))
    streamed = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
    assert call.function.name == streamed[0].function.name == "get_weather"
    assert (
        call.function.arguments == "".join(c.function.arguments for c in streamed) == '{"city": "Ro'
    )
    before = ask(client, CALLS, tools=TOOLS, max_tokens=3).choices[0]
    assert (before.finish_reason, before.message.tool_calls) == ("length", None)


def test_calls_stay_text_without_tools(client):
    assert ask(client, CALLS).choices[0].message.content == CALLS


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_were_forbidden_vanish(client, stream):
    more = {"tools": TOOLS, "tool_choice": "none", "stream": stream}
    for said, told in (
        (CALLS, ""),
        ("so " + CALLS + "on", "so on"),
        (CALLS.removeprefix("<｜tool▁calls▁begin｜>"), ""),
    ):
        answer = ask(client, said, **more)
        if stream:
            choices = [c.choices[0] for c in answer]
            content = "".join(c.delta.content or "" for c in choices)
            calls, end = [c for c in choices if c.delta.tool_calls], choices[-1].finish_reason
        else:
            (choice,) = answer.choices
            content, calls, end = choice.message.content, choice.message.tool_calls, "stop"
            assert choice.finish_reason == "stop"
        assert not calls and end == "stop" and "｜" not in content and content.strip() == told, said


def test_one_call_where_several_are_not_wanted(client):
    two = CALL.format('{"city": "Rome"}', "") + CALLS.removeprefix("<｜tool▁calls▁begin｜>")
    choice = ask(client, two, tools=TOOLS, parallel_tool_calls=False).choices[0]
    assert len(choice.message.tool_calls) == 1 and choice.finish_reason == "tool_calls"


USER = {"role": "user", "content": "[say ok]"}


def called(*ids, **more):
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": i, "type": "function", "function": function} for i in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls} | more


@pytest.mark.parametrize(
    "messages, param",
    [
        ([{"role": "tool", "content": "x"}], "messages[1]"),
        (
            [called("a"), {"role": "tool", "tool_call_id": "b", "content": "x"}],
            "messages[2].tool_call_id",
        ),
        ([called("a") | {"role": "user"}], "messages[1].tool_calls"),
        ([called("a") | {"tool_calls": "f"}], "messages[1].tool_calls"),
        ([called("a") | {"tool_calls": [1]}], "messages[1].tool_calls[0].function"),
        (
            [called("a") | {"tool_calls": [{"function": {"name": "f", "arguments": 1}}]}],
            "messages[1].tool_calls[0].function.arguments",
        ),
        ([{"role": "assistant", "content": "", "reasoning": 1}], "messages[1].reasoning"),
        ([called(3)], "messages[1].tool_calls[0].id"),
        (
            [called("a"), {"role": "tool", "tool_call_id": 3, "content": "x"}],
            "messages[2].tool_call_id",
        ),
        (
            [called("a", "b"), *[{"role": "tool", "tool_call_id": "a", "content": "x"}] * 2],
            "messages[3].tool_call_id",
        ),
    ],
)
def test_bad_history(parsing, messages, param):
    answer = parsing.post("/v1/chat/completions", messages=[USER, *messages, USER])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["message"].startswith(param)


def test_results_come_in_the_order_of_their_calls(parsing):
    results = [{"role": "tool", "tool_call_id": i, "content": f"result {i}"} for i in "ba"]
    parsing.post("/v1/chat/completions", messages=[USER, called("a", "b"), *results, USER])
    prompt = parsing.tokenizer.decode(parsing.engine.submits[-1].prompt, skip_special=False)
    assert prompt.index("result a") < prompt.index("result b")


@pytest.mark.parametrize(
    "extra",
    [
        {"chat_template_kwargs": {"thinking": True}},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"thinking": {"type": "enabled"}},
    ],
)
def test_thinking_by_any_name_reaches_the_template(bpe_folder, tmp_path, extra):
    source = "{{ messages[0].content }}{{ thinking }}{{ enable_thinking }}"
    folder = tmp_path / "model"
    folder.mkdir()
    for file in bpe_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text(source)
    with serving(folder) as served:
        served.chat("[say ok]", **extra)
        prompt = served.tokenizer.decode(served.engine.submits[-1].prompt)
    assert prompt == "[say ok]TrueTrue"


@pytest.mark.parametrize("strip", [False, True])
def test_the_engine_knows_where_reasoning_begins_when_it_is_to_be_stripped(bpe_folder, strip):
    with serving(bpe_folder, strip_thinking_cache=strip) as served:
        served.chat("[say ok]", n=2)
        expected = served.tokenizer.token_id("<think>") if strip else None
        assert [s.think_id for s in served.engine.submits] == [expected] * 2
    assert served.tokenizer.token_bytes(served.tokenizer.token_id("<think>")) == b"<think>"


def test_the_client_s_own_accumulation(client):
    messages = [{"role": "user", "content": "[say <think>two</think>Let me see." + CALLS + "]"}]
    with client.chat.completions.stream(
        model="fake", messages=messages, tools=TOOLS, stream_options={"include_usage": True}
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "tool_calls.function.arguments.done"} <= kinds
    (call,) = final.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    assert final.choices[0].message.content == "Let me see." and final.usage.total_tokens > 0


@pytest.mark.parametrize(
    "asked, reasoning",
    [
        ({}, "optional"),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"chat_template_kwargs": {"thinking": False}}, "none"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "none"),
        ({"chat_template_kwargs": {"thinking": True}}, "open"),
        ({"separate_reasoning": False}, "none"),
    ],
)
def test_ruled_output_begins_with_reasoning_unless_that_is_switched_off(parsing, asked, reasoning):
    wished = asked | {"response_format": {"type": "json_object"}}
    assert parsing.post("/v1/chat/completions", messages=[USER], **wished).status_code == 200
    assert parsing.engine.submits[-1].params.rules.reasoning == reasoning
