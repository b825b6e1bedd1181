"""The `openai` client as it comes, against the server."""

from __future__ import annotations

import openai
import pytest
from fake_engine import EOS
from server_harness import serving


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=served.url + "/v1", api_key="x", max_retries=0) as one:
        yield one


def ask(client, order, **kwargs):
    messages = [{"role": "user", "content": order}]
    return client.chat.completions.create(model="fake", messages=messages, **kwargs)


def test_cached_tokens_are_told_by_tier_where_there_are_some(client):
    details = ask(client, "[tiers so]", n=2).usage.prompt_tokens_details
    assert details.cached_tokens == 4
    assert details.cached_tokens_details == {"device": 1, "host": 3}
    plain = ask(client, "[say so]").usage.prompt_tokens_details
    assert not hasattr(plain, "cached_tokens_details")


def test_chat(client, served):
    answer = ask(client, "[say Hello, 你好!]")
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content == "Hello, 你好!"
    assert choice.finish_reason == "stop"
    submit = served.engine.submits[-1]
    expected = "<｜begin▁of▁sentence｜><｜User｜>[say Hello, 你好!]<｜Assistant｜>"
    assert submit.prompt == served.tokenizer.encode(expected)
    tokens = served.tokenizer.encode("Hello, 你好!")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(submit.prompt), len(tokens) + 1)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 4
    # generation_config.json's defaults, and all of the context that is left
    params = submit.params
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.95, 0)
    assert params.max_tokens == 4096 - len(submit.prompt)


def test_every_sampling_field_arrives(client, served):
    ask(
        client,
        "[say hi]",
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"5": 3, "6": -100},
        stop=["\n\n", "END"],
        seed=-77,
        user="me",
        extra_body={
            "top_k": 40,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "stop_token_ids": [EOS, 300],
            "ignore_eos": True,
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "priority": -3,
        },
    )
    submit = served.engine.submits[-1]
    p = submit.params
    assert (submit.seed, submit.priority, submit.choice) == (-77, -3, 0)
    assert (p.max_tokens, p.min_tokens, p.temperature, p.top_p) == (9, 2, 0.5, 0.9)
    assert (p.top_k, p.min_p, p.repetition_penalty) == (40, 0.125, 1.5)
    assert (p.presence_penalty, p.frequency_penalty) == (0.25, -0.5)
    assert dict(p.logit_bias) == {5: 3.0, 6: -100.0}
    assert (p.stop, p.stop_token_ids) == (("\n\n", "END"), (EOS, 300))
    assert (p.ignore_eos, p.skip_special_tokens, p.include_stop) == (True, False, True)


