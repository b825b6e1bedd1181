"""Incremental decoding against the tokenizers library; stop strings against a plain search."""

from __future__ import annotations

import itertools
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from ds_runtime.sampling_params import SamplingParams
from ds_runtime.text.detokenizer import OutputState, TextDecoder
from ds_runtime.text.stops import StopMatcher
from examples import examples

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
EASY = st.text("ab<｜你", max_size=12)


def cut(items, places):
    """`items` in pieces, cut at `places` (taken modulo the length)."""
    edges = sorted({0, len(items), *(p % (len(items) + 1) for p in places)})
    return [items[a:b] for a, b in itertools.pairwise(edges)] or [items]


@settings(max_examples=examples(150), deadline=None)
@given(text=TEXTS, places=st.lists(st.integers(0, 200), max_size=8))
def test_any_split_gives_the_same_text(bpe, text, places):
    state = OutputState(bpe, SamplingParams(skip_special_tokens=False))
    out = []
    pieces = cut(bpe.encode(text), places)
    for i, piece in enumerate(pieces):
        delta = state.push(piece, "length" if i == len(pieces) - 1 else None)
        out.append(delta.text)
    assert "".join(out) == text
    assert delta.finished and delta.finish_reason == "length"


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_any_ids_decode_as_the_library_decodes_them(bpe, data, skip):
    """Also ids that are not valid UTF-8, special, or outside the vocabulary."""
    ids = data.draw(st.lists(st.integers(0, bpe.vocab_size + 3), max_size=30))
    decoder = TextDecoder(bpe, skip)
    pieces = [decoder.push(t) for t in ids]
    assert "".join(pieces) + decoder.flush() == bpe.backend.decode(ids, skip_special_tokens=skip)


def test_no_half_character_is_ever_emitted(bpe):
    text = "a👍🏽b你é"
    ids = [bpe.backend.token_to_id(c) for b in text.encode() for c in [_letter(bpe, b)]]
    state = OutputState(bpe, SamplingParams())
    pieces = [state.push([t]).text for t in ids]
    assert "".join(pieces) == text and "�" not in "".join(pieces)
    assert pieces[1:5] == ["", "", "", "👍"]


def test_a_stream_cut_inside_a_character_says_so(bpe):
    first = bpe.backend.token_to_id(_letter(bpe, "你".encode()[0]))
    state = OutputState(bpe, SamplingParams())
    assert state.push([first]).text == ""
    assert state.push([], "length").text == "�"


def test_a_real_replacement_character_passes(bpe):
    ids = bpe.encode("��" * 50)
    decoder = TextDecoder(bpe)
    assert "".join(decoder.push(t) for t in ids) == "��" * 50


def _letter(bpe, byte):
    return next(c for c, b in _alphabet().items() if b == byte)


def _alphabet():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {c: b for b, c in bytes_to_unicode().items()}


def first_match(text, stops):
    """(text before, stop): the match that ends first, the longest of those."""
    found = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


@settings(max_examples=examples(400), deadline=None)
@given(
    text=EASY,
    stops=st.lists(st.text("ab<｜你", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    places=st.lists(st.integers(0, 40), max_size=6),
)
def test_stops_are_found_however_the_text_is_cut(text, stops, places):
    matcher = StopMatcher(stops)
    out, matched = "", None
    for piece in cut(text, places):
        released, matched = matcher.push(piece)
        out += released
        if matched is not None:
            break
        # Nothing is held longer than it must be: what is held begins a stop string.
        held = text[len(out) : len(out) + len(matcher._held)]
        assert held == matcher._held
        assert not held or any(s.startswith(held) for s in stops)
    if matched is None:
        out += matcher.flush()
    assert (out, matched) == first_match(text, stops)


def test_stop_string_at_every_token_boundary(bpe):
    ids = bpe.encode("The answer is STOP and more text")
    for i in range(len(ids) + 1):
        for include in (False, True):
            params = SamplingParams(stop=("STOP",), include_stop=include)
            state = OutputState(bpe, params)
            deltas = [state.push(ids[:i]), state.push(ids[i:], "length")]
            text = "".join(d.text for d in deltas)
            assert text == ("The answer is STOP" if include else "The answer is ")
            last = next(d for d in deltas if d.finished)
            assert (last.finish_reason, last.stop_reason) == ("stop", "STOP")
            assert bpe.decode(ids[: state.count]).endswith("STOP")


def test_the_end_releases_what_was_held(bpe):
    state = OutputState(bpe, SamplingParams(stop=("STOP",)))
    assert state.push(bpe.encode("a ST")).text == "a "
    delta = state.push([], "length")
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("ST", "length", None)
    assert state.push(bpe.encode("more")) == ("", True, None, None, 0)


def test_stop_strings_wait_for_min_tokens(bpe):
    ids = bpe.encode("b b b b b b")
    state = OutputState(bpe, SamplingParams(stop=("b",), min_tokens=3))
    delta = state.push(ids, "length")
    assert delta.finish_reason == "stop" and delta.used == 4
    assert delta.text == bpe.decode(ids[:3]) + " "


def test_stop_tokens_and_eos(bpe):
    ids = bpe.encode("Hello!")
    bang = ids[-1]
    assert bpe.decode([bang]) == "!"
    for include, text in ((False, "Hello"), (True, "Hello!")):
        params = SamplingParams(stop_token_ids=(bang,), include_stop=include)
        delta = OutputState(bpe, params).push(ids, "stop", bang)
        assert (delta.text, delta.stop_reason, delta.used) == (text, bang, len(ids))
    delta = OutputState(bpe, SamplingParams()).push([*ids, 1], "stop", 1)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("Hello!", "stop", None)


def test_constant_work_per_token(bpe):
    """Bytes that never make a character and text that always nearly stops cost no more later."""
    params = SamplingParams(stop=("a" * 200 + "b",))
    byte = bpe.backend.token_to_id(_letter(bpe, 0x80))
    letter = bpe.backend.token_to_id("a")
    for token in (byte, letter):
        state = OutputState(bpe, params)
        times = []
        for _ in range(6):
            start = time.perf_counter()
            for _ in range(2000):
                state.push([token])
            times.append(time.perf_counter() - start)
        assert min(times[3:]) < 4 * min(times[:3])
