"""Schemathesis over /openapi.json: whatever it sends, right or wrong, is answered below 500, with a
status, type and body that the document tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from schema_attack import attack


@pytest.fixture(scope="module")
def document(served):
    return served.http.get("/openapi.json").json()


def check(seen, document):
    assert {label for label, _ in seen} == {
        f"{method.upper()} {path}" for path, some in document["paths"].items() for method in some
    }
    posts = [label for label, _ in seen if label.startswith("POST /v1")]
    assert {status for label, status in seen if label in posts} >= {200, 400}


def test_every_route_is_documented(document):
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
    named = {path.replace("{name:path}", "{name}") for path in document["paths"]}
    assert {path for path in named if f"`{path}`" not in page} == set()


def test_no_request_is_a_server_error(served, document):
    check(attack(served.url, document, examples=5), document)
    assert served.chat("[say on]").json()["choices"][0]["message"]["content"] == "on"


@pytest.mark.slow
def test_no_request_is_a_server_error_with_more_examples(served, document):
    check(attack(served.url, document, examples=25), document)
