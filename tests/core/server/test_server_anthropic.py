"""The `anthropic` client as it comes, against /v1/messages."""

from __future__ import annotations

import anthropic
import pytest
from pydantic import BaseModel
from server_harness import serving

from ds_runtime.server.protocols.store import Shelf
from ds_runtime.text.parsers.registry import Parsers

CALL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
CALLS = CALL.format('{"city": "Rome"}') + "<｜tool▁calls▁end｜>"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
THINKING = {"type": "enabled", "budget_tokens": 1024}
TOOLS = [{"name": "get_weather", "description": "Weather.", "input_schema": SCHEMA}]


@pytest.fixture(scope="module")
def parsing(bpe_folder):
    parsers = Parsers("deepseek-v3", "deepseekv31")
    with serving(bpe_folder, parsers=parsers, api_key=("secret",)) as one:
        yield one


@pytest.fixture
def client(parsing):
    with anthropic.Anthropic(base_url=parsing.url, api_key="secret", max_retries=0) as one:
        yield one


def ask(client, content, create=None, **kwargs):
    messages = [*kwargs.pop("messages", []), {"role": "user", "content": content}]
    create = create or client.messages.create
    return create(
        model="fake", max_tokens=kwargs.pop("max_tokens", 200), messages=messages, **kwargs
    )


def prompt(parsing):
    return parsing.tokenizer.decode(parsing.engine.submits[-1].prompt, skip_special=False)


