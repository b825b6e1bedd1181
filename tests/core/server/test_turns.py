"""A busy front end takes turns: tokens gather, none is lost, and an idle one sends them at once."""

from __future__ import annotations

import itertools
import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_harness import serving

from ds_runtime.engine.messages import TokenLogprob, Tokens
from ds_runtime.server.engines.client import Flight
from ds_runtime.server.http import turns
from ds_runtime.server.http.turns import Turns, joined


class Clock:
    def __init__(self):
        self.now = self.busy = 0.0

    def work(self, one: Turns, share: float, seconds: float, messages: int = 50) -> float:
        """Turns of 5 ms whose work takes a share of the time; the pause at the end. messages: that
        come in each."""
        for _ in range(round(seconds / 0.005)):
            self.now += 0.005
            self.busy += 0.005 * share
            one.taken += messages
            pause = one.over()
            assert 0 <= pause <= 0.02
        return pause


def test_turns_become_longer_while_the_thread_is_busy_and_end_when_it_is_not():
    clock = Clock()
    one = Turns(lambda: clock.busy, lambda: clock.now)
    assert clock.work(one, 0.1, 1.0) == 0
    assert clock.work(one, 0.8, 1.0) == 0.02
    assert clock.work(one, 0.3, 1.0) == 0.02, "it does not swing"
    assert clock.work(one, 0.05, 1.0) == 0
    assert clock.work(one, 0.95, 0.05) == 0, "a moment is not looked at"


def test_a_thread_that_is_busy_with_few_tokens_keeps_none_back():
    clock = Clock()
    one = Turns(lambda: clock.busy, lambda: clock.now)
    assert clock.work(one, 0.9, 1.0, messages=5) == 0
    assert clock.work(one, 0.9, 1.0) == 0.02
    assert clock.work(one, 0.9, 1.0, messages=5) == 0


LOGPROBS = st.none() | st.just("each")


@st.composite
def messages(draw):
    """What an engine sends for one choice, in order."""
    asks, told = draw(st.booleans()), draw(st.booleans())
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=8))
    out, next_id = [], 0
    for number, size in enumerate(sizes):
        ids = list(range(next_id, next_id + size))
        next_id += size
        out.append(Tokens(rid="r", tokens=ids, cached_tokens=7))
        if asks:
            out[-1].logprobs = [TokenLogprob(i, -0.5 * i) for i in ids]
        if number == 0:
            out[0].prefill_seconds = 0.25
            out[0].prompt_logprobs = [None, TokenLogprob(1, -1.0)] if told else None
    if draw(st.booleans()):
        out[-1].finish, out[-1].stop_token = "stop", out[-1].tokens[-1]
    return out


@given(messages())
def test_messages_that_are_joined_say_all_that_they_said(given_):
    whole = given_[0]
    for message in given_[1:]:
        whole = joined(whole, message)
    assert whole.tokens == [t for m in given_ for t in m.tokens]
    asked = given_[0].logprobs is not None
    assert whole.logprobs == ([e for m in given_ for e in m.logprobs] if asked else None)
    assert whole.prompt_logprobs == given_[0].prompt_logprobs
    assert (whole.finish, whole.stop_token) == (given_[-1].finish, given_[-1].stop_token)
    assert (whole.cached_tokens, whole.prefill_seconds) == (7, 0.25)


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=12))
def test_what_gathers_of_several_choices_keeps_its_order(rids):
    flight = Flight()
    for number, rid in enumerate(rids):
        flight.put(Tokens(rid=rid, tokens=[number]), gathers=True)
    came = list(flight._came)
    for rid in "ab":
        numbers = [n for n, one in enumerate(rids) if one == rid]
        assert [t for m in came if m.rid == rid for t in m.tokens] == numbers
    assert all(x.rid != y.rid for x, y in itertools.pairwise(came))


TEXTS = [f"[say {'wörd ' * 20}{number} 你好]" for number in range(12)]


def streams(served) -> tuple[dict[int, str], int]:
    """The texts of streams that run at once, and how many events they took."""
    found, events = {}, [0]

    def one(number: int) -> None:
        body = {"messages": [{"role": "user", "content": TEXTS[number]}], "stream": True}
        with served.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            lines = [json.loads(x[6:]) for x in reply.iter_lines() if x.startswith("data: {")]
        parts = [c["delta"].get("content") or "" for e in lines for c in e["choices"]]
        found[number], events[0] = "".join(parts), events[0] + len(lines)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(len(TEXTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, events[0]


def gauge(served) -> float:
    lines = served.http.get("/metrics").text.splitlines()
    return next(
        float(x.split()[1]) for x in lines if x.startswith("ds_runtime_stream_turn_seconds")
    )


@pytest.mark.parametrize("busy", [False, True])
def test_a_busy_server_says_the_same_in_fewer_events(bpe_folder, monkeypatch, busy):
    monkeypatch.setattr(turns, "_WINDOW", 0.0)
    monkeypatch.setattr(turns, "_MANY", 0.0)
    monkeypatch.setattr(turns, "_FREE", -1.0 if busy else 2.0)
    monkeypatch.setattr(turns, "_BUSY", -1.0 if busy else 2.0)
    with serving(bpe_folder, turns=True) as served:
        alone = {n: served.chat(t).json() for n, t in enumerate(TEXTS)}
        found, events = streams(served)
        assert found == {n: a["choices"][0]["message"]["content"] for n, a in alone.items()}
        tokens = sum(a["usage"]["completion_tokens"] for a in alone.values())
        assert (gauge(served) > 0) == busy
        if busy:
            assert events < 0.7 * tokens
