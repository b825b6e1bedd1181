"""`client.responses` of the `openai` client as it comes: create, stream, parse, retrieve."""

from __future__ import annotations

import json

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from server_harness import serving

from examples import examples

CALL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
CALLS = CALL.format('{"city": "Rome"}') + "<｜tool▁calls▁end｜>"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False}]


def say(client, text, **kwargs):
    return client.responses.create(model="fake", input=f"[say {text}]", **kwargs)


def prompt(parsing):
    return parsing.tokenizer.decode(parsing.engine.submits[-1].prompt, skip_special=False)


def test_create(client, parsing):
    answer = say(
        client, "Hello 你好", instructions="Be kind.", max_output_tokens=99, temperature=0.5
    )
    assert answer.id.startswith("resp_") and answer.status == "completed"
    assert answer.output_text == "Hello 你好"
    assert prompt(parsing).startswith("<｜begin▁of▁sentence｜>Be kind.<｜User｜>[say Hello")
    params = parsing.engine.submits[-1].params
    assert (params.max_tokens, params.temperature, params.top_p) == (99, 0.5, 0.95)
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 4
    assert usage.input_tokens_details.cache_write_tokens == 0  # clients need the name
    assert (answer.temperature, answer.tool_choice, answer.store) == (0.5, "auto", True)


def test_reasoning_and_calls_are_items(client):
    answer = say(client, "<think>two</think>Let me see." + CALLS, tools=TOOLS)
    reasoning, message, call = answer.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "two")
    assert message.content[0].text == "Let me see." == answer.output_text
    assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
    assert json.loads(call.arguments) == {"city": "Rome"} and call.call_id.startswith("call_")
    assert len({reasoning.id, message.id, call.id}) == 3
    assert answer.usage.output_tokens_details.reasoning_tokens > 0


