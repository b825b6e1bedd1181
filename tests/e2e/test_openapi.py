"""The whole server against its own /openapi.json, with the demo model behind it."""

from __future__ import annotations

import httpx
import pytest
from served import serving

from schema_attack import attack

SECONDS = 40.0


@pytest.fixture(scope="module")
def url():
    with serving("demo", "--context-length", "256", "--max-running-requests", "4") as server:
        yield server.wait_url()


def held(url, examples, seconds):
    document = httpx.get(f"{url}/openapi.json").json()
    seen = attack(url, document, examples, seconds)
    assert {label for label, _ in seen} == {
        f"{method.upper()} {path}" for path, some in document["paths"].items() for method in some
    }
    body = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "max_tokens": 16}
    assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200
    return seen


def test_the_server_answers_as_its_document_says(url):
    seen = held(url, examples=2, seconds=SECONDS)
    assert {status for _, status in seen} >= {200, 400, 404}


@pytest.mark.slow
def test_the_server_answers_as_its_document_says_to_more(url):
    held(url, examples=60, seconds=240.0)
