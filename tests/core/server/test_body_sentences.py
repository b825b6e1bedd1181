"""What is said of a field that is wrong is in JSON's words, whatever pydantic's are."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime.server.errors import ApiError, shown
from ds_runtime.server.generate.protocol import Body, ChatRequest
from ds_runtime.server.http.body import validate
from ds_runtime.server.protocols import anthropic, native, responses

WRONG = (True, 1, 1.5, -(10**12), 10**12, "", "x", "é", "x" * 2000, [], [1], [True], {}, {"a": []})
MODULES = (anthropic, native, responses)  # which define bodies


def kinds(base: type[Body] = Body) -> list[type[Body]]:
    return [base, *(kind for sub in base.__subclasses__() for kind in kinds(sub))]


@pytest.mark.parametrize("kind", [k for k in kinds() if k.__module__.startswith("ds_runtime.")])
def test_no_sentence_is_pydantic_s(kind: type[Body]) -> None:
    for name in kind.model_fields:
        for value in (*WRONG, [0] * 20_000, ["x"] * 20_000):
            try:
                validate(kind, {name: value})
            except ApiError as e:
                assert not re.search(r"Input|validation|dictionary|instance|pattern", str(e)), e
                assert not re.search(r"should be|\bNone\b|\bTrue\b|\bFalse\b", str(e)), e


@pytest.mark.parametrize("name", ["rid", "cache_salt"])
@pytest.mark.parametrize("kind", [native.GenerateRequest, ChatRequest])
def test_names_of_requests_are_fields_that_the_client_has(kind: type[Body], name: str) -> None:
    """Not the branch of a union that pydantic tried: `rid.constrained-str`."""
    prompt: dict[str, object] = {"text": "x"}
    if kind is ChatRequest:
        prompt = {"messages": [{"role": "user", "content": "x"}]}
    refused = 0
    for value in (3, "", "x" * 2000, ["x"] * 5000):
        try:
            validate(kind, {**prompt, name: value})
        except ApiError as e:
            refused += 1
            assert e.param is not None and e.param.partition("[")[0] == name, e.param
            assert "constrained" not in f"{e.param} {e}"
            assert not re.search(r"\bshould\b", str(e)), e
    assert refused >= 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
)


@given(JSON.filter(lambda value: not isinstance(value, str)))
def test_values_of_requests_are_shown_as_json(value: object) -> None:
    """As the client wrote them: null and true, not None and True; long ones are cut."""
    said = shown(value)
    whole = json.dumps(value, ensure_ascii=False)
    assert len(said) <= 80 and (said == whole if len(whole) <= 80 else said.endswith("..."))
