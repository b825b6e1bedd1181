"""Bad input gets a sentence with the right status, and the server goes on."""

from __future__ import annotations

import json
import socket
import tracemalloc

import httpx
import pytest
from server_harness import serving


def error(response, status):
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


CHAT = {"messages": [{"role": "user", "content": "[say ok]"}]}
BAD_CHAT = [
    ({"temperature": -1}, "temperature", "between 0.0 and 100.0"),
    ({"temperature": "hot"}, "temperature", '"hot": must be a number'),
    ({"temperature": 10**400}, "temperature", "temperature"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_p": 1.5}, "top_p", "between"),
    ({"top_k": -2}, "top_k", "between"),
    ({"top_k": 1.5}, "top_k", "integer"),
    ({"min_p": 2}, "min_p", "between"),
    ({"presence_penalty": 3}, "presence_penalty", "between -2.0 and 2.0"),
    ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"max_tokens": 0}, "max_tokens", "between 1"),
    ({"max_tokens": True}, "max_tokens", "integer"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "send one of them"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens", "above max_tokens 2"),
    ({"max_tokens": 4096}, "max_tokens", "but the context holds 4096"),
    ({"n": 0}, "n", "between 1 and 128"),
    ({"n": 129}, "n", "between 1 and 128"),
    ({"seed": 1 << 63}, "seed", "between"),
    ({"stop": ["a", ""]}, "stop", "empty string"),
    ({"stop": [1]}, "stop[0]", "must be a string"),
    ({"stop": ["x"] * 65}, "stop", "at most 64"),
    ({"stop_token_ids": [512]}, "stop_token_ids", "ids are 0 to 511"),
    ({"logit_bias": {"512": 1}}, "logit_bias", "ids are 0 to 511"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "must be a token id"),
    ({"logit_bias": {"²": 1}}, "logit_bias", "must be a token id"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "must be a token id"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "within ±100"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21: must be"),
    ({"logprobs": 3}, "logprobs", "must be true or false"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "between"),
    ({"priority": 1 << 40}, "priority", "less than"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ({"stream": True, "stream_options": {"usage": 1}}, "stream_options.usage", "did you mean"),
    ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
    ({"zzz": 1}, "zzz", "remove it"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "must be text, json_object or"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "is missing",
    ),
    ({"json_schema": "{"}, "json_schema", "is no JSON"),
    ({"json_schema": False}, "json_schema", "must be an object"),
    ({"regex": ""}, "regex", "must be a text that is not empty"),
    ({"regex": "a", "ebnf": "b"}, "ebnf", "regex and ebnf both rule the output: send one"),
    ({"ebnf": "x" * 300_000}, "ebnf", "at most 262144"),
    ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml", "use json, regex, choice"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice", "must be strings"),
    ({"structured_outputs": {"json": 3}}, "structured_outputs.json", "object or a boolean"),
    ({"tool_choice": "required"}, "tool_choice", "tools holds no tool"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "must be none, auto, required"),
    ({"tool_choice": 3}, "tool_choice", "must be none, auto, required"),
    ({"audio": {}}, "audio", "leave it out"),
    ({"messages": []}, "messages", "must be a list of at least 1 item, not of 0"),
    ({"rid": "a b"}, "rid", "must be printable ASCII without white space"),
    (
        {"chat_template_kwargs": {"thinking": "no"}},
        "chat_template_kwargs.thinking",
        "true or false",
    ),
    ({"reasoning_effort": 3}, "reasoning_effort", "must be a string"),
    ({"messages": None}, "messages", "must be a list"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'system'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "needs content"),
    (
        {"messages": [{"role": "user", "content": 3}]},
        "messages[0].content",
        "must be a string or a list",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
        "'text'",
    ),
    (
        {"messages": [{"role": "user", "content": "a\ud800"}]},
        "messages",
        "unpaired surrogate \\ud800: send valid Unicode",
    ),
    ({"stop": ["\udfff"]}, "stop", "unpaired surrogate \\udfff"),
    ({"\ud800": 1}, None, "the name of a field holds"),
    ({"max_tokens": "\ud800"}, "max_tokens", "unpaired surrogate"),
    ({"user": {"a": [{"\udc00": 1}]}}, "user", "unpaired surrogate \\udc00"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens is 0: must"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "may not set 'tools'"),
    (
        {"messages": [{"role": "tool", "content": [], "x": {"y": 1}}], "tools": [1]},
        "tools[0]",
        "an",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0]", "only"),
    (
        {"tools": [{"type": "function", "function": {"name": 'f" string="true'}}]},
        "tools[0].function.name",
        "without white space, quotes",
    ),
    ({"tools": [{"type": "function", "function": {"name": 1}}]}, "tools[0].function.name", "name"),
]


@pytest.mark.parametrize("extra, param, message", BAD_CHAT, ids=range(len(BAD_CHAT)))
def test_bad_chat_values(served, extra, param, message):
    raw = json.dumps(CHAT | extra).encode()
    found = error(served.http.post("/v1/chat/completions", content=raw), 400)
    assert found["type"] == "invalid_request_error"
    assert found["param"] == param and message in found["message"], found


BAD_COMPLETIONS = [
    ({}, "prompt is missing"),
    ({"prompt": ""}, "prompt is empty"),
    ({"prompt": []}, "empty list"),
    ({"prompt": [[]]}, "a list of token ids"),
    ({"prompt": ["a", ""]}, "prompt is empty"),
    ({"prompt": 5}, "must be a string"),
    ({"prompt": ["a", 5]}, "must be a string"),
    ({"prompt": [1, True]}, "must be a string"),
    ({"prompt": [5, 512]}, "prompt holds token id 512: the vocabulary's ids are 0 to 511"),
    ({"prompt": [-1]}, "token id -1"),
    ({"prompt": [[5], [10**30]]}, "token id 1000"),
    ({"prompt": ["a"] * 1025}, "at most 1024"),
    ({"prompt": ["a"] * 100, "n": 11}, "make 1100 choices"),
    ({"prompt": "a\ud800"}, "unpaired surrogate"),
    ({"prompt": [5] * 4096}, "the prompt has 4096 tokens, but the context holds 4096"),
    ({"prompt": [5] * 4090}, "at most 6 tokens"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "best_of": 4}, "best_of"),
    ({"prompt": "a", "best_of": True}, "best_of true is not supported: leave it out or send 1"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
]


@pytest.mark.parametrize("body, message", BAD_COMPLETIONS, ids=range(len(BAD_COMPLETIONS)))
def test_bad_completions(served, body, message):
    raw = json.dumps(body).encode()
    assert message in error(served.http.post("/v1/completions", content=raw), 400)["message"]


BAD_NATIVE = [
    ("/generate", {}, "exactly one of text and input_ids"),
    ("/generate", {"text": "a", "input_ids": [1]}, "exactly one"),
    ("/generate", {"text": ""}, "prompt is empty"),
    ("/generate", {"input_ids": [600]}, "token id 600"),
    ("/generate", {"input_ids": ["x"]}, "input_ids[0]"),
    ("/generate", {"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens is -1"),
    ("/generate", {"text": "a", "sampling_params": {"top": 1}}, "'sampling_params.top'"),
    ("/generate", {"text": "a", "sampling_params": {"top_p": "x"}}, "sampling_params.top_p is"),
    ("/tokenize", {}, "exactly one of prompt and messages"),
    ("/tokenize", {"messages": [{"role": "x"}]}, "messages[0].role"),
    ("/tokenize", {"prompt": "x" * 10**6}, "what needs 4 times as many is not counted"),
    (
        "/tokenize",
        {"messages": [{"role": "user", "content": "x" * 10**6}]},
        "what needs 4 times as many is not counted",
    ),
    (
        "/generate",
        {"text": "x", "sampling_params": {"max_tokens": 3}},
        "sampling_params.max_tokens 3 is not supported: did you mean 'max_new_tokens'?",
    ),
    ("/detokenize", {"tokens": [512]}, "token id 512"),
    ("/detokenize", {"tokens": "a"}, "must be a list"),
]


@pytest.mark.parametrize("path, body, message", BAD_NATIVE, ids=range(len(BAD_NATIVE)))
def test_bad_native(served, path, body, message):
    assert message in error(served.post(path, **body), 400)["message"]


@pytest.mark.parametrize(
    "raw, message",
    [
        (b'{"messages": [}', "not valid JSON: Expecting value at line 1, column 15"),
        (b'{\n "a": 1\n "b"}', "at line 3, column 2"),
        (b"", "the body is empty: send a JSON object"),
        (b" \n", "the body is empty"),
        (b"[]", "is a JSON array: an object is needed"),
        (b'"x"', "is a JSON string"),
        (b"\xff{}", "not UTF-8: byte 0 is 0xff"),
        (b'{"temperature": NaN}', "NaN is not a JSON number"),
        (b'{"temperature": 1e999, "messages": [{"role": "user", "content": "x"}]}', "is inf"),
        (b'{"n": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[" * 60_000, "nested too deeply"),
        (b'{"messages": ' + b'{"a":' * 60_000, "nested too deeply"),
    ],
    ids=range(12),
)
def test_bad_json(served, raw, message):
    found = error(served.http.post("/v1/chat/completions", content=raw), 400)
    assert message in found["message"]


def test_prompts_over_the_context(served):
    found = error(served.chat("word " * 3000), 400)
    assert (found["code"], found["param"]) == ("context_length_exceeded", "messages")
    tokens = served.post("/tokenize", messages=[{"role": "user", "content": "word " * 3000}])
    assert f"the prompt has {tokens.json()['count']} tokens" in found["message"]
    assert "4096" in found["message"] and "--context-length" in found["message"]
    served.engine.submits.clear()
    ids = served.tokenizer.encode("[say x]")
    room = 4096 - len(ids)
    body = {"prompt": ids, "max_tokens": room}
    assert served.post("/v1/completions", **body).status_code == 200
    found = error(served.post("/v1/completions", **body | {"max_tokens": room + 1}), 400)
    assert (found["code"], found["param"]) == ("context_length_exceeded", "max_tokens")
    assert len(served.engine.submits) == 1


def test_unknown_model_and_routes(served):
    found = error(served.chat("[say x]", model="gpt-4"), 404)
    assert (found["code"], found["param"]) == ("model_not_found", "model")
    assert "'gpt-4'" in found["message"] and "'fake'" in found["message"]
    assert error(served.http.get("/v1/models/other"), 404)["code"] == "model_not_found"
    assert "no route /v1/nothing" in error(served.http.get("/v1/nothing"), 404)["message"]
    found = error(served.http.get("/v1/completions"), 405)
    assert found["code"] == "method_not_allowed" and "POST" in found["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_100_mb_body_is_refused_and_not_kept(served, chunked):
    piece = b"x" * (1 << 20)

    def body():
        for _ in range(100):
            yield piece

    headers = {} if chunked else {"content-length": str(100 << 20)}
    tracemalloc.start()
    try:
        reply = served.http.post("/v1/completions", content=body(), headers=headers)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    found = error(reply, 413)
    assert found["code"] == "body_too_large" and "limit is 1114112" in found["message"]
    assert peak < 40 << 20
    assert served.chat("[say on]").json()["choices"][0]["message"]["content"] == "on"


def test_a_client_that_asks_first_sends_nothing(served):
    url = httpx.URL(served.url)
    with socket.create_connection((url.host, url.port), timeout=5) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 104857600\r\n"
            b"Content-Type: application/json\r\nExpect: 100-continue\r\n\r\n"
        )
        assert raw.recv(1000).startswith(b"HTTP/1.1 413")


def test_the_limit_is_a_setting_and_counts_exactly(bpe_folder):
    with serving(bpe_folder, max_body=100) as served:
        raw = json.dumps({"prompt": "[say x]"}).encode()
        assert served.http.post("/v1/completions", content=raw.ljust(100)).status_code == 200
        error(served.http.post("/v1/completions", content=raw.ljust(101)), 413)


def test_api_key(bpe_folder):
    with serving(bpe_folder, api_key=("secret",)) as served:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            for path in ("/v1/models", "/flush_cache"):
                found = error(served.http.get(path, headers=headers), 401)
                assert found["code"] == "invalid_api_key"
        ok = {"authorization": "Bearer secret"}
        assert served.http.get("/v1/models", headers=ok).status_code == 200
        assert served.http.get("/metrics").status_code == 200


def test_no_template(bpe_folder):
    with serving(bpe_folder, template=False) as served:
        assert "--chat-template FILE" in error(served.chat("[say x]"), 400)["message"]
        assert served.post("/v1/completions", prompt="[say x]").status_code == 200


def test_before_the_engine_is_ready(bpe_folder):
    with serving(bpe_folder, ready=False) as served:
        reply = served.http.get("/health")
        assert (reply.status_code, reply.json()) == (503, {"status": "starting"})
        reply = served.chat("[say x]")
        assert error(reply, 503)["code"] == "engine_starting"
        reply = served.chat("[say so]", model="an-adapter")  # of which nobody knows yet
        assert error(reply, 503)["code"] == "engine_starting"
        assert int(reply.headers["retry-after"]) > 0
        error(served.http.post("/flush_cache"), 503)
        assert served.post("/tokenize", prompt="Hi").json()["max_model_len"] is None
