"""Schemathesis over a server's /openapi.json: every answer is one that the document tells."""

from __future__ import annotations

import time
import warnings

from hypothesis import HealthCheck, given, settings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi import checks

CONFORM = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
    checks.unsupported_method,
    checks.allow_header_conformance,
]


def operations(document, url):
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=url)
    return [found.ok() for found in schema.get_all_operations()]


def attack(url, document, examples, seconds=1e9, but=()):
    """(operation, status) → how often. No more is sent after so many seconds."""
    seen: dict[tuple[str, int], int] = {}
    end = time.monotonic() + seconds
    quiet = settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    for operation in operations(document, url):
        for mode in GenerationMode:
            if operation.label in but or (mode is GenerationMode.NEGATIVE and not operation.body):
                continue

            @quiet
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case):
                if time.monotonic() > end:
                    return
                reply = case.call(timeout=60)
                key = case.operation.label, reply.status_code
                seen[key] = seen.get(key, 0) + 1
                assert reply.status_code < 500, (case.as_curl_command(), reply.text)
                if reply.status_code >= 400:
                    assert set(reply.json()) in ({"error"}, {"type", "error"}), reply.text
                case.validate_response(reply, checks=CONFORM)

            ask()
    return seen