def test_a_message(client, parsing):
    answer = ask(
        client,
        "[say Hello 你好]",
        system=[{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        max_tokens=99,
        metadata={"user_id": "me"},
        extra_body={"temperature": 0.5, "top_k": 7, "top_p": 0.9},
    )
    assert (answer.type, answer.role, answer.stop_reason) == ("message", "assistant", "end_turn")
    assert answer.content[0].text == "Hello 你好" and answer.id.startswith("msg-")
    assert prompt(parsing).startswith("<｜begin▁of▁sentence｜>Be kind.<｜User｜>[say Hello")
    submit = parsing.engine.submits[-1]
    params = submit.params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (99, 0.5, 7, 0.9)
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(submit.prompt)
    assert usage.cache_read_input_tokens == 4 and usage.output_tokens > 1


def test_thinking_text_and_tools(client):
    order = "[say <think>two</think>Let me see." + CALLS + "]"
    answer = ask(client, order, tools=TOOLS, thinking=THINKING)
    thinking, text, call = answer.content
    assert (thinking.type, thinking.thinking) == ("thinking", "two")
    assert (text.type, text.text) == ("text", "Let me see.")
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Rome"})
    assert answer.stop_reason == "tool_use"


def test_stream(client):
    order = "[say <think>two</think>Let me see." + CALLS + "]"
    with ask(client, order, client.messages.stream, tools=TOOLS, thinking=THINKING) as stream:
        events = list(stream)
        final = stream.get_final_message()
    kinds = [e.type for e in events]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert [b.type for b in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].input == {"city": "Rome"} and final.stop_reason == "tool_use"
    deltas = [e.delta for e in events if e.type == "content_block_delta"]
    assert "".join(d.thinking for d in deltas if d.type == "thinking_delta") == "two"
    assert "".join(d.text for d in deltas if d.type == "text_delta") == "Let me see."
    said = "".join(d.partial_json for d in deltas if d.type == "input_json_delta")
    assert said == '{"city": "Rome"}'
    assert [e.index for e in events if e.type == "content_block_start"] == [0, 1, 2]
    assert final.usage.output_tokens > 5


def test_text_stream(client):
    with ask(client, "[say The quick brown 👍🏽 fox]", client.messages.stream) as stream:
        assert "".join(stream.text_stream) == "The quick brown 👍🏽 fox"


def test_the_tool_runner_s_second_turn(client, parsing):
    first = ask(client, "[say Well." + CALLS + "]", tools=TOOLS)
    call = first.content[-1]
    block = {"type": "tool_result", "tool_use_id": call.id}
    result = block | {"content": [{"type": "text", "text": "20"}]}
    history = [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": first.content},
    ]
    content = [result, {"type": "text", "text": "[say warm]"}]
    second = ask(client, content, messages=history, tools=TOOLS)
    assert second.content[0].text == "warm" and second.stop_reason == "end_turn"
    wanted = 'Well.[call] get_weather {"city": "Rome"}<｜end▁of▁sentence｜>[result] 20<｜User｜>'
    assert wanted in prompt(parsing)


def test_an_answer_that_is_begun_goes_on(client, parsing):
    messages = [{"role": "user", "content": "[say x]"}, {"role": "assistant", "content": "It is"}]
    answer = client.messages.create(model="fake", max_tokens=9, messages=messages)
    assert prompt(parsing).endswith("<｜Assistant｜>It is") and answer.content[0].text == "x"


@pytest.mark.parametrize(
    "order, extra, reason, sequence",
    [
        ("[go abc]", {"max_tokens": 5}, "max_tokens", None),
        ("[go one STOP two]", {"stop_sequences": ["STOP"]}, "stop_sequence", "STOP"),
        ("[say ok]", {}, "end_turn", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_why_it_stops(client, order, extra, reason, sequence, stream):
    if stream:
        with ask(client, order, client.messages.stream, **extra) as events:
            answer = events.get_final_message()
    else:
        answer = ask(client, order, **extra)
    assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)


def test_count_tokens(client, parsing):
    content = "[say ok]"
    counted = client.messages.count_tokens(
        model="fake",
        messages=[{"role": "user", "content": content}],
        system="Be kind.",
        tools=TOOLS,
    )
    ask(client, content, system="Be kind.", tools=TOOLS)
    assert counted.input_tokens == len(parsing.engine.submits[-1].prompt)


def test_thinking_reaches_the_template(client, parsing):
    ask(client, "[say ok]", thinking={"type": "enabled", "budget_tokens": 1024})
    assert prompt(parsing).endswith("<think>")
    ask(client, "[say ok]", thinking={"type": "disabled"})
    assert prompt(parsing).endswith("<｜Assistant｜>")


def test_errors_are_the_client_s(client, parsing):
    with pytest.raises(anthropic.AuthenticationError, match="API key is missing or wrong"):
        ask(client.with_options(api_key="wrong"), "[say x]")
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        client.messages.create(
            model="claude", max_tokens=9, messages=[{"role": "user", "content": "x"}]
        )
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, "[say x]", extra_body={"temperature": 1000})
    body = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert "temperature is 1000" in body["error"]["message"]
    with pytest.raises(anthropic.APIStatusError) as caught:
        ask(client, "[full]")
    assert caught.value.body["error"]["type"] == "overloaded_error"


def test_an_error_inside_a_stream(bpe_folder):
    with (
        serving(bpe_folder) as served,
        anthropic.Anthropic(base_url=served.url, api_key="x", max_retries=0) as client,
        pytest.raises(anthropic.APIStatusError, match="signal 9"),
    ):
        list(ask(client, "[die abcdef]", stream=True))


def body(*messages, **more):
    return {"max_tokens": 9, "messages": list(messages)} | more


USER = {"role": "user", "content": "[say x]"}
RESULT = {"type": "tool_result", "tool_use_id": "x"}
CALLED = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
BEGUN = [USER, {"role": "assistant", "content": [CALLED]}]
BAD = [
    ({"messages": [USER]}, "max_tokens is missing"),
    (body(), "messages is []"),
    (body(3), "messages[0]"),
    (body({"role": "robot", "content": "x"}), "messages[0].role is 'robot'"),
    (body({"role": "user", "content": None}), "messages[0].content is missing"),
    (body({"role": "user", "content": [{"type": "image"}]}), "messages[0].content[0].type"),
    (body({"role": "user", "content": [RESULT]}), "messages[0].content[0] is a tool result"),
    (
        body({"role": "user", "content": [{"type": "text"}]}),
        "messages[0].content[0].text is missing",
    ),
    (
        body(USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "1"}]}),
        "messages[1].content[0].name",
    ),
    (body(USER, system=3), "system is 3"),
    (body(USER, max_tokens=0), "max_tokens is 0"),
    (body(USER | {"content": "word " * 3000}), "the context holds 4096"),
    (body(USER, top_k=-5), "top_k is -5"),
    (body(USER, stop_sequences=[""]), "stop_sequences holds an empty string"),
    (body(USER, tools=[{"name": "f"}]), "tools[0].input_schema is missing"),
    (body(USER, tools=[{"type": "bash_20250124", "name": "bash"}]), "tools[0].type"),
    (body(USER, tool_choice={"type": "some"}), "tool_choice.type is 'some'"),
    (body(USER, thinking={"type": "on"}), "thinking.type is 'on'"),
    (body(USER, output_config={"size": 1}), "output_config.size is 1"),
    (body(USER, mcp_servers=[{}]), "mcp_servers"),
    (body(USER, max_token=3), "did you mean 'max_tokens'?"),
]


