"""A null in a request is a field that was left out, in every body and at every depth."""

from __future__ import annotations

from typing import Any

import pytest

from ds_runtime.server.errors import ApiError
from ds_runtime.server.generate import protocol
from ds_runtime.server.generate.protocol import Body
from ds_runtime.server.http.body import validate
from ds_runtime.server.protocols import anthropic, responses
from ds_runtime.server.protocols import native as generate

CHAT = [{"role": "user", "content": "[say ok]"}]
REQUIRED = {
    "messages": CHAT,
    "prompt": "[count 40]",
    "input": "hi",
    "max_tokens": 4,
    "lora_name": "a",
    "lora_path": "b",
    "tokens": [1],
    "type": "enabled",
}


def bodies(kind: type[Body] = Body) -> list[type[Body]]:
    found = list(kind.__subclasses__())
    return found + [deeper for kind in found for deeper in bodies(kind)]


KINDS = {kind.__name__: kind for kind in bodies() if kind.__module__.startswith("ds_runtime.")}


def least(kind):
    return {n: REQUIRED[n] for n, field in kind.model_fields.items() if field.is_required()}


def test_every_body_is_here():
    assert {"ChatRequest", "CompletionRequest", "GenerateParams", "ResponsesRequest"} <= set(KINDS)
    assert {kind.__module__ for kind in KINDS.values()} >= {
        module.__name__ for module in (protocol, anthropic, responses, generate)
    }


@pytest.mark.parametrize("name", KINDS)
def test_null_is_the_default(name):
    kind = KINDS[name]
    plain = validate(kind, least(kind))
    for field, info in kind.model_fields.items():
        if info.is_required() and info.annotation is Any:
            assert getattr(validate(kind, {**least(kind), field: None}), field) is None
        elif info.is_required():
            with pytest.raises(ApiError, match=field):
                validate(kind, {**least(kind), field: None})
        else:
            found = validate(kind, {**least(kind), field: None})
            assert found == plain and found.model_fields_set == plain.model_fields_set, field


def test_null_is_the_default_in_nested_bodies():
    sent = {"text": "a", "sampling_params": {"max_tokens": None, "max_new_tokens": 3}}
    found = validate(generate.GenerateRequest, sent).sampling_params
    assert found.max_new_tokens == 3
    sent["sampling_params"] = [{"max_new_tokens": None}, {"n": None, "max_new_tokens": 3}]
    found = validate(generate.GenerateRequest, sent).sampling_params
    assert [one.max_new_tokens for one in found] == [128, 3]
    found = validate(generate.GenerateRequest, {"text": "a", "sampling_params": None})
    assert found.sampling_params == generate.GenerateParams()


@pytest.mark.parametrize("sent", [{}, {"max_tokens": None}], ids=["left out", "null"])
def test_a_completion_without_a_limit_ends_after_the_default(served, sent):
    body = {"prompt": "[go ab]", "ignore_eos": True, **sent}
    answer = served.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 16
    params = {"ignore_eos": True, "max_new_tokens": None} if sent else {"ignore_eos": True}
    answer = served.http.post("/generate", json={"text": "[go ab]", "sampling_params": params})
    assert answer.status_code == 200, answer.text
    assert answer.json()["meta_info"]["completion_tokens"] == 128
