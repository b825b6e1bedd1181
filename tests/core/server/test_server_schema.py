"""Schemathesis over /openapi.json: whatever it sends, right or wrong, is answered below 500."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import schemathesis
    from schemathesis import GenerationMode


@pytest.fixture(scope="module")
def document(served):
    return served.http.get("/openapi.json").json()


def operations(document, url):
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=url)
    return [found.ok() for found in schema.get_all_operations()]


def attack(served, document, examples):
    """(operation, status) → how often."""
    seen: dict[tuple[str, int], int] = {}
    quiet = settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    for operation in operations(document, served.url):
        for mode in GenerationMode:
            if mode is GenerationMode.NEGATIVE and not operation.body:
                continue

            @quiet
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case):
                reply = case.call(timeout=20)
                key = case.operation.label, reply.status_code
                seen[key] = seen.get(key, 0) + 1
                assert reply.status_code < 500, (case.as_curl_command(), reply.text)
                if reply.status_code >= 400:
                    assert set(reply.json()) in ({"error"}, {"type", "error"}), reply.text

            ask()
    return seen


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
    check(attack(served, document, examples=5), document)
    assert served.chat("[say on]").json()["choices"][0]["message"]["content"] == "on"


@pytest.mark.slow
def test_no_request_is_a_server_error_with_more_examples(served, document):
    check(attack(served, document, examples=25), document)