@pytest.mark.parametrize("bad, said", BAD, ids=range(len(BAD)))
def test_bad_requests(parsing, bad, said):
    answer = parsing.http.post("/v1/messages", json=bad, headers={"x-api-key": "secret"})
    assert answer.status_code == 400, answer.text
    found = answer.json()
    assert set(found) == {"type", "error"} and found["error"]["type"] == "invalid_request_error"
    assert said in found["error"]["message"]


def test_structured_output_is_asked_for_by_its_own_name(client):
    class Answer(BaseModel):
        total: int

    messages = [{"role": "user", "content": '[say {"total": 4}]'}]
    answer = client.messages.parse(
        model="fake", max_tokens=50, messages=messages, output_format=Answer
    )
    assert answer.parsed_output == Answer(total=4)


@anthropic.beta_tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"[say sunny in {city}]"


def run_tools(client, **kwargs):
    call = CALL.format('{"city": "Rome"}') + "<｜tool▁calls▁end｜>"
    return client.beta.messages.tool_runner(
        model="fake",
        max_tokens=200,
        tools=[get_weather],
        messages=[{"role": "user", "content": "[say Well." + call + "]"}],
        **kwargs,
    )


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner_goes_on_from_what_the_server_keeps(client, parsing, stream):
    before = len(parsing.engine.submits)
    runner = run_tools(client, system="Be kind.", stream=stream)
    final = runner.until_done()
    assert final.content[0].text == "sunny in Rome"
    submits = parsing.engine.submits[before:]
    assert len(submits) == 2  # one a turn: no turn was sent again
    assert "Be kind." in prompt(parsing) and '[call] get_weather {"city": "Rome"}' in prompt(
        parsing
    )


def test_a_thread_goes_on_in_two_ways(client, parsing):
    def turn(text, thread, **more):
        messages = [{"role": "user", "content": text}]
        return client.beta.messages.create(
            model="fake", max_tokens=99, messages=messages, thread=thread, **more
        )

    first = turn("[say one]", {"type": "create"}, system="Be kind.")
    ahead = {"type": "continue", "previous_message_id": first.id}
    left = turn("[say left]", ahead)
    assert left.content[0].text == "left"
    begun = "Be kind.<｜User｜>[say one]<｜Assistant｜></think>one"
    assert begun in prompt(parsing) or begun.replace("</think>", "") in prompt(parsing)
    assert turn("[say right]", ahead).content[0].text == "right"
    assert "left" not in prompt(parsing)
    after = {"type": "continue", "previous_message_id": left.id}
    assert turn("[say on]", after).content[0].text == "on" and "left" in prompt(parsing)
    with pytest.raises(anthropic.BadRequestError, match="created with: leave it out"):
        turn("[say x]", ahead, system="Be rude.")
    with pytest.raises(anthropic.NotFoundError) as caught:
        turn("[say x]", {"type": "continue", "previous_message_id": "msg_gone"})
    assert caught.value.body["error"]["details"] == {"error_code": "thread_not_found"}
    for wrong in ({"type": "begin"}, {"type": "continue"}, {"type": "create", "x": 1}):
        with pytest.raises(anthropic.BadRequestError, match="thread is"):
            turn("[say x]", wrong)
    with pytest.raises(anthropic.BadRequestError, match="previous_message_id is 3"):
        turn("[say x]", {"type": "continue", "previous_message_id": 3})
    bad = [{"role": "user", "content": [{"type": "image"}]}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].type"):
        client.beta.messages.create(model="fake", max_tokens=9, messages=bad, thread=ahead)


