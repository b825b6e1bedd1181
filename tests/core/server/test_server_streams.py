"""Streams under stress: clients that vanish, an engine that dies, half characters, many at once."""

from __future__ import annotations

import asyncio
import json
import socket
import threading

import httpx
import jinja2
import pytest
from server_harness import serving, until

from ds_runtime.server.generate import formats, logprobs
from ds_runtime.server.protocols import native as generate

NAMED = {"bos_token", "eos_token", "pad_token", "unk_token", "chat_template"}


def chat_body(order, **body):
    return {"messages": [{"role": "user", "content": order}], **body}


def events(response):
    """The JSON events of a stream; the last line must be [DONE]."""
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("order", ["[go on ]", "[hang]"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_a_client_that_vanishes_frees_its_choices(served, path, order, stream):
    before, aborted = len(served.engine.submits), len(served.engine.aborted)
    body = {
        "/v1/chat/completions": chat_body(order, n=2),
        "/v1/completions": {"prompt": order, "n": 2, "max_tokens": 4000},
        "/generate": {"text": order, "sampling_params": {"n": 2, "max_new_tokens": 4000}},
    }[path]
    url = httpx.URL(served.url)
    content = json.dumps(body | {"stream": stream}).encode()
    with socket.create_connection((url.host, url.port), timeout=10) as raw:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        raw.sendall(head.encode() + content)
        until(lambda: len(served.engine.submits) == before + 2)
        if stream and order != "[hang]":
            assert raw.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")
    mine = {s.rid for s in served.engine.submits[before:]}
    assert set(served.wait_aborted(aborted + 2)[aborted:]) == mine
    until(lambda: not served.engine.jobs)


def test_the_engine_dies_in_the_middle(bpe_folder):
    with serving(bpe_folder) as served:
        with served.http.stream(
            "POST", "/v1/chat/completions", json=chat_body("[die abcdef]", stream=True)
        ) as reply:
            assert reply.status_code == 200
            found = events(reply)
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in found[:-1])
        assert text and found[-1]["error"]["code"] == "engine_dead"
        assert "rank 1 was killed by signal 9" in found[-1]["error"]["message"]
        health = served.http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "dead"
        assert "signal 9" in health.json()["reason"]
        later = served.chat("[say x]")
        assert later.status_code == 503 and "signal 9" in later.json()["error"]["message"]


def test_waiting_requests_get_the_reason_too(bpe_folder):
    async def main(served):
        async with httpx.AsyncClient(base_url=served.url, timeout=10) as client:

            def ask(order):
                return client.post("/v1/chat/completions", json=chat_body(order))

            waiting = [asyncio.ensure_future(ask("[hang]")) for _ in range(3)]
            while len(served.engine.submits) < 3:
                await asyncio.sleep(0.01)
            waiting.append(asyncio.ensure_future(ask("[die abc]")))
            return await asyncio.gather(*waiting)

    with serving(bpe_folder) as served:
        for reply in asyncio.run(main(served)):
            assert reply.status_code == 503
            assert "signal 9" in reply.json()["error"]["message"]


def test_no_event_holds_half_a_character(served):
    order = "[bytes e4 bd a0 f0 9f 91 8d 41 e4 bd 42 c3 a9]"
    body = {"prompt": order, "stream": True, "max_tokens": 50, "logprobs": 0}
    with served.http.stream("POST", "/v1/completions", json=body) as reply:
        choices = [e["choices"][0] for e in events(reply)]
    # A broken sequence is one replacement character, once it is certain to be broken.
    assert [c["text"] for c in choices if c["text"]] == ["你", "👍", "A", "�B", "é"]
    names = [t for c in choices if c["logprobs"] for t in c["logprobs"]["tokens"]]
    assert names[:3] == ["bytes:\\xe4", "bytes:\\xbd", "bytes:\\xa0"]


def test_many_streams_at_once(served):
    texts = {i: f"stream {i} says 你好 {'abc ' * (i % 5)}end {i}" for i in range(32)}

    async def one(client, i):
        body = chat_body(f"[say {texts[i]}]", stream=True, stream_options={"include_usage": True})
        out, usage = "", None
        async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    usage = event["usage"]
                    for choice in event["choices"]:
                        out += choice["delta"].get("content") or ""
        return out, usage

    async def main():
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=served.url, timeout=20, limits=limits) as client:
            return await asyncio.gather(*(one(client, i) for i in texts))

    for i, (text, usage) in enumerate(asyncio.run(main())):
        assert text == texts[i]
        assert usage["completion_tokens"] == len(served.tokenizer.encode(text)) + 1


