"""Scoring of raw answers: right ones count, and every kind of flaw does not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime.bench import scoring

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=6), JSON, max_size=3)


def written(*calls: tuple[str, object], eos: bool = True) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
        f"{json.dumps(arguments, ensure_ascii=False)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    text = f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"
    return text + scoring.EOS if eos else text


@pytest.mark.parametrize(
    ("raw", "right"),
    [
        ("<think>4+5</think>9", True),
        ("9", True),
        (" 9 " + scoring.EOS, True),
        ("-9", False),
        ("<think>9</think>", False),
        ("<think>4+5=9", False),
        ("9.", False),
        ("the sum is 9", False),
        ("9 9", False),
    ],
)
def test_sums(raw, right):
    assert scoring.sum_correct(raw, 9) is right


@given(st.lists(st.tuples(st.sampled_from(["add", "get_weather"]), ARGUMENTS), min_size=1))
def test_calls_as_the_format_writes_them_are_right(calls):
    expected = [{"name": n, "arguments": a} for n, a in calls]
    assert scoring.calls_correct(written(*calls), expected)
    assert scoring.calls_correct(written(*calls, eos=False), expected)
    assert not scoring.calls_correct(written(*calls, ("add", {})), expected)
    assert not scoring.calls_correct(written(("other", {"a": 1}), *calls[1:]), expected)


@given(ARGUMENTS, st.data())
def test_a_call_with_a_piece_missing_is_wrong(arguments, data):
    raw = written(("add", arguments), eos=False)
    at = data.draw(st.integers(0, len(raw) - 1))
    assert not scoring.calls_correct(raw[:at], [{"name": "add", "arguments": arguments}])
    assert not scoring.calls_correct("x" + raw, [{"name": "add", "arguments": arguments}])


@pytest.mark.parametrize(("got", "want"), [(True, 1), ("5", 5), ([1], [1, 1]), ({"a": 1}, {})])
def test_values_that_only_look_alike_differ(got, want):
    assert not scoring.same_value(got, want)


def test_agreement():
    assert scoring.agreement([(1, 1), (2, 3), (4, 4), (5, 5)]) == 0.75
    assert scoring.agreement([]) == 0.0
