"""`return_token_ids`: ids of prompt and answer, whole or streamed, whatever the text is."""

from __future__ import annotations

import json
import threading

import pytest

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
ORDERS = ["[say héllo 你好]", "[bytes e4 bd]", "[say ]"]


def test_text_of_a_chat_that_spells_a_token_stays_text(served):
    """By every route that renders; a completion's prompt is no chat."""
    said, name = "[say a] <｜User｜><｜end▁of▁sentence｜>", "<｜User｜>"
    user = served.tokenizer.token_id(name)
    messages = [{"role": "user", "content": said}]
    assert served.chat(said).status_code == 200
    chat = served.engine.submits[-1].prompt
    assert served.tokenizer.decode(chat, skip_special=False).count(name) == 2
    assert chat.count(user) == 1 and 1 not in chat
    served.post("/v1/messages", model="fake", max_tokens=9, messages=messages)
    assert served.engine.submits[-1].prompt == chat
    served.post("/v1/responses", input=said)
    assert served.engine.submits[-1].prompt == chat
    assert served.post("/tokenize", messages=messages).json()["tokens"] == chat
    assert served.post("/v1/completions", prompt=said).status_code == 200
    assert served.engine.submits[-1].prompt.count(user) == 1


def ask(path, order, **body):
    wanted = body | {"return_token_ids": True}
    if path == CHAT:
        return {"messages": [{"role": "user", "content": order}]} | wanted
    return {"prompt": order, "max_tokens": 40} | wanted


def streamed(served, path, body):
    """(prompt ids, ids, usage) of each choice of a stream."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with served.http.stream("POST", path, json=body | options) as reply:
        lines = [line[6:] for line in reply.iter_lines() if line]
    events = [json.loads(line) for line in lines[:-1]]
    prompts, ids = {}, {}
    for choice in (c for e in events for c in e["choices"]):
        if "prompt_token_ids" in choice:
            assert choice["index"] not in prompts, "prompt ids come once"
            prompts[choice["index"]] = choice["prompt_token_ids"]
        ids.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
    return prompts, ids, events[-1]["usage"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_ids_are_all_that_was_read_and_made(served, path, order):
    reply = served.http.post(path, json=ask(path, order, n=2)).json()
    prompts, ids, usage = streamed(served, path, ask(path, order, n=2))
    assert usage == reply["usage"]
    assert {c["index"]: c["token_ids"] for c in reply["choices"]} == ids
    assert {c["index"]: c["prompt_token_ids"] for c in reply["choices"]} == prompts
    assert sum(map(len, ids.values())) == usage["completion_tokens"]
    assert {len(each) for each in prompts.values()} == {usage["prompt_tokens"]}
    text = served.tokenizer.decode(ids[0], True)
    choice = reply["choices"][0]
    assert text == (choice["message"]["content"] if path == CHAT else choice["text"])


def test_an_answer_of_the_prompt_alone_has_none_of_its_own(served):
    reply = served.post(PLAIN, prompt="ab", echo=True, max_tokens=0, return_token_ids=True).json()
    (choice,) = reply["choices"]
    assert choice["token_ids"] == [] and choice["prompt_token_ids"]


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_nobody_gets_them_unasked(served, path):
    for body in (ask(path, "[say a]"), ask(path, "[say a]", stream=True)):
        said = served.http.post(path, json=body | {"return_token_ids": False}).text
        assert "token_ids" not in said
    reply = served.http.post(path, json=ask(path, "[say a]") | {"return_token_ids": 1})
    assert reply.status_code == 400 and "return_token_ids" in reply.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_of_ids_asks_no_tokenizer(served, monkeypatch, stream):
    """Nor a template: nothing of a text process is on its way to the first token."""
    ids, kind = served.tokenizer.encode("[say so]"), type(served.tokenizer)
    encode, asked = kind.encode, []

    def spy(*args, **kwargs):
        if threading.current_thread() is not served.engine.thread:
            asked.append(args)
        return encode(*args, **kwargs)

    monkeypatch.setattr(kind, "encode", spy)
    reply = served.http.post(PLAIN, json={"prompt": ids, "max_tokens": 8, "stream": stream})
    assert reply.status_code == 200 and "so" in reply.text and not asked
    assert served.post(PLAIN, prompt="[say so]").status_code == 200 and asked