def test_the_tool_runner_replays_a_thread_that_is_lost(client, parsing, monkeypatch):
    monkeypatch.setattr(Shelf, "history", lambda self, name: None)
    assert run_tools(client).until_done().content[0].text == "sunny in Rome"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_was_cut_says_so(client, parsing, stream):
    said = "Well." + CALL.format('{"city": "Rome and all of Lazio"}')
    order, begun = f"[say {said}]", said[: said.index(" of Lazio")]
    limit = {"max_tokens": len(parsing.tokenizer.encode(begun)), "tools": TOOLS}
    if stream:
        with ask(client, order, client.messages.stream, **limit) as events:
            deltas = [e.delta for e in events if e.type == "content_block_delta"]
            answer = events.get_final_message()
        parts = [d.partial_json for d in deltas if d.type == "input_json_delta"]
        given = {"city": "".join(parts).removeprefix('{"city": "')}
    else:
        answer = ask(client, order, **limit)
        given = answer.content[1].input
    text, call = answer.content
    assert (text.text, answer.stop_reason) == ("Well.", "max_tokens")
    assert call.name == "get_weather" and given["city"].startswith("Rome and")
    assert not given["city"].endswith("Lazio")


def test_models_are_listed(client):
    (found,) = client.models.list()
    assert (found.id, found.type, found.display_name) == ("fake", "model", "fake")
    assert found.created_at.year >= 2026


def test_a_schema_s_error_names_the_client_s_field(client):
    wrong = {"type": "json_schema", "schema": {"type": "nothing"}}
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, "[invalid]", output_config={"format": wrong | {"schema": 3}})
    assert "output_config.format.schema" in str(caught.value)
    tools = [{"name": "a b", "input_schema": SCHEMA}]
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].name is 'a b'"):
        ask(client, "[say x]", tools=tools)


def both_ways(client, order, **kwargs):
    whole = ask(client, order, **kwargs)
    with ask(client, order, client.messages.stream, **kwargs) as events:
        streamed = events.get_final_message()
    return whole, streamed


def shown(message):
    blocks = [block.model_dump(exclude={"id", "citations"}) for block in message.content]
    return blocks, message.stop_reason


@pytest.mark.parametrize(
    "text, kinds",
    [
        ("Hi. " + CALLS + " bye", ["text", "tool_use", "text"]),
        (CALLS + "between" + CALLS, ["tool_use", "text", "tool_use"]),
        ("<think>a</think>b" + CALLS + "c", ["thinking", "text", "tool_use", "text"]),
        (CALL.format("[1, 2]") + "<｜tool▁calls▁end｜>", ["tool_use"]),
        (CALL.format("plain words") + "<｜tool▁calls▁end｜>", ["tool_use"]),
    ],
)
def test_whole_and_streamed_messages_are_the_same(client, text, kinds):
    told = {"tools": TOOLS, "max_tokens": 900}
    if "thinking" in kinds:
        told["thinking"] = THINKING
    whole, streamed = both_ways(client, f"⟦say {text}⟧", **told)
    assert shown(whole) == shown(streamed)
    assert [block.type for block in whole.content] == kinds
    assert all(isinstance(b.input, dict) for b in whole.content if b.type == "tool_use")


@pytest.mark.parametrize(
    "arguments", ['{"u": "\\ud83d"}', '{"n": ' + "[" * 300 + "]" * 300 + "}", '{"n": 1e999}']
)
@pytest.mark.parametrize("thread", [None, {"type": "create"}])
def test_arguments_that_json_cannot_say_again(parsing, client, arguments, thread):
    text = CALL.format(arguments) + "<｜tool▁calls▁end｜>"
    messages = [{"role": "user", "content": f"⟦say {text}⟧"}]
    body = {"model": "fake", "max_tokens": 1300, "messages": messages, "tools": TOOLS}
    answer = parsing.http.post(
        "/v1/messages", json=body | {"thread": thread}, headers={"x-api-key": "secret"}
    )
    assert answer.status_code == 200, answer.text
    (call,) = answer.json()["content"]
    assert call["input"] == {"arguments": arguments}
    raw = parsing.http.post(
        "/v1/messages",
        json=body | {"thread": thread, "stream": True},
        headers={"x-api-key": "secret"},
    )
    assert "event: error" not in raw.text and "message_stop" in raw.text