def test_stream(client):
    text = "<think>two</think>Let me see." + CALLS
    with client.responses.stream(model="fake", input=f"[say {text}]", tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [e.type for e in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [i.type for i in final.output] == ["reasoning", "message", "function_call"]
    for kind, wanted in (
        ("response.reasoning_text.delta", "two"),
        ("response.output_text.delta", "Let me see."),
        ("response.function_call_arguments.delta", '{"city": "Rome"}'),
    ):
        deltas = [e.delta for e in events if e.type == kind]
        assert "".join(deltas) == wanted and len(deltas) > 1
    added = [e for e in events if e.type == "response.output_item.added"]
    done = [e for e in events if e.type == "response.output_item.done"]
    assert [e.output_index for e in added] == [e.output_index for e in done] == [0, 1, 2]
    assert [e.item.id for e in done] == [i.id for i in final.output]
    assert final.usage.output_tokens > 0


def test_retrieve_and_forget(client, parsing):
    answer = say(client, "one")
    again = client.responses.retrieve(answer.id)
    assert again == answer
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.retrieve(answer.id)
    assert caught.value.code == "response_not_found" and answer.id in str(caught.value)
    with client.responses.stream(model="fake", input="[say two]") as stream:
        final = stream.get_final_response()
    assert client.responses.retrieve(final.id).output_text == "two"
    unkept = say(client, "three", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_a_conversation_goes_on(client, parsing):
    first = say(client, "<think>hm</think>one" + CALLS, tools=TOOLS, instructions="Now.")
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "[say warm]"}
    second = client.responses.create(
        model="fake", input=[result], previous_response_id=first.id, tools=TOOLS
    )
    assert second.output_text == "warm"
    turn = 'one[call] get_weather {"city": "Rome"}<｜end▁of▁sentence｜>[result] [say warm]'
    assert prompt(parsing).endswith("<｜Assistant｜>" + turn)
    assert "Now." not in prompt(parsing)  # instructions count for one request
    third = client.responses.create(
        model="fake", input="[say more]", previous_response_id=second.id
    )
    assert third.output_text == "more" and "[say warm]" in prompt(parsing)
    assert third.previous_response_id == second.id


def test_items_make_one_turn(client, parsing):
    call = {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": "{}"}
    client.responses.create(
        model="fake",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Rome?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Well.", "annotations": []}],
            },
            call,
            call | {"call_id": "b"},
            {"type": "function_call_output", "call_id": "a", "output": "20"},
            {"type": "function_call_output", "call_id": "b", "output": "30"},
            {"type": None, "role": "user", "content": "[say ok]"},
        ],
        tools=TOOLS,
    )
    assert prompt(parsing).count("<｜Assistant｜>") == 2
    assert "Well.[call] get_weather {}[call] get_weather {}" in prompt(parsing)


def test_length_and_abort(client, parsing):
    answer = client.responses.create(model="fake", input="[go abc]", max_output_tokens=5)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    stream = client.responses.create(model="fake", input="[go abc]", stream=True)
    events = []
    for event in stream:
        events.append(event)
        if len(events) == 6:
            parsing.post("/abort_request", rid=events[0].response.id)
    assert events[-1].response.status == "cancelled"


def test_an_error_inside_a_stream(bpe_folder):
    with (
        serving(bpe_folder) as served,
        openai.OpenAI(base_url=served.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        stream = client.responses.create(model="fake", input="[die abcdef]", stream=True)
        last = list(stream)[-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error.code == "server_error" and "signal 9" in last.response.error.message
    (said,) = last.response.output
    assert said.status == "incomplete" and "abcdef".startswith(said.content[0].text)
    assert last.response.usage.output_tokens == 3


def test_structured_parse(client):
    class Answer(BaseModel):
        total: int

    # What the schema does to the mask is tested where grammars are: here, that the client's helper
    # is understood.
    answer = client.responses.parse(model="fake", input='[say {"total": 4}]', text_format=Answer)
    assert answer.output_parsed == Answer(total=4)


BAD = [
    ({}, "input", "missing"),
    ({"input": []}, "input", "at least 1 item"),
    ({"input": 3}, "input", "must be a string or a list"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "user, assistant"),
    ({"input": [{"role": "user", "content": 3}]}, "input[0].content", "text or a list of parts"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].type",
        "is 'input_image': models here read text alone: give input_text or",
    ),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "function_call_output"),
    (
        {"input": [{"type": "function_call_output", "call_id": "x", "output": "1"}]},
        "input[0]",
        "input[0] is a tool result, but no assistant message",
    ),
    ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0].name", "text is needed"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
    ({"input": "x", "max_output_tokens": 10**6}, "max_output_tokens", "context holds 4096"),
    ({"input": "x", "temperature": 101}, "temperature", "between"),
    ({"input": "x", "previous_response_id": "resp_x"}, "previous_response_id", "no such response"),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", "only functions"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name", "a name is needed"),
    ({"input": "x", "background": True}, "background", "leave it out or send false"),
    ({"input": "x", "conversation": "c"}, "conversation", "leave it out"),
    ({"input": "x", "reasoning": {"effort": 3}}, "reasoning.effort", "text is needed"),
    ({"input": "x", "text": {"format": "json"}}, "text.format", "an object is needed"),
    ({"input": "x", "model": "gpt"}, "model", "not served"),
    ({"input": "x", "inputs": 1}, "inputs", "did you mean 'input'?"),
    ({"input": "word " * 3000}, "input", "the prompt has"),
]


@pytest.mark.parametrize("body, param, said", BAD, ids=range(len(BAD)))
def test_bad_requests_name_the_client_s_field(parsing, body, param, said):
    answer = parsing.post("/v1/responses", **body)
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert error["param"] == param and said in error["message"], error