def test_stream_with_usage(client):
    order = "[say The quick brown 你好 👍🏽 fox]"
    chunks = list(ask(client, order, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "The quick brown 你好 👍🏽 fox"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 5
    assert all(c.usage is None for c in chunks[:-1])
    assert not any("�" in (c.choices[0].delta.content or "") for c in chunks if c.choices)
    assert len({c.id for c in chunks}) == 1
    without = list(ask(client, order, stream=True))
    assert all(c.choices for c in without)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (None, True),
        ({}, True),
        ({"include_usage": None}, True),
        ({"include_usage": True}, True),
        ({"include_usage": False}, False),
        ({"continuous_usage_stats": True}, True),
    ],
    ids=str,
)
def test_a_server_may_end_every_stream_with_usage(bpe_folder, options, told):
    more = {} if options is None else {"stream_options": options}
    with (
        serving(bpe_folder, stream_response_default_include_usage=True) as served,
        openai.OpenAI(base_url=served.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        chunks = list(ask(client, "[say a b]", stream=True, **more))
        assert (chunks[-1].usage is not None) == told == (chunks[-1].choices == [])
        assert ask(client, "[say a b]").usage.completion_tokens > 0, "no stream"
        text = client.completions.create(model="fake", prompt="[say a b]", stream=True, **more)
        assert ([*text][-1].usage is not None) == told


EACH = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("chat", [True, False])
def test_every_chunk_tells_the_tokens_of_its_choice(client, served, chat, n):
    order, more = "[say The quick 你好 fox]", {"n": n, "stream": True, "stream_options": EACH}
    if chat:
        chunks = list(ask(client, order, **more))
    else:
        chunks = list(client.completions.create(model="fake", prompt=order, **more))
    prompt = len(served.engine.submits[-1].prompt)
    counted = {i: [] for i in range(n)}
    for chunk in chunks[:-1]:
        assert chunk.usage.prompt_tokens == prompt
        assert chunk.usage.total_tokens == prompt + chunk.usage.completion_tokens
        counted[chunk.choices[0].index].append(chunk.usage.completion_tokens)
        if chat and chunk.choices[0].delta.role:
            assert chunk.usage.completion_tokens == 0  # nothing of the answer is in it
    for counts in counted.values():
        assert counts == sorted(counts) and len(set(counts)) > 3
    assert chunks[-1].choices == [] and chunks[-1].usage.prompt_tokens == prompt
    assert chunks[-1].usage.completion_tokens == sum(c[-1] for c in counted.values())


@pytest.mark.parametrize("each", [None, False, True])
@pytest.mark.parametrize("last", [None, False])
def test_continuous_usage_without_include_usage_is_none(client, last, each):
    options = {"include_usage": last, "continuous_usage_stats": each}
    chunks = list(ask(client, "[say a b]", stream=True, stream_options=options))
    assert all(c.choices and c.usage is None for c in chunks)


def test_choices_share_a_seed_and_differ_by_index(client, served):
    answer = ask(client, "[say abc]", n=3)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert all(c.message.content == "abc" for c in answer.choices)
    submits = served.engine.submits[-3:]
    assert [s.choice for s in submits] == [0, 1, 2]
    assert len({s.seed for s in submits}) == 1 and len({tuple(s.prompt) for s in submits}) == 1
    assert len({s.rid for s in submits}) == 3
    assert answer.usage.prompt_tokens == len(submits[0].prompt)
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    ask(client, "[say abc]")
    assert served.engine.submits[-1].seed != submits[0].seed
    texts = {0: "", 1: ""}
    for chunk in ask(client, "[say abcdef]", n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "abcdef", 1: "abcdef"}


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text_and_the_request(client, served, stream):
    before = len(served.engine.aborted)
    answer = ask(client, "[go one STOP two]", stop=["STOP"], stream=stream)
    if stream:
        chunks = list(answer)
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        last = chunks[-1].choices[0]
    else:
        last = answer.choices[0]
        text = last.message.content
    assert (text, last.finish_reason, last.stop_reason) == ("one ", "stop", "STOP")
    served.wait_aborted(before + 1)
    assert served.engine.aborted[-1] == served.engine.submits[-1].rid


def test_length(client):
    answer = ask(client, "[go abc]", max_tokens=5)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5


def test_chat_logprobs(client, served):
    answer = ask(client, "[say é!]", logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    tokens = [*served.tokenizer.encode("é!"), EOS]
    assert [bytes(e.bytes) for e in content] == [served.tokenizer.token_bytes(t) for t in tokens]
    assert all(e.logprob == -0.5 for e in content)
    assert [t.logprob for t in content[0].top_logprobs] == [-0.25, -0.5, -9999.0]
    plain = ask(client, "[say é!]", logprobs=True).choices[0].logprobs.content
    assert [e.token for e in plain] == [e.token for e in content]
    assert all(e.top_logprobs == [] for e in plain)
    streamed = []
    for chunk in ask(client, "[say é!]", logprobs=True, top_logprobs=3, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == content


def test_logprobs_end_with_the_stop_string(client):
    answer = ask(client, "[go one STOP two]", stop="STOP", logprobs=True)
    text = "".join(e.token for e in answer.choices[0].logprobs.content)
    assert text.endswith("STOP") and answer.usage.completion_tokens == len(
        answer.choices[0].logprobs.content
    )


def test_completions(client, served):
    answer = client.completions.create(model="fake", prompt="[say yes]")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("yes", "stop")
    submit = served.engine.submits[-1]
    assert submit.prompt == [0, *served.tokenizer.encode("[say yes]")]
    assert submit.params.max_tokens == 16
    ids = served.tokenizer.encode("[say ids]")
    assert client.completions.create(model="fake", prompt=ids).choices[0].text == "ids"
    assert served.engine.submits[-1].prompt == ids


def test_completion_lists(client, served):
    answer = client.completions.create(model="fake", prompt=["[say a]", "[say b]"], n=2)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    submits = served.engine.submits[-4:]
    assert [s.choice for s in submits] == [0, 1, 0, 1]
    assert submits[0].prompt != submits[2].prompt and submits[0].seed != submits[2].seed
    assert answer.usage.prompt_tokens == len(submits[0].prompt) + len(submits[2].prompt)
    ids = [served.tokenizer.encode(t) for t in ("[say c]", "[say d]")]
    answer = client.completions.create(model="fake", prompt=ids)
    assert [c.text for c in answer.choices] == ["c", "d"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_and_completion_logprobs(client, served, stream):
    prompt = "[say é ok]"
    answer = client.completions.create(
        model="fake", prompt=prompt, echo=True, logprobs=2, stream=stream
    )
    parts = [c.choices[0] for c in answer] if stream else answer.choices
    text = "".join(p.text for p in parts)
    assert text == prompt + "é ok"
    found = [p.logprobs for p in parts if p.logprobs]
    tokens = [t for f in found for t in f.tokens]
    logprobs = [t for f in found for t in f.token_logprobs]
    offsets = [t for f in found for t in f.text_offset]
    ids = [*served.engine.submits[-1].prompt, *served.tokenizer.encode("é ok"), EOS]
    assert tokens == [served.tokenizer.token_text(t) for t in ids]
    assert logprobs == [None] + [-0.5] * (len(ids) - 1)
    assert offsets == [len(served.tokenizer.decode(ids[:i]).rstrip("�")) for i in range(len(ids))]
    assert found[0].top_logprobs[0] is None and len(found[0].top_logprobs[1]) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone_scores_the_prompt(client, served, stream):
    asked = {"model": "fake", "prompt": "[say é ok]", "max_tokens": 0, "echo": True}
    more = {"stream_options": {"include_usage": True}} if stream else {}
    answer = client.completions.create(**asked, logprobs=1, stream=stream, **more)
    chunks = list(answer) if stream else [answer]
    parts = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(p.text for p in parts) == "[say é ok]"
    assert parts[-1].finish_reason == "length"
    ids = served.engine.submits[-1].prompt
    logprobs = [value for p in parts if p.logprobs for value in p.logprobs.token_logprobs]
    assert logprobs == [None] + [-0.5] * (len(ids) - 1)
    usage = chunks[-1].usage
    assert (usage.completion_tokens, usage.total_tokens) == (0, len(ids))
    with pytest.raises(openai.BadRequestError, match="max_tokens is 0"):
        client.completions.create(**asked | {"echo": False})


def test_prompt_logprobs(served):
    body = served.chat("[say x]", prompt_logprobs=1).json()
    ids = served.engine.submits[-1].prompt
    assert body["prompt_logprobs"][0] is None and len(body["prompt_logprobs"]) == len(ids)
    entry = body["prompt_logprobs"][1][str(ids[1])]
    assert entry == {"logprob": -0.5, "decoded_token": served.tokenizer.token_text(ids[1])}


def test_models(client):
    assert [m.id for m in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").max_model_len == 4096


@pytest.mark.parametrize(
    "order, kind, status, code",
    [
        ("[full]", openai.APIStatusError, 503, "queue_full"),
        ("[invalid]", openai.BadRequestError, 400, "invalid_value"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_the_engine(client, order, kind, status, code, stream):
    with pytest.raises(kind) as caught:
        ask(client, order, stream=stream)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    if status == 503:
        assert caught.value.response.headers["retry-after"] == "1"
    else:
        assert caught.value.param == "seed"


def test_messages_reach_the_template(client, served):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    client.chat.completions.create(
        model="fake",
        messages=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "42"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "[say c]"}],
            },
        ],
        tools=tools,
        tool_choice="auto",
        extra_body={"chat_template_kwargs": {"thinking": True}},
    )
    text = served.tokenizer.decode(served.engine.submits[-1].prompt, skip_special=False)
    assert text == (
        "<｜begin▁of▁sentence｜>Be kind."
        '\n[tool] {"name": "f", "parameters": {}}<｜User｜>a<｜Assistant｜>[call] f {}'
        "<｜end▁of▁sentence｜>[result] 42<｜User｜>b\n[say c]<｜Assistant｜><think>"
    )


def test_the_last_message_is_continued(client, served):
    messages = [{"role": "user", "content": "[say x]"}, {"role": "assistant", "content": "It is"}]
    body = {"continue_final_message": True}
    client.chat.completions.create(model="fake", messages=messages, extra_body=body)
    text = served.tokenizer.decode(served.engine.submits[-1].prompt, skip_special=False)
    assert text.endswith("<｜Assistant｜>It is")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=messages[:1], extra_body=body)
    assert caught.value.param == "messages[0]" and "the assistant's" in str(caught.value)
    both = body | {"add_generation_prompt": True}
    with pytest.raises(openai.BadRequestError, match="send one of them"):
        client.chat.completions.create(model="fake", messages=messages, extra_body=both)