def test_a_thread_goes_on_behind_an_answer_that_was_begun(client, parsing):
    messages = [{"role": "user", "content": "[say 3.]"}, {"role": "assistant", "content": "It is "}]
    ask_ = client.beta.messages.create
    first = ask_(model="fake", max_tokens=9, messages=messages, thread={"type": "create"})
    ahead = {"type": "continue", "previous_message_id": first.id}
    more = [{"role": "user", "content": "[say on]"}]
    assert ask_(model="fake", max_tokens=9, messages=more, thread=ahead).content[0].text == "on"
    assert "It is 3.<｜end▁of▁sentence｜><｜User｜>[say on]" in prompt(parsing)
    with pytest.raises(anthropic.BadRequestError, match=r"rid is .*draw a new one"):
        for _ in range(2):
            ask_(
                model="fake", max_tokens=9, messages=more, thread={"type": "create"},
                extra_body={"rid": "mine"},
            )  # fmt: skip


@pytest.mark.parametrize(
    "more, said",
    [
        ({"tool_choice": {"type": "tool", "name": "stop"}, "tools": TOOLS}, "no function 'stop'"),
        ({"model": "reasoning_effort"}, "model 'reasoning_effort' is not served"),
        ({"tools": [{"name": "stop it", "input_schema": {}}]}, "tools[0].name is 'stop it'"),
        ({"stop_sequences": [""]}, "stop_sequences holds an empty string"),
        ({"thinking": {"type": "enabled", "foo": 1}}, "thinking.foo is 1: only type"),
        (
            {"messages": [*BEGUN, {"role": "user", "content": [dict(RESULT, tool_use_id="b")]}]},
            "messages[2].content[0].tool_use_id is 'b'",
        ),
        ({"messages": BEGUN}, "messages: the last message must be the assistant's, with text"),
    ],
)
def test_what_the_client_wrote_is_not_renamed(parsing, more, said):
    asked = body(USER) | more
    answer = parsing.http.post("/v1/messages", json=asked, headers={"x-api-key": "secret"})
    assert answer.status_code in (400, 404)
    assert said in answer.json()["error"]["message"]


THOUGHT = "⟦say <think>two</think>Let me see." + CALLS + "⟧"


@pytest.mark.parametrize(
    "more, told",
    [
        ({}, False),
        ({"thinking": None}, False),
        ({"thinking": {}}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"output_config": {"effort": "high"}}, False),
        ({"thinking": THINKING}, True),
        ({"thinking": {"type": "adaptive"}}, True),
        ({"chat_template_kwargs": {"thinking": True}}, True),
    ],
)
def test_thinking_is_told_where_it_is_enabled(client, parsing, more, told):
    whole, streamed = both_ways(client, THOUGHT, tools=TOOLS, max_tokens=900, extra_body=more)
    assert shown(whole) == shown(streamed)
    kinds = [block.type for block in whole.content]
    assert kinds == ["thinking"] * told + ["text", "tool_use"]
    assert whole.content[-2].text == "Let me see."
    assert "<think>" in prompt(parsing) or "</think>" in prompt(parsing) or not told


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_that_was_cut_in_its_thoughts_is_empty(parsing, stream):
    order = "⟦say <think>" + "two " * 50 + "</think>x⟧"
    body = {"messages": [{"role": "user", "content": order}], "max_tokens": 20, "stream": stream}
    answer = parsing.http.post("/v1/messages", json=body, headers={"x-api-key": "secret"})
    assert answer.status_code == 200 and "two" not in answer.text, answer.text
    assert '"stop_reason":"max_tokens"' in answer.text


