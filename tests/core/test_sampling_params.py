"""`SamplingParams` refuses what cannot be meant, whatever Python object it comes as."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime.errors import RequestError
from ds_runtime.sampling_params import SamplingParams

INTEGERS = ("max_tokens", "min_tokens", "top_k", "logprobs", "prompt_logprobs", "n", "seed")
FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
OPTIONAL = ("max_tokens", "logprobs", "prompt_logprobs", "seed")
BAD = (10**400, -(10**400), 10**5000, math.nan, math.inf, -math.inf, "1", "", [1], (), {}, True)


def refused(name, value):
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("value", BAD, ids=lambda v: repr(v)[:8] if v != 10**5000 else "huge")
@pytest.mark.parametrize("name", INTEGERS + FLOATS)
def test_numbers_that_are_none(name, value):
    refused(name, value)


@pytest.mark.parametrize("name", INTEGERS)
def test_an_integer_is_no_float(name):
    refused(name, 1.0)


@pytest.mark.parametrize("name", INTEGERS + FLOATS)
def test_none_only_where_it_means_something(name):
    if name in OPTIONAL:
        assert getattr(SamplingParams(**{name: None}), name) is None
    else:
        refused(name, None)


@pytest.mark.parametrize("name", ["ignore_eos", "include_stop", "skip_special_tokens"])
@pytest.mark.parametrize("value", [0, 1, "yes", None])
def test_flags_are_booleans(name, value):
    refused(name, value)


@pytest.mark.parametrize(
    "name, value",
    [
        ("stop", "END"),
        ("stop", [1]),
        ("stop", None),
        ("stop", ("",)),
        ("stop", ("x" * 1025,)),
        ("stop", ("x",) * 65),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("stop_token_ids", ("5",)),
        ("stop_token_ids", (True,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", tuple(range(257))),
        ("logit_bias", [(1, 2.0)]),
        ("logit_bias", {"1": 2.0}),
        ("logit_bias", {1: "2"}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: 10**400}),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {True: 0.0}),
    ],
)
def test_stops_and_biases(name, value):
    refused(name, value)


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("stop", ("x" * 1025,), "stop holds a string of 1025 characters: at most 1024"),
        ("stop", ("x",) * 65, "stop holds 65 strings: at most 64"),
        ("stop_token_ids", tuple(range(257)), "stop_token_ids holds 257 ids: at most 256"),
    ],
)
def test_bounds_are_said(field, value, said):
    with pytest.raises(RequestError, match=said):
        SamplingParams(**{field: value})
    one_less = (value[0][1:],) if len(value) == 1 else value[1:]
    assert getattr(SamplingParams(**{field: one_less}), field) == one_less


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "max_tokens": st.none() | st.integers(1, 1 << 31),
            "temperature": st.floats(0, 100) | st.integers(0, 100),
            "top_k": st.integers(0, 1 << 31),
            "presence_penalty": st.floats(-2, 2),
            "seed": st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
            "stop": st.lists(st.text(min_size=1, max_size=9), max_size=64).map(tuple),
            "stop_token_ids": st.lists(st.integers(0, 1 << 31), max_size=256).map(tuple),
            "logit_bias": st.dictionaries(st.integers(0, 1 << 31), st.floats(-100, 100)),
        },
    )
)
def test_what_is_taken_survives_the_wire(values):
    params = SamplingParams(**values)
    wire = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(wire, type=SamplingParams) == params
