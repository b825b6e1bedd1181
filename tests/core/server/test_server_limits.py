"""What a hostile or careless client cannot do: numbers, sizes, keys, and time."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from itertools import pairwise

import httpx
import pytest
import zmq
from fastapi import FastAPI
from server_harness import serving, until
from test_server_bad_input import error

from ds_runtime.engine.messages import SubmitGroup
from ds_runtime.engine.process.transport import bind_pull, ipc, private_folder
from ds_runtime.errors import CheckpointError
from ds_runtime.sampling_params import SamplingParams
from ds_runtime.server.engines.client import EngineClient
from ds_runtime.server.engines.replicas import Replicas
from ds_runtime.server.generate.sampling import GenerationDefaults

CHAT = '{"messages": [{"role": "user", "content": "[say ok]"}], %s}'
ROUTES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": '{"prompt": "[say ok]", %s}',
    "/generate": '{"text": "[say ok]", "sampling_params": {%s}}',
}
FIELDS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "prompt_logprobs",
    "n",
    "seed",
)
HUGE = "9" * 400
VALUES = (HUGE, "-" + HUGE, "9" * 5000, "NaN", "Infinity", "-Infinity", '"1"', "[1]", "{}", "true")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("field", FIELDS)
def test_no_number_breaks_the_server(served, path, field):
    for value in VALUES:
        raw = ROUTES[path] % f'"{field}": {value}'
        found = error(served.http.post(path, content=raw), 400)
        assert found["type"] == "invalid_request_error" and len(found["message"]) < 300


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("value", [10**30, -(10**30), 1 << 31, 1.5, "1", True])
def test_priority_has_bounds_on_every_route(served, path, value):
    body = json.loads(ROUTES[path] % '"top_k": 1') | {"priority": value}
    assert "priority" in error(served.post(path, **body), 400)["message"]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "fields, said",
    [
        ({"stop": "x" * 1025}, "stop holds a string of 1025 characters: at most 1024"),
        ({"stop": ["y", "x" * (1 << 20)]}, "stop holds a string of 1048576 characters"),
        ({"stop": ["x"] * 65}, "stop holds 65 strings: at most 64"),
        ({"stop_token_ids": [5] * 257}, "stop_token_ids holds 257 ids: at most 256"),
    ],
    ids=range(4),
)
def test_stops_have_bounds(served, path, fields, said):
    raw = ROUTES[path] % json.dumps(fields | {"n": 8})[1:-1]
    assert said in error(served.http.post(path, content=raw), 400)["message"]


def test_the_longest_stop_is_looked_for(served):
    body = served.post("/v1/completions", prompt="[say abc]", stop=["b" * 1024, "c"], n=2).json()
    assert [c["text"] for c in body["choices"]] == ["ab", "ab"]


DEEP = 900  # the standard library still reads it, but not from everywhere on the stack


@pytest.mark.parametrize("depth", [100, DEEP, 5_000, 200_000])
@pytest.mark.parametrize(
    "body",
    [
        '{"messages": [{"role": "user", "content": %s}]}',
        '{"messages": %s}',
        '{"messages": [{"role": "user", "content": "[say ok]", "tool_calls": %s}]}',
        CHAT.replace("%s", '"tools": [{"type": %s}]'),
        CHAT.replace("%s", '"response_format": %s'),
        CHAT.replace("%s", '"chat_template_kwargs": {"a": %s}'),
    ],
    ids=["content", "messages", "tool_calls", "tools", "only", "kwargs"],
)
@pytest.mark.parametrize("padding", [0, 300_000])
def test_depth_is_the_client_s_fault(served, body, depth, padding):
    raw = body.replace("%s", "[" * depth + "]" * depth) + " " * padding
    reply = served.http.post("/v1/chat/completions", content=raw)
    assert reply.status_code in (200, 400), reply.text
    assert len(reply.content) < 3000


@pytest.mark.parametrize(
    "text", ["word " * 100_000, "a" * 500_000, "\u4f60" * 100_000, "\n" * 300_000]
)
def test_very_long_texts_are_too_long(served, text):
    assert error(served.post("/v1/completions", prompt=text), 400)["code"] == (
        "context_length_exceeded"
    )
    assert error(served.chat(text), 400)["code"] == "context_length_exceeded"


def test_text_that_cannot_fit_is_refused_before_it_is_encoded(roomy):
    text = "ab " * 3_000_000
    began = time.monotonic()
    for answer in (roomy.chat(text), roomy.post("/v1/completions", prompt=text)):
        said = error(answer, 400)
        assert said["code"] == "context_length_exceeded" and "tokens or more" in said["message"]
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "body",
    [
        {"x" * 1_000_000: 1},
        {"model": "x" * 1_000_000},
        {"logit_bias": {"x" * 1_000_000: 1}},
        {"logit_bias": {"x" * 1_000_000: "y"}},
    ],
    ids=range(4),
)
def test_long_names_are_not_sent_back(served, body):
    begin = time.process_time()  # the server's, too
    body |= {"messages": [{"role": "user", "content": "[say ok]"}]}
    reply = served.post("/v1/chat/completions", **body)
    assert reply.status_code in (400, 404) and len(reply.content) < 2000
    assert time.process_time() - begin < 2


@pytest.fixture(scope="module")
def roomy(bpe_folder):
    with serving(bpe_folder, max_body=16 << 20) as one:
        yield one


@pytest.fixture(scope="module")
def large():
    """Bodies of megabytes, with what they are answered."""
    ids = ",".join(["5"] * 1_100_000)
    return {
        "ids": ("/v1/completions", f'{{"prompt": [{ids}]}}', "has 1100000 tokens"),
        "input_ids": ("/generate", f'{{"input_ids": [{ids}]}}', "has 1100000 tokens"),
        "tokens": ("/detokenize", f'{{"tokens": [{ids}, 512]}}', "token id 512"),
        "text": ("/v1/completions", json.dumps({"prompt": "word " * 300_000}), "tokens"),
        "messages": (
            "/v1/chat/completions",
            '{"messages": [' + ",".join(["{}"] * 65_000) + "]}",
            "messages",
        ),
        "tools": (
            "/v1/chat/completions",
            CHAT.replace(
                "%s", '"tools": [{"function": {"name": "f", "x": "' + "word " * 200_000 + '"}}]'
            ),
            "tokens",
        ),
    }


def longest_wait(served, path, raw, said):
    """Most seconds between two answers of /health to another client while `raw` was refused.

    Client, engine and server share this process: its own processor time counts, not that of others
    on a busy machine.
    """
    times, asks, done = [], threading.Event(), threading.Event()

    def others():
        with httpx.Client(base_url=served.url, timeout=20) as http:
            while not done.is_set() or len(times) < 2:
                assert http.get("/health").status_code == 200
                times.append(time.process_time())
                asks.set()

    thread = threading.Thread(target=others)
    thread.start()
    try:
        assert asks.wait(20)
        found = error(served.http.post(path, content=raw), 400)
    finally:
        done.set()
        thread.join()
    assert said in found["message"]
    return max(after - before for before, after in pairwise(times))


@pytest.mark.parametrize("name", ["ids", "input_ids", "tokens", "text", "messages", "tools"])
def test_large_bodies_do_not_hold_up_the_others(roomy, large, name):
    path, body, said = large[name]
    # One that is held up waits as long each time. Where other programs take the processors from the
    # thread that asks, it may see this process work meanwhile: once, not each time.
    waits = []
    while len(waits) < 5 and min(waits, default=1.0) > 0.1:
        waits.append(longest_wait(roomy, path, body.encode(), said))
    assert min(waits) < 0.1, waits


def test_a_prompt_is_sent_once_whatever_n(served):
    ids = [*[300] * 3000, *served.tokenizer.encode("[say abc]")]

    def cost(n):
        before = served.engine.bytes_in
        body = {"prompt": ids, "n": n, "prompt_logprobs": 1, "logprobs": 1, "echo": True}
        choices = served.post("/v1/completions", **body).json()["choices"]
        assert [c["text"][-3:] for c in choices] == ["abc"] * n
        # All show the prompt's log-probabilities, which only one computes.
        assert all(c["prompt_logprobs"] == choices[0]["prompt_logprobs"] for c in choices)
        assert all(c["logprobs"] == choices[0]["logprobs"] for c in choices)
        assert len(choices[0]["prompt_logprobs"]) == len(ids)
        submits = served.engine.submits[-n:]
        assert all(s.prompt == ids for s in submits)
        assert [s.params.prompt_logprobs for s in submits] == [1] + [None] * (n - 1)
        return served.engine.bytes_in - before

    assert cost(16) < cost(1) + 16 * 100


def test_choices_that_end_early_count_as_aborted(bpe_folder):
    def aborted(served):
        lines = served.http.get("/metrics").text.splitlines()
        found = [line for line in lines if 'request_success_total{finished_reason="abort"' in line]
        return float(found[0].rsplit(" ", 1)[1]) if found else 0.0

    with serving(bpe_folder) as served:
        served.chat("[say ok]")
        assert aborted(served) == 0
        body = {"prompt": "[go on ]", "n": 3, "max_tokens": 4000, "stream": True}
        with served.http.stream("POST", "/v1/completions", json=body) as reply:
            next(reply.iter_lines())
        until(lambda: aborted(served) == 3)
        error(served.chat("[full]", n=2), 503)
        assert aborted(served) == 5


def test_a_request_that_cannot_be_sent_leaves_nothing_behind():
    async def main():
        with private_folder() as folder:
            context = zmq.Context()
            addresses = ipc(folder, "to_engine"), ipc(folder, "from_engine")
            inbox = bind_pull(context, addresses[0])
            one = EngineClient(*addresses)
            client = Replicas([one])
            await client.start()
            one.ready = object()
            fields = {"prompt": [5], "params": SamplingParams(), "seed": 1}
            good = SubmitGroup(rids=["a", "b"], **fields)
            bad = SubmitGroup(rids=["c"], priority=10**30, **fields)
            with pytest.raises(OverflowError):
                client.open([good, bad])
            left = dict(one._flights)
            client.close()
            inbox.close()
            context.destroy()
            return left

    assert asyncio.run(main()) == {}


def test_an_api_key_guards_plugins_and_the_schema_too(bpe_folder):
    def plugin(app: FastAPI):
        app.get("/hello")(lambda: "hello")
        app.get("/health/more")(lambda: "more")

    with serving(bpe_folder, api_key=("gehe\u00efm",), routes_of=plugin) as served:
        good = {"authorization": "Bearer gehe\u00efm".encode()}
        for path in ("/hello", "/health/more", "/openapi.json", "/v1/models", "/nothing"):
            for headers in ({}, {"authorization": "Bearer x"}, {"authorization": "Basic x"}):
                reply = served.http.get(path, headers=headers)
                assert error(reply, 401)["code"] == "invalid_api_key"
                assert reply.headers["www-authenticate"] == "Bearer"
            reply = served.http.get(path, headers=good)
            assert reply.status_code == (404 if path == "/nothing" else 200)
        assert served.http.get("/hello", headers=good).json() == "hello"
        metrics = served.http.get("/metrics").text
        assert 'http_requests_total{route="other",status="401"}' in metrics
    with serving(bpe_folder, routes_of=plugin) as served:
        assert served.http.get("/hello").json() == "hello"


@pytest.mark.parametrize("written, read", [("50.0", 50), ("50", 50), ("2.5", None), ("NaN", None)])
def test_the_checkpoint_s_top_k_is_an_integer(tmp_path, written, read):
    (tmp_path / "generation_config.json").write_text(f'{{"top_k": {written}}}')
    if read is None:
        with pytest.raises(CheckpointError, match=r"top_k is .*: an integer is needed"):
            GenerationDefaults.load(tmp_path)
    else:
        found = GenerationDefaults.load(tmp_path).top_k
        assert found == read and SamplingParams(top_k=found).top_k == read


@pytest.mark.parametrize(
    "key, value",
    [("temperature", -5), ("top_p", 7), ("top_p", 0), ("top_k", -2), ("repetition_penalty", 0)],
)
def test_a_checkpoint_s_impossible_default_stops_the_start(tmp_path, key, value):
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({key: value, "do_sample": False}))
    with pytest.raises(CheckpointError, match=f"{path}: {key} is {value}.*: must be .*mend"):
        GenerationDefaults.load(tmp_path)


def test_a_checkpoint_s_huge_top_k_is_a_sentence_and_minus_one_is_off(tmp_path):
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"top_k": 10**400}))
    with pytest.raises(CheckpointError, match="top_k is 1000"):
        GenerationDefaults.load(tmp_path)
    path.write_text(json.dumps({"top_k": -1}))
    assert GenerationDefaults.load(tmp_path).top_k == -1


def test_more_choices_than_may_ever_wait(bpe_folder):
    with serving(bpe_folder, queue_limit=2) as served:
        found = error(served.chat("[say ok]", n=5), 400)
        assert found["param"] == "n" and "n make 5 choices" in found["message"]
        assert "larger --max-queued-requests" in found["message"]
        found = error(served.post("/v1/completions", prompt=["[say ok]"] * 3), 400)
        assert found["param"] == "prompt" and "prompts make 3 choices" in found["message"]
        assert served.chat("[say ok]", n=2).status_code == 200
        assert len(served.engine.submits) == 2


def test_surrogate_pairs_are_characters(served):
    prompt = "\U0001f600 [say ok]"
    for size in (0, 1 << 19):  # either JSON reader
        raw = json.dumps({"prompt": prompt}).encode().ljust(size)
        assert b"\\ud83d\\ude00" in raw
        reply = served.http.post("/tokenize", content=raw).json()
        assert served.tokenizer.decode(reply["tokens"]).endswith(prompt)
        bad = raw.replace(b"\\ude00", b"")
        found = error(served.http.post("/tokenize", content=bad), 400)
        assert found["param"] == "prompt" and "unpaired surrogate" in found["message"]


def test_the_next_request_after_a_500_is_answered(bpe_folder):
    def plugin(app: FastAPI):
        @app.get("/boom")
        def boom():
            raise ArithmeticError("a fault of the plugin")

    with serving(bpe_folder, routes_of=plugin) as served:
        for _ in range(3):
            reply = served.http.get("/boom")
            assert error(reply, 500)["code"] == "internal_error"
            assert reply.headers["connection"] == "close"
            assert served.http.get("/health").status_code == 200


def test_template_arguments_may_have_any_name(served):
    reply = served.chat("[say ok]", chat_template_kwargs={"self": 1, "a b": 2, "args": 3})
    assert reply.json()["choices"][0]["message"]["content"] == "ok"


def test_load_balancers_ask_with_head(served):
    for _ in range(2):  # a body would be taken for the next answer
        reply = served.http.head("/health")
        assert (reply.status_code, reply.content) == (200, b"")
