"""Scoring of raw answers: right ones count, and every kind of flaw does not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime.text.formats.dsml_v4 import V4Encoding
from ds_runtime_bench.engine import scoring

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


NAMES = st.from_regex(r"[a-z_]{1,6}", fullmatch=True)
SPOKEN = st.dictionaries(NAMES, JSON.filter(lambda v: "｜DSML｜" not in str(v)), max_size=3)


def as_v4(calls: list[tuple[str, dict[str, object]]]) -> str:
    """The answer as V4's own encoding, which follows DeepSeek's encoder, writes it."""
    made = [{"function": {"name": n, "arguments": a}} for n, a in calls]
    asked = [{"role": "user", "content": "?"}]
    answer = {"role": "assistant", "content": "", "tool_calls": made}
    text = V4Encoding().render([*asked, answer], None, False)
    return text.rpartition("<think>")[2]


@given(st.lists(st.tuples(st.sampled_from(["add", "get_weather"]), SPOKEN), min_size=1), st.data())
def test_calls_as_v4_writes_them_are_right_and_no_piece_of_them_is(calls, data):
    expected, raw = [{"name": n, "arguments": a} for n, a in calls], as_v4(calls)
    assert raw.startswith("</think>") and raw.endswith(scoring.EOS)
    for text in (raw, raw.removesuffix(scoring.EOS), raw.removeprefix("</think>"), "so" + raw):
        assert scoring.calls_correct(text, expected)
    assert not scoring.calls_correct(as_v4([*calls, ("add", {})]), expected)
    assert not scoring.calls_correct(as_v4([("other", {"a": 1}), *calls[1:]]), expected)
    whole = raw.removesuffix(scoring.EOS)
    at = data.draw(st.integers(0, len(whole) - 1))
    assert not scoring.calls_correct(whole[:at], expected)
    assert not scoring.calls_correct(raw.replace("</think>", "</think>x"), expected)


@pytest.mark.parametrize(("got", "want"), [(True, 1), ("5", 5), ([1], [1, 1]), ({"a": 1}, {})])
def test_values_that_only_look_alike_differ(got, want):
    assert not scoring.same_value(got, want)


def test_agreement():
    assert scoring.agreement([(1, 1), (2, 3), (4, 4), (5, 5)]) == 0.75
    assert scoring.agreement([]) == 0.0


PASSAGES = ("one two three", "four five six seven", "eight")


def planted(depth, tokens, first=0):
    """A key's prompt where every character is a token."""
    entry = {"fact": "The key is 5.", "depth": depth}
    entry["messages"] = [{"role": "user", "content": "Which key?"}]

    def encode(text):
        return [ord(c) for c in text]

    def decode(ids):
        return "".join(map(chr, ids))

    return scoring.planted(entry, PASSAGES, first, tokens, encode, decode)


def test_keys_are_planted_at_their_depth_between_words():
    system, question = planted(0.5, 67)
    assert question == {"role": "user", "content": "Which key?"}
    assert system["content"] == "one two three\n\nfour The key is 5. five six seven\n\neight"
    for depth in (0.0, 0.2, 0.9, 0.999):
        for tokens in (40, 64, 200):
            text = planted(depth, tokens, first=2)[0]["content"]
            assert text.count("The key is 5.") == 1
            assert len(text) + len("Which key?") + 3 == tokens + 1  # the space before it
            without = text.replace(" The key is 5.", "", 1)
            assert (without + " ").startswith("eight\n\none two "[: len(without)])
            before = text.index(" The key") / len(without)
            assert depth - 12 / len(without) <= before <= depth + 1 / len(without)


def test_a_key_is_the_whole_answer():
    assert scoring.key_correct("12345" + scoring.EOS, "12345")
    assert scoring.key_correct("<think>a</think>12345", "12345")
    for wrong in ("12346", "The key is 12345.", "12345 12345", ""):
        assert not scoring.key_correct(wrong, "12345")
