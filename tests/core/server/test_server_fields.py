"""What a field may say on a route that has no such field, or has another of its name."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_server_nulls import KINDS, least

from ds_runtime.server.errors import ApiError
from ds_runtime.server.generate.protocol import (
    ChatRequest,
    CompletionRequest,
    StreamOptions,
    TokenizeRequest,
)
from ds_runtime.server.http.body import nested_bodies, validate
from ds_runtime.server.protocols.fields import (
    ANTHROPIC,
    ENGINES,
    NATIVE,
    OPENAI,
    REQUESTS,
    is_neutral,
    neutral_values,
)
from ds_runtime.server.protocols.native import GenerateParams, GenerateRequest
from peer_fields import OPERATORS
from peer_fields import SGLANG as SGLANG_TYPES
from peer_fields import SGLANG_SAMPLING as SGLANG_PARAMS
from peer_fields import VLLM as VLLM_TYPES

ASKS = {"weird": [1]}  # what no field takes as nothing


@pytest.mark.parametrize("name", KINDS)
def test_every_body_takes_what_asks_for_nothing(name):
    kind = KINDS[name]
    plain = validate(kind, least(kind))
    foreign = {n: also for n, also in kind.KNOWN.items() if n not in kind.model_fields}
    for field, also in foreign.items():
        for value in neutral_values(()) if also is None else neutral_values(also):
            assert validate(kind, {**least(kind), field: value}) == plain
        if also is None:
            assert validate(kind, {**least(kind), field: ASKS}) == plain
            continue
        with pytest.raises(ApiError) as caught:
            validate(kind, {**least(kind), field: ASKS})
        assert caught.value.param == field and caught.value.status == 400
        assert field in caught.value.message and "is not supported" in caught.value.message


def test_the_declarations_know_every_field_of_the_peers():
    for peer in (VLLM_TYPES, SGLANG_TYPES, OPERATORS):
        names = {name for fields in peer.values() for name in fields}
        unnamed = {"model", "vllm_xargs"}  # a null of any name passes
        assert names <= REQUESTS.keys() | unnamed, names - REQUESTS.keys()
    own = SGLANG_PARAMS.keys() - GenerateParams.model_fields.keys()
    assert own <= GenerateParams.KNOWN.keys()
    assert REQUESTS.keys() == OPENAI.keys() | ANTHROPIC.keys() | ENGINES.keys() | NATIVE.keys()


@pytest.mark.parametrize("name", OPERATORS)
def test_what_peers_send_operators_by_default(name):
    kind = KINDS[name]
    for field, value in OPERATORS[name].items():
        validate(kind, {**least(kind), field: value})
        if field not in kind.model_fields and kind.KNOWN[field] is not None:
            with pytest.raises(ApiError, match="is not supported"):
                validate(kind, {**least(kind), field: ASKS})


def test_what_is_said_of_a_beam_search_that_is_none():
    for value in (0, 0.8, 1, 2):
        validate(ChatRequest, least(ChatRequest) | {"length_penalty": value})
    with pytest.raises(ApiError, match="use_beam_search"):
        validate(ChatRequest, least(ChatRequest) | {"use_beam_search": True})


JSON = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 0.0, 1.0, "", "x"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.just("a"), inner, max_size=1),
    max_leaves=3,
)


@given(JSON, st.lists(JSON.filter(lambda value: value is not None), max_size=2))
def test_a_value_is_neutral_if_it_is_one_of_them(value, also):
    """true is no 1, and a false is neutral unless true is."""

    def same(a, b):
        return type(a) is type(b) and a == b if bool in (type(a), type(b)) else a == b

    known = [None, "", [], *also, *([] if any(one is True for one in also) else [False])]
    assert is_neutral(value, tuple(also)) == any(same(value, one) for one in known)
    assert is_neutral(value, None)


CLOSE = [
    (ChatRequest, "temprature", "temperature"),
    (ChatRequest, "max_token", "max_tokens"),
    (ChatRequest, "message", "messages"),
    (ChatRequest, "max_new_tokens", "max_tokens"),
    (StreamOptions, "usage", "include_usage"),
    (StreamOptions, "include-usage", "include_usage"),
    (CompletionRequest, "promt", "prompt"),
    (GenerateParams, "max_tokens", "max_new_tokens"),
    (GenerateParams, "seed", "sampling_seed"),
    (GenerateRequest, "temperature", "sampling_params.temperature"),
    (GenerateRequest, "max_new_tokens", "sampling_params.max_new_tokens"),
    (CompletionRequest, "include_usage", "stream_options.include_usage"),
    (ChatRequest, "colour", None),
    (ChatRequest, "tempo", None),
    (ChatRequest, "prompt_embeds", None),
    (ChatRequest, "mode", "model"),
    (ChatRequest, "images", None),
    (CompletionRequest, "messages_", None),
    (GenerateParams, "beam", None),
    (TokenizeRequest, "text", None),
    (ChatRequest, "t" * 5000, None),
]


@pytest.mark.parametrize("kind, name, near", CLOSE, ids=[n[:20] for _, n, _ in CLOSE])
def test_a_suggestion_is_made_if_one_is_close(kind, name, near):
    with pytest.raises(ApiError) as caught:
        validate(kind, {**least(kind), name: ASKS})
    message = caught.value.message
    assert ("did you mean" in message) == (near is not None), message
    assert near is None or f"did you mean {near!r}?" in message


NESTED = [(kind, name) for kind in KINDS.values() for name in nested_bodies(kind)]


@pytest.mark.parametrize("kind, name", NESTED, ids=[f"{k.__name__}.{n}" for k, n in NESTED])
@pytest.mark.parametrize("value", [5, "x", True, 0.5])
def test_what_is_no_object_where_one_is_needed_is_told_in_words_of_json(kind, name, value):
    with pytest.raises(ApiError) as caught:
        validate(kind, {**least(kind), name: value})
    assert caught.value.param == name
    assert caught.value.message.startswith(f"{name} is {json.dumps(value)}: must be an object")
    assert nested_bodies(kind)[name].__name__ not in caught.value.message


@pytest.mark.parametrize("name", KINDS)
def test_no_remedy_comes_twice(name):
    kind = KINDS[name]
    for field in kind.KNOWN.keys() - kind.model_fields.keys():
        if kind.KNOWN[field] is not None:
            with pytest.raises(ApiError) as caught:
                validate(kind, {**least(kind), field: ASKS})
            remedies = caught.value.message.split(" or send ")[1:]
            assert len(remedies) == len(set(remedies)), caught.value.message


def test_a_null_of_any_name_is_left_out():
    assert validate(ChatRequest, least(ChatRequest) | {"colour": None}) == validate(
        ChatRequest, least(ChatRequest)
    )


def test_a_false_of_another_type():
    """Completions' logprobs is a number; chats' is true or false."""
    asked = least(CompletionRequest) | {"logprobs": False}
    assert validate(CompletionRequest, asked).logprobs is None
    with pytest.raises(ApiError, match="logprobs"):
        validate(CompletionRequest, least(CompletionRequest) | {"logprobs": True})


def test_the_document_says_so(served):
    schemas = served.http.get("/openapi.json").json()
    operation = schemas["paths"]["/v1/chat/completions"]["post"]
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"]["best_of"] == {"enum": [None, "", [], False, 1]}
    assert body["properties"]["user"] == {} and "messages" in body["properties"]
    options = schemas["components"]["schemas"]["StreamOptions"]["properties"]
    assert options["include_obfuscation"] == {}
    params = schemas["components"]["schemas"]["GenerateParams"]["properties"]
    assert params["structural_tag"] == {"enum": [None, "", [], False]}


def test_special_tokens_before_a_text(served):
    for asked, begins in ((None, True), (True, True), (False, False)):
        answer = served.post("/v1/completions", prompt="[say a]", add_special_tokens=asked)
        assert answer.status_code == 200
        assert (served.engine.submits[-1].prompt[0] == 0) == begins


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_that_is_not_to_be_told(parsing, stream):
    body = {
        "messages": [{"role": "user", "content": "[say <think>two</think>three]"}],
        "include_reasoning": False,
        "stream": stream,
        "separate_reasoning": None,
    }
    text = parsing.post("/v1/chat/completions", **body).text
    assert "reasoning_content" not in text and '"content":"t' in text
    body["include_reasoning"] = True
    assert "reasoning_content" in parsing.post("/v1/chat/completions", **body).text
