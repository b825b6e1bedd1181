"""What clients sent once, sent again byte by byte: every answer has its status and its shape."""

from __future__ import annotations

import json
import socket
from http.client import HTTPResponse
from urllib.parse import urlsplit

import pytest
from packages import CLIENTS, known
from record import FOLDER, read, split
from shapes import Answer, check


def send(url, raw):
    """The answer to raw bytes."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port), timeout=60) as own:
        own.sendall(raw)
        reply = HTTPResponse(own, method=raw.split(b" ", 1)[0].decode())
        reply.begin()
        return Answer(reply.status, reply.headers.get("content-type", ""), reply.read())


def test_every_client_is_recorded():
    assert {path.stem for path in FOLDER.iterdir()} == set(CLIENTS) == set(known())
    for client, own in CLIENTS.items():
        assert set(known()[client]) == set(own.told)


EACH = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize(
    ("client", "target", "fields"),
    [
        ("guidellm", "/v1/chat/completions", {"stream_options": EACH}),
        ("guidellm", "/v1/completions", {"stream_options": EACH}),
        ("lm_eval", "/tokenizer_info", {}),
        ("lm_eval", "/tokenize", {"add_special_tokens": False}),
        ("sglang", "/generate", {"stream": True, "return_logprob": False}),
        ("sglang", "/generate", {"return_logprob": True}),
        ("litellm", "/v1/messages", {"stream": True}),
        ("langchain", "/v1/messages", {"stream": True}),
        ("openai_agents", "/v1/responses", {"stream": True}),
        ("openai", "/v1/embeddings", {}),
    ],
)
def test_the_recordings_hold_what_clients_are_known_for(client, target, fields):
    sent = [split(one.raw) for one in read(client)]
    bodies = [json.loads(body or b"{}") for _, path, _, body in sent if path == target]
    assert any(body | fields == body for body in bodies)


@pytest.mark.parametrize("client", CLIENTS)
def test_what_a_client_sent_is_answered(url, client):
    ids = {}  # of the responses that later requests name
    for one in read(client):
        raw = one.raw
        for before, now in ids.items():
            raw = raw.replace(before, now)
        method, target, headers, body = split(raw)
        assert int(headers.get(b"content-length", b"0")) == len(body)
        answer = send(url, raw)
        where = (
            f"{one.use}: {method} {target} {body.decode()[:2000]}\n{answer.body.decode()[:4000]}"
        )
        assert answer.status == one.status, where
        try:
            check(method, target, json.loads(body or b"{}"), answer)
        except Exception as e:
            e.add_note(where)
            raise
        if one.made is not None:
            found = answer.body.partition(b'"id":"resp_')[2].partition(b'"')[0]
            ids[one.made.encode()] = b"resp_" + found
