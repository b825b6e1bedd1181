"""Tenants of one server with the real engine: none learns what another has sent."""

from __future__ import annotations

import time

import httpx
import pytest
from served import serving

FLAGS = ("--api-key", "a", "--api-key", "b", "--admin-api-key", "root", "--threads", "1")


@pytest.fixture(scope="module")
def url():
    with serving("demo", *FLAGS) as served:
        yield served.wait_url()


def ask(url, key, prompt, **body):
    """(cached tokens, seconds, ids)"""
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0}, **body}
    begin = time.perf_counter()
    reply = httpx.post(
        f"{url}/generate", json=body, headers={"x-api-key": key}, timeout=60
    ).raise_for_status()
    info = reply.json()["meta_info"]
    return info["cached_tokens"], time.perf_counter() - begin, reply.json()["output_ids"]


def prompt(number, length):
    return [(7 * number + i * (number + 3)) % 90 + 20 for i in range(length)]


def test_cached_tokens_tell_nothing_of_others(url):
    length = 100
    for salted in ({}, {"cache_salt": "mine"}):
        one = prompt(len(salted), length)
        assert ask(url, "a", one, **salted)[0] == 0
        known, _, ids = ask(url, "a", one, **salted)
        assert known == 96
        for key in ("b", "root"):
            assert ask(url, key, one, **salted)[0] == 0
            found, _, same = ask(url, key, one, **salted)
            assert (found, same) == (96, ids)
        assert ask(url, "a", one, cache_salt="other")[0] == 0
    reply = httpx.post(f"{url}/flush_cache", headers={"x-api-key": "b"})
    assert reply.status_code == 403
    assert ask(url, "a", prompt(0, length))[0] == 96


@pytest.mark.slow
def test_time_tells_nothing_of_others(url):
    """Whoever may not share sees the same time for what another has sent as for what nobody has."""
    length, warm, cold, own = 900, [], [], []
    for n in range(12):
        theirs, fresh = prompt(2 * n + 10, length), prompt(2 * n + 11, length)
        assert ask(url, "a", theirs)[0] == 0
        pair = [(warm, theirs), (cold, fresh)]
        for times, one in pair[:: 1 if n % 2 else -1]:
            known, seconds, _ = ask(url, "b", one)
            assert known == 0
            times.append(seconds)
        own.append(ask(url, "a", theirs)[1])
    # The machine lengthens times, and never shortens one.
    assert min(own) < 0.6 * min(cold)  # what could be told, if it were shared
    assert 0.8 < min(warm) / min(cold) < 1.25, (warm, cold)
