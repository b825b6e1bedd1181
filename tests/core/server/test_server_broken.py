"""A choice whose logits are no numbers, among others that have an answer."""

from __future__ import annotations

import json
import logging

import pytest


def events(reply):
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_in_a_stream_the_other_choices_go_on(served, n, caplog):
    with caplog.at_level(logging.ERROR, "ds_runtime"):
        found = events(served.chat("[break 2]", n=n, stream=True))
    *chunks, last = found
    assert last["error"]["code"] == "logits_not_finite" and last["error"]["status"] == 500
    assert "token 3" in last["error"]["message"]
    ends = {
        c["index"]: c["finish_reason"]
        for chunk in chunks
        for c in chunk["choices"]
        if c["finish_reason"]
    }
    assert ends == dict.fromkeys(range(1, n), "stop")
    assert len(caplog.records) == 1, "one line, without a traceback"


@pytest.mark.parametrize("n", [1, 3])
def test_a_whole_answer_is_none(served, n):
    reply = served.chat("[break 2]", n=n)
    assert reply.status_code == 500
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "logits_not_finite")


def test_what_breaks_before_its_first_token_has_a_status(served):
    served.engine.broken = True
    try:
        reply = served.chat("[say x]", stream=True)
    finally:
        served.engine.broken = False
    assert reply.status_code == 500 and "not finite" in reply.text
