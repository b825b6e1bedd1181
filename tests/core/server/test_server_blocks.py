"""Blocks of an answer: the same however its events come."""

from __future__ import annotations

import asyncio
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from ds_runtime.errors import RequestError
from ds_runtime.server.blocks import Blocks, blocks_of
from ds_runtime.server.bodies import Bodies
from ds_runtime.server.stream import _events
from ds_runtime.server.translate import Names
from ds_runtime.text.events import (
    Answer,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Reasoning,
)


def calls(number, parts, complete):
    inside = [CallArguments(number, p) if kind else Content(p) for kind, p in parts]
    return [CallBegin(number, f"id{number}", "f"), *inside, CallEnd(number, complete)]


TEXT = st.text(max_size=3)
PARTS = st.lists(st.tuples(st.booleans(), TEXT), max_size=4)


@given(
    st.lists(st.one_of(TEXT.map(Content), TEXT.map(Reasoning), PARTS), max_size=8),
    st.booleans(),
)
def test_nothing_is_lost_and_calls_stay_whole(items, cut):
    events, wanted, number = [], [], 0
    for item in items:
        if isinstance(item, list):
            events += calls(number, item, True)
            wanted.append("".join(part for kind, part in item if kind))
            number += 1
        else:
            events.append(item)
    answer = Answer()
    for event in events:
        answer.add([event])
    whole, blocks = blocks_of(answer, cut), Blocks()
    steps = list(chain.from_iterable(blocks.feed([event]) for event in events))
    steps += blocks.end(cut)
    assert blocks.every == whole
    assert [step for step, _, _ in steps].count("close") == len(whole)
    assert ["".join(b.parts) for b in whole if b.kind == "call"] == wanted
    assert [c.arguments for c in answer.calls] == wanted
    for kind, text in (("text", answer.content), ("reasoning", answer.reasoning)):
        assert "".join(b.text for b in whole if b.kind == kind) == text
    assert all(b.complete for b in whole[:-1])


def test_the_last_open_block_is_cut():
    answer = Answer()
    answer.add([Reasoning("a"), Content("b"), *calls(0, [(True, "{}")], True), Content("c")])
    assert [b.complete for b in blocks_of(answer, True)] == [True, True, True, False]
    assert all(b.complete for b in blocks_of(answer, False))


def test_names_in_quotes_are_the_client_s():
    names = Names(["input[4]"], {"max_tokens": "max_output_tokens", "stop": "stop_sequences"})
    text = "messages[0].x is 'a stop': the prompt's 3 tokens and max_tokens 4 and \"stop\", stop"
    assert names.own(text) == (
        "input[4].x is 'a stop': the prompt's 3 tokens and max_output_tokens 4 and \"stop\", "
        "stop_sequences"
    )


def test_an_error_inside_a_stream_names_the_client_s_field():
    class Form:
        end = b""

        def failure(self, run, error):
            return error.message.encode()

    async def pieces():
        raise RequestError("stop cannot be followed any further", "stop")
        yield

    async def events():
        names = Names((), {"stop": "stop_sequences"})
        return [e async for e in _events(None, Form(), pieces(), names, Bodies(None, lambda: 0))]

    assert asyncio.run(events()) == [b"stop_sequences cannot be followed any further"]