def test_only_who_continues_a_response_is_told_to_send_its_conversation(served):
    begun = {"model": "fake", "input": "x", "previous_response_id": "resp_x"}
    remedy = ": send the whole conversation as input"
    for reply, told in (
        (served.post("/v1/responses", **begun), True),
        (served.http.get("/v1/responses/resp_x"), False),
        (served.http.delete("/v1/responses/resp_x"), False),
    ):
        assert reply.status_code == 404 and "no such response is kept" in reply.text
        assert (remedy in reply.text) is told, reply.text


def test_a_kept_response_comes_as_a_stream(client):
    text = "<think>two</think>Let me see." + CALLS
    answer = say(client, text, tools=TOOLS)
    events = list(client.responses.retrieve(answer.id, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type.removeprefix("response.") for e in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert events[0].response.output == [] and events[0].response.status == "in_progress"
    assert kinds[-1] == "completed" and events[-1].response == answer
    done = [e.item for e in events if e.type == "response.output_item.done"]
    assert done == answer.output
    said = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert said == ["Let me see."]
    rest = list(client.responses.retrieve(answer.id, stream=True, starting_after=4))
    assert rest == events[5:]
    for query in ({"stream": "yes"}, {"stream": "true", "starting_after": "x"}):
        with pytest.raises(openai.BadRequestError, match=r"stream is|starting_after is"):
            client.responses.retrieve(answer.id, extra_query=query)


def test_input_is_counted(client, parsing):
    answer = say(client, "one", instructions="Be kind.", tools=TOOLS)
    counted = client.responses.input_tokens.count(
        model="fake", input="[say one]", instructions="Be kind.", tools=TOOLS
    )
    assert counted.input_tokens == answer.usage.input_tokens
    more = client.responses.input_tokens.count(
        model="fake", input="[say two]", previous_response_id=answer.id
    )
    assert more.input_tokens > 10


def test_a_call_that_was_cut_is_incomplete(client, parsing):
    order = "Well." + CALL.format('{"city": "Rome and all of Lazio"}')
    begun = order[: order.index(" of Lazio")]
    limit = {"max_output_tokens": len(parsing.tokenizer.encode(begun)), "tools": TOOLS}
    whole = say(client, order, **limit)
    streamed = say(client, order, stream=True, **limit)
    (last,) = [e for e in streamed if e.type == "response.incomplete"]
    for answer in (whole, last.response):
        assert answer.status == "incomplete"
        assert answer.incomplete_details.reason == "max_output_tokens"
        message, call = answer.output
        assert message.content[0].text == "Well."
        assert (call.type, call.status, call.name) == ("function_call", "incomplete", "get_weather")
        assert call.arguments.startswith('{"city": "Rome and') and "Lazio" not in call.arguments


def test_an_id_that_is_kept_is_not_taken_again(client):
    first = say(client, "one", extra_body={"rid": "mine"})
    with pytest.raises(openai.BadRequestError, match="rid is 'mine': a response of this id"):
        say(client, "two", extra_body={"rid": "mine"})
    assert client.responses.retrieve(first.id).output_text == "one"
    say(client, "two", store=False, extra_body={"rid": "mine"})
    client.responses.delete("mine")
    assert say(client, "two", extra_body={"rid": "mine"}).output_text == "two"


@pytest.mark.parametrize(
    "text, kinds",
    [
        ("Hi. " + CALLS + " bye", ["message", "function_call", "message"]),
        ("<think>a</think>b" + CALLS + "c", ["reasoning", "message", "function_call", "message"]),
    ],
)
def test_whole_and_streamed_responses_are_the_same(client, text, kinds):
    whole = say(client, text, tools=TOOLS)
    *_, last = say(client, text, tools=TOOLS, stream=True)

    def plain(items):
        return [item.model_dump(exclude={"id", "call_id"}) for item in items]

    assert plain(whole.output) == plain(last.response.output)
    assert [item.type for item in whole.output] == kinds


def test_only_what_was_cut_is_incomplete(client, parsing):
    text = "<think>two</think>" + CALLS + "and more than fits"
    limit = len(parsing.tokenizer.encode(text[: text.index(" than")]))
    whole = say(client, text, tools=TOOLS, max_output_tokens=limit)
    *events, last = say(client, text, tools=TOOLS, max_output_tokens=limit, stream=True)
    wanted = [("reasoning", "completed"), ("function_call", "completed"), ("message", "incomplete")]
    for output in (whole.output, last.response.output):
        assert [(item.type, item.status) for item in output] == wanted
    done = [e.item for e in events if e.type == "response.output_item.done"]
    assert [(item.type, item.status) for item in done] == wanted
    replayed = list(client.responses.retrieve(whole.id, stream=True, starting_after=999))
    assert [e.type for e in replayed] == ["response.incomplete"]
    counted = client.responses.input_tokens.count(model="fake", previous_response_id=whole.id)
    assert counted.input_tokens > 0


@pytest.mark.parametrize(
    "extra, said",
    [
        ({"reasoning": {"zzz": 1}}, "reasoning.zzz is 1: only effort"),
        ({"text": {"zzz": 1}}, "text.zzz is 1: only format"),
        ({"model": "max_tokens messages"}, "model 'max_tokens messages' is not served here"),
    ],
)
def test_more_bad_requests(parsing, extra, said):
    answer = parsing.post("/v1/responses", **{"input": "x"} | extra)
    assert answer.status_code in (400, 404) and said in answer.json()["error"]["message"]


CALLED = [{"role": "user", "content": "12 + 30 = ?"}] + [
    {"type": "function_call", "call_id": name, "name": "get_weather", "arguments": "{}"}
    for name in "ab"
]
RESULTS = [{"type": "function_call_output", "call_id": name, "output": f"4{name}"} for name in "ab"]


def said(text):
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "content": content}


@pytest.mark.parametrize("results", [RESULTS, RESULTS[::-1]])
@pytest.mark.parametrize("place", [1, 2, 3])
def test_text_behind_a_call_belongs_to_its_turn(parsing, place, results):
    items = [*CALLED[:place], said("I have called."), *CALLED[place:], *results]
    answer = parsing.post("/v1/responses", input=items, tools=TOOLS)
    assert answer.status_code == 200, answer.text
    turn = "I have called." + "[call] get_weather {}" * 2 + "<｜end▁of▁sentence｜>"
    assert turn + "[result] 4a[result] 4b" in prompt(parsing)


PIECES = st.sampled_from(["Well. ", "so", CALLS, CALLS + CALLS, " then "])


@settings(max_examples=examples(60), deadline=None)
@given(
    thought=st.sampled_from(["", "<think>hm</think>"]),
    pieces=st.lists(PIECES, min_size=1, max_size=5),
    limit=st.sampled_from([900, 900, 30, 60]),
    stream=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_every_output_comes_back_as_it_went(parsing, thought, pieces, limit, stream, order):
    """Items that the client sends again mean the same as the response that the server has kept."""
    first = [{"role": "user", "content": f"⟦say {thought}{''.join(pieces)}⟧"}]
    body = {"input": first, "tools": TOOLS, "max_output_tokens": limit, "stream": stream}
    reply = parsing.post("/v1/responses", **body)
    if stream:
        response = json.loads(reply.text.strip().split("data: ")[-1])["response"]
    else:
        response = reply.json()
    calls = [
        item["call_id"]
        for item in response["output"]
        if item["type"] == "function_call" and item["status"] == "completed"
    ]
    order.shuffle(calls)
    more = [
        *({"type": "function_call_output", "call_id": name, "output": name} for name in calls),
        {"role": "user", "content": "⟦say ok⟧"},
    ]
    prompts = []
    for again in (
        {"input": more, "previous_response_id": response["id"]},
        {"input": [*first, *response["output"], *more]},
    ):
        answer = parsing.post("/v1/responses", tools=TOOLS, **again)
        assert answer.status_code == 200, answer.text
        prompts.append(prompt(parsing))
    if response["output"]:
        assert prompts[0] == prompts[1]