def test_a_limit_above_what_is_left_is_what_is_left(parsing):
    for limit in (4096, 32_000, 10**7):
        asked = body(USER, max_tokens=limit)
        answer = parsing.http.post("/v1/messages", json=asked, headers={"x-api-key": "secret"})
        assert answer.json()["content"][0]["text"] == "x"
        submit = parsing.engine.submits[-1]
        assert submit.params.max_tokens == 4096 - len(submit.prompt)


def used(count):
    """A conversation with so many tool uses and thoughts."""
    messages = [{"role": "user", "content": "Rome?"}]
    for n in range(count):
        call = {"type": "tool_use", "id": f"c{n}", "name": "get_weather", "input": {}}
        thought = {"type": "thinking", "thinking": "hm", "signature": ""}
        result = {"type": "tool_result", "tool_use_id": f"c{n}", "content": "20"}
        messages.append({"role": "assistant", "content": [thought, call]})
        messages.append({"role": "user", "content": [result]})
    return [*messages, {"role": "user", "content": "[say ok]"}]


CLEAR_USES, CLEAR_THOUGHTS = "clear_tool_uses_20250919", "clear_thinking_20251015"
FEW = {"type": "input_tokens", "value": 10}
EDITS = [  # (edits, how many tool uses there are, whether nothing is to be done)
    (None, 5, True),
    ([], 5, True),
    ([{"type": CLEAR_THOUGHTS, "keep": "all"}], 5, True),
    ([{"type": CLEAR_THOUGHTS}], 1, True),
    ([{"type": CLEAR_THOUGHTS}], 2, False),
    ([{"type": CLEAR_THOUGHTS, "keep": {"type": "thinking_turns", "value": 2}}], 2, True),
    ([{"type": CLEAR_USES}], 9, True),  # far from 100,000 tokens
    ([{"type": CLEAR_USES, "trigger": FEW}], 3, True),  # three are kept
    ([{"type": CLEAR_USES, "trigger": FEW}], 4, False),
    ([{"type": CLEAR_USES, "trigger": {"type": "tool_uses", "value": 5}}], 5, True),
    ([{"type": CLEAR_USES, "trigger": {"type": "tool_uses", "value": 4}}], 5, False),
    ([{"type": CLEAR_USES, "trigger": FEW, "exclude_tools": ["get_weather"]}], 9, True),
    ([{"type": CLEAR_USES, "trigger": FEW, "exclude_tools": ["other"]}], 9, False),
    ([{"type": CLEAR_USES, "trigger": FEW, "exclude_tools": None}], 9, False),
    ([{"type": CLEAR_USES, "trigger": FEW, "exclude_tools": "get_weather"}], 9, False),
    ([{"type": CLEAR_USES, "trigger": FEW, "keep": {"type": "tool_uses", "value": 9}}], 9, True),
    ([{"type": "compact_20260112"}], 5, True),
    ([{"type": "compact_20260112", "trigger": FEW}], 0, False),
    ([{"type": "summarise"}], 0, False),
    ([3], 0, False),
    ("x", 0, False),
    ([{"type": CLEAR_USES, "trigger": {"value": "x"}}], 4, False),
]


@pytest.mark.parametrize("edits, count, passes", EDITS, ids=range(len(EDITS)))
def test_edits_of_the_context_that_have_nothing_to_do(parsing, edits, count, passes):
    body = {"messages": used(count), "context_management": {"edits": edits}}
    for path, extra in (
        ("/v1/messages", {"max_tokens": 9}),
        ("/v1/messages", {"max_tokens": 9, "stream": True}),
        ("/v1/messages/count_tokens", {}),
    ):
        answer = parsing.http.post(path, json=body | extra, headers={"x-api-key": "secret"})
        assert answer.status_code == (200 if passes else 400), answer.text
        if not passes:
            assert "context_management.edits" in answer.json()["error"]["message"]
        elif path.endswith("count_tokens"):
            found = answer.json()
            assert found["context_management"] == {"original_input_tokens": found["input_tokens"]}
        else:
            assert '"context_management":{"applied_edits":[]}' in answer.text