def test_tokenize_and_back(served):
    text = "Hello 你好"
    body = served.post("/tokenize", prompt=text).json()
    assert body["tokens"] == [0, *served.tokenizer.encode(text)]
    assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), 4096)
    bare = served.post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"]
    assert bare == body["tokens"][1:]
    assert served.post("/detokenize", tokens=bare).json() == {"prompt": text}
    chat = served.post("/tokenize", messages=[{"role": "user", "content": "[say x]"}]).json()
    served.chat("[say x]")
    assert chat["tokens"] == served.engine.submits[-1].prompt
    long = "word " * 5000  # tokenised off the event loop
    assert served.post("/tokenize", prompt=long).json()["count"] > 5000


def test_what_the_tokenizer_is(served, bpe_folder):
    found = served.http.get("/tokenizer_info").json()
    settings = json.loads((bpe_folder / "tokenizer_config.json").read_text())
    assert {k: found[k] for k in settings.keys() - NAMED} == {
        k: v for k, v in settings.items() if k not in NAMED
    }
    assert found["bos_token"] == settings["bos_token"]["content"] and isinstance(
        found["eos_token"], str
    )
    assert found["unk_token"] is None and found["tokenizer_class"]
    messages = [{"role": "user", "content": "Hi"}]
    rendered = jinja2.Environment().from_string(found["chat_template"])
    text = rendered.render(messages=messages, add_generation_prompt=True, bos_token="")
    bare = served.post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"]
    chat = served.post("/tokenize", messages=messages).json()["tokens"]
    assert bare == chat[1:]


def test_flush_cache(served):
    before = served.engine.flushes
    assert served.http.post("/flush_cache").json() == {"pages_freed": 7}
    reply = served.http.get("/flush_cache")  # what changes something is no GET
    assert reply.status_code == 405 and "use POST" in reply.json()["error"]["message"]
    assert served.engine.flushes == before + 1


def test_metrics(served):
    served.chat("[say some words]")
    served.http.get(f"/nowhere/{id(served)}")
    text = served.http.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    key = 'ds_runtime_http_requests_total{route="/v1/chat/completions",status="200"}'
    assert float(values[key]) >= 1
    assert float(values['ds_runtime_http_requests_total{route="other",status="404"}']) >= 1
    assert float(values['ds_runtime_time_to_first_token_seconds_count{model_name="fake"}']) >= 1
    key = 'ds_runtime_request_success_total{finished_reason="stop",model_name="fake"}'
    assert float(values[key]) >= 1
    assert float(values['ds_runtime_generation_tokens_total{engine="0",model_name="fake"}']) >= 1
    assert 'ds_runtime_kv_pages_free{engine="0",model_name="fake"}' in values


@pytest.mark.parametrize("length", [5, 3000])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_many_log_probabilities_are_written_beside_the_event_loop(
    served, monkeypatch, path, stream, length
):
    """A whole context of them takes a third of a second, in which no stream would go on."""
    threads = []

    def seen(entries, tokenizer):
        threads.append(threading.current_thread().name)
        return logprobs.prompt_logprobs(entries, tokenizer)

    monkeypatch.setattr(formats, "prompt_logprobs", seen)
    wish = {"prompt_logprobs": 2, "max_tokens": 3}
    ids = [*[300] * length, *served.tokenizer.encode("[say abc]")]
    if path == "/v1/completions":
        body = {"prompt": ids, **wish}
    else:
        body = chat_body("a " * length + "[say abc]", **wish)
    reply = served.post(path, stream=stream, **body)
    assert reply.status_code == 200, reply.text
    found = events(reply) if stream else [reply.json()]
    assert '"prompt_logprobs":[null,{' in reply.text
    assert json.dumps(found).count('"decoded_token"') >= length
    (thread,) = threads
    assert thread.startswith("body") == (length == 3000)


@pytest.mark.parametrize("length", [5, 3000])
@pytest.mark.parametrize("stream", [False, True])
def test_all_so_far_is_written_beside_the_event_loop(served, monkeypatch, stream, length):
    """Each event of /generate tells the prompt's log-probabilities again."""
    threads = []

    def seen(entries, tokenizer):
        threads.append(threading.current_thread().name)
        return logprobs.native_top(entries, tokenizer)

    monkeypatch.setattr(generate, "native_top", seen)
    wish = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    ids = [*[300] * length, *served.tokenizer.encode("[say abcdef]")]
    wish |= {"input_ids": ids, "sampling_params": {"max_new_tokens": 6}}
    reply = served.post("/generate", stream=stream, **wish)
    assert reply.status_code == 200, reply.text
    last = events(reply)[-1] if stream else reply.json()
    assert len(last["meta_info"]["input_top_logprobs"]) == len(ids)
    assert len(threads) >= 2
    assert {thread.startswith("body") for thread in threads} == {length == 3000}
