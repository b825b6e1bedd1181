"""Blocks of an answer: the same however its events come."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from itertools import chain

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime.engine.messages import Failed
from ds_runtime.errors import FieldPath, RequestError
from ds_runtime.server.errors import ApiError
from ds_runtime.server.http.bodies import Bodies
from ds_runtime.server.http.stream import _events
from ds_runtime.server.protocols.blocks import Blocks, blocks_of
from ds_runtime.server.protocols.translate import ClientNames
from ds_runtime.text.parsers.events import (
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
    assert [replace(b, parts=[b.text]) for b in blocks.every] == [
        replace(b, parts=[b.text]) for b in whole
    ]
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


def test_only_fields_get_the_client_s_names():
    fields = {("max_tokens",): ("max_output_tokens",), ("tools", int, "function"): ("tools", int)}
    names = ClientNames(["input[4]"], fields, {("tool_calls", int, "function"): ("content",)})
    said = (
        FieldPath.of("messages[0].x"),
        " is 'max_tokens': max_tokens, ",
        FieldPath.of("stop"),
    )
    error = names.renamed(RequestError(said, "messages[0].tool_calls[2].function.name"))
    assert isinstance(error, RequestError)
    assert str(error) == "input[4].x is 'max_tokens': max_tokens, stop"
    assert error.param == "input[4].content.name"
    other = names.renamed(RequestError.of("tools[7].function.name", " and ", "max_tokens"))
    assert str(other) == "tools[7].name and max_tokens"
    assert isinstance(other, RequestError) and other.param == "tools[7].name"
    beyond = names.renamed(RequestError.of("messages[1].content", " is missing"))
    assert str(beyond) == "messages[1].content is missing"
    assert str(names.renamed(ApiError(400, (FieldPath.of("max_tokens"), " 9")))) == (
        "max_output_tokens 9"
    )


@given(st.text("ab.[]0129\n-é٣", max_size=20))
def test_a_path_is_its_text(text):
    assert str(FieldPath.of(text)) == text


@given(
    st.lists(
        st.text("ab_é", min_size=1, max_size=4) | st.integers(0, 10**9), min_size=1, max_size=6
    ).filter(lambda path: isinstance(path[0], str))
)
def test_a_path_s_keys_and_indices_are_found(path):
    assert FieldPath.of(str(FieldPath(tuple(path)))).path == tuple(path)


def test_a_path_of_a_million_brackets_takes_a_second_at_most():
    begin = time.process_time()
    for text in ("[1]" * 300_000, "[1]" * 300_000 + "x", "]" * 10**6, "[1]x" * 300_000):
        assert str(FieldPath.of(text)) == text
    assert time.process_time() - begin < 4


@pytest.mark.parametrize(
    "made",
    [
        Failed("r", "invalid", (FieldPath.of("tools[0].function"), " and ", "more"), "tools"),
        Failed("r", "queue_full", "full"),
    ],
)
def test_a_sentence_travels_with_its_fields(made):
    got = msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Failed)
    assert got == made and got.message == made.message
    if made.kind == "invalid":
        assert isinstance(got.error, RequestError) and got.error.said == made.said


def test_an_error_inside_a_stream_names_the_client_s_field():
    class Form:
        end = b""

        def failure(self, run, error):
            return error.message.encode()

    async def pieces():
        raise RequestError.of("stop", " cannot be followed any further")
        yield

    async def events():
        names = ClientNames((), {("stop",): ("stop_sequences",)})
        return [e async for e in _events(None, Form(), pieces(), names, Bodies(None, lambda: 0))]

    assert asyncio.run(events()) == [b"stop_sequences cannot be followed any further"]
