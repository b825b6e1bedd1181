"""V4's answers: reasoning and calls, as its encoding writes them and in every way that it has been
seen to write them, cut anywhere."""

from __future__ import annotations

import json

import deepseek_recipe as recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_runtime.text.formats.dsml_v4 import V4Encoding
from ds_runtime.text.parsers.events import Answer
from ds_runtime.text.parsers.registry import Parsers, choose_parsers
from examples import examples

PROPERTIES = {"city": {"type": "string"}, "n": {"type": "integer"}, "more": {"type": "object"}}
TOOLS = [
    {"function": {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}}},
    {"function": {"name": "now"}},
    {
        "function": {
            "name": "run",
            "parameters": {"type": "object", "properties": {"input": {}, "arguments": {}}},
        }
    },
]
BLOCKS = ["tool_calls", "toolcalls", "tool", "function_calls"]
THINKS, TALKS = "<｜Assistant｜><think>", "<｜Assistant｜></think>"
TEXT = st.text(st.sampled_from("aé <>/｜\n\"{}'"), max_size=8)
VALUES = st.recursive(
    TEXT | st.integers(-99, 99) | st.booleans() | st.none(),
    lambda v: st.lists(v, max_size=2) | st.dictionaries(TEXT, v, max_size=2),
    max_leaves=4,
)


def read(text, cuts=(), prompt=TALKS):
    """(reasoning, content, calls) of `text`."""
    parser, answer = Parsers("deepseek-v4", "deepseekv4").start(prompt, TOOLS), Answer()
    for begin, end in zip((0, *cuts), (*cuts, len(text)), strict=True):
        answer.add(parser.feed(text[begin:end]))
    answer.add(parser.finish(natural=True))
    calls = [(c.name, json.loads(c.arguments)) for c in answer.calls]
    return answer.reasoning, answer.content, calls


def anyhow(data, text):
    """Anywhere, or at every character."""
    some = st.lists(st.integers(0, len(text)), max_size=6).map(sorted)
    return data.draw(st.just(range(1, len(text))) | some)


def wrote(reasoning, content, calls):
    """What the model writes behind `<think>`, as the encoding repeats it."""
    made = [{"function": {"name": n, "arguments": json.dumps(a)}} for n, a in calls]
    turn = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    messages = [{"role": "user", "content": "q"}, turn | {"tool_calls": made}]
    text = V4Encoding().render(messages, [{"function": {"name": "f"}}], False)
    return text.partition(THINKS)[2].removesuffix("<｜end▁of▁sentence｜>")


CALLS = st.tuples(
    st.sampled_from(["weather", "unknown"]), st.dictionaries(st.sampled_from("abc"), VALUES)
)


@given(st.lists(CALLS, min_size=1, max_size=3), TEXT, st.data())
@settings(max_examples=examples(100), deadline=None)
def test_what_the_encoding_writes_is_read_back(calls, reasoning, data):
    text = wrote(reasoning, "so", calls)
    assert read(text, anyhow(data, text), THINKS) == (reasoning, "so", calls)


def theirs(text, cuts):
    """The same by DeepSeek's own parser."""
    tools = [{"type": "function", **t} for t in TOOLS[:1]]
    turn = {"role": "user", "content": "q"}
    body = {"model": "DeepSeek-V4-Pro", "messages": [turn], "tools": tools, "stream": True}
    asked = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    generator = recipe.ChatCompletionRequest.chunk_generator(asked, "x", "y")
    stream = recipe.StreamProcessor(generator, asked.parsing_options)
    chunks = recipe.InferenceChunk
    found = stream.push(chunks.ready())
    for begin, end in zip((0, *cuts), (*cuts, len(text)), strict=True):
        found += stream.push(chunks.text(text[begin:end], 1))
    found += stream.push(chunks.finish(recipe.InferenceFinishReason.Stop))
    found += [] if stream.finished else stream.finish()
    said, calls = {"reasoning_content": "", "content": ""}, {}
    for chunk in found:
        for choice in json.loads(chunk.to_json())["choices"]:
            delta = choice["delta"]
            for name in said:
                said[name] += delta.get(name) or ""
            for part in delta.get("tool_calls") or ():
                one = calls.setdefault(part["index"], {"name": "", "arguments": ""})
                for name, more in part["function"].items():
                    one[name] += more or ""
    made = [(c["name"], json.loads(c["arguments"])) for _, c in sorted(calls.items())]
    return said["reasoning_content"], said["content"], made


WORDS = st.text(st.sampled_from("ab é<>{\"'1"), min_size=1, max_size=8).map(lambda t: f"s{t}o")


@given(st.lists(CALLS, max_size=3), WORDS, WORDS, st.data())
@settings(max_examples=examples(100), deadline=None)
def test_deepseek_s_own_parser_reads_the_same(calls, reasoning, content, data):
    text = wrote(reasoning, content, calls)
    cuts = anyhow(data, text)
    assert read(text, cuts, THINKS) == theirs(text, cuts)


def call(name, inner, block):
    head = f'<｜DSML｜invoke name="{name}">\n{inner}</｜DSML｜invoke>'
    return f"<｜DSML｜{block}>\n{head}\n</｜DSML｜{block}>"


def parameter(name, value, told):
    string = "" if told is None else f' string="{told}"'
    return f'<｜DSML｜parameter name="{name}"{string}>{value}</｜DSML｜parameter>\n'


@given(
    block=st.sampled_from(BLOCKS),
    thinks=st.sampled_from(["", "hm", "hm</think>"]),
    arguments=st.fixed_dictionaries(
        {}, optional={"city": TEXT, "n": st.integers(), "more": st.dictionaries(TEXT, VALUES)}
    ),
    told=st.booleans(),
    data=st.data(),
)
@settings(max_examples=examples(100), deadline=None)
def test_blocks_of_other_names_untold_types_and_calls_inside_thinking(
    block, thinks, arguments, told, data
):
    def kind(value):
        return str(isinstance(value, str)).lower() if told else None

    said = ((k, v if isinstance(v, str) else json.dumps(v), kind(v)) for k, v in arguments.items())
    text = thinks + call("weather", "".join(parameter(*one) for one in said), block)
    prompt = THINKS if thinks else TALKS
    found = read(text, anyhow(data, text), prompt)
    assert found == (thinks.removesuffix("</think>"), "", [("weather", arguments)])


@given(
    block=st.sampled_from(BLOCKS),
    wrapper=st.sampled_from(["arguments", "input"]),
    told=st.sampled_from(["true", "false", None]),
    inner=st.dictionaries(st.sampled_from(["city", "n", "x"]), VALUES, max_size=3),
    more=st.none() | TEXT,
    data=st.data(),
)
@settings(max_examples=examples(100), deadline=None)
def test_arguments_in_a_wrapper_that_the_function_does_not_have(
    block, wrapper, told, inner, more, data
):
    written = parameter(wrapper, json.dumps(inner), told)
    written += "" if more is None else parameter("city2", more, "true")
    text = call("weather", written, block)
    expected = inner | ({} if more is None else {"city2": more})
    assert read(text, anyhow(data, text)) == ("", "", [("weather", expected)])


@pytest.mark.parametrize(
    "text, expected",
    [
        # a function that has such an argument, or of which nothing is known
        (call("run", parameter("input", '{"a": 1}', "false"), "tool_calls"), {"input": {"a": 1}}),
        (call("run", parameter("input", '{"a": 1}', "true"), "tool_calls"), {"input": '{"a": 1}'}),
        (call("now", parameter("input", '{"a": 1}', "false"), "tool_calls"), {"input": {"a": 1}}),
        # no object in it
        (call("weather", parameter("input", "[1]", "false"), "tool_calls"), {"input": [1]}),
        (call("weather", parameter("input", "7", "true"), "tool_calls"), {"input": "7"}),
        (call("weather", parameter("input", "so{", None), "tool_calls"), {"input": "so{"}),
        # not the first
        (
            call(
                "weather",
                parameter("city", "R", "true") + parameter("input", '{"n": 1}', "false"),
                "tool_calls",
            ),
            {"city": "R", "input": {"n": 1}},
        ),
        ('<｜DSML｜tool>\n<｜DSML｜invoke name="now"/>\n</｜DSML｜tool>', {}),
        ('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>', {}),
        ('<｜DSML｜invoke name="weather">\n{"n": 1}\n</｜DSML｜invoke>', {"n": 1}),
    ],
)
def test_no_wrapper_and_other_shapes(text, expected):
    for cuts in ((), range(1, len(text)), *([at] for at in range(len(text)))):
        ((_, arguments),) = read(text, cuts)[2]
        assert arguments == expected


PIECES = [
    *(f"<{slash}｜DSML｜{name}>" for name in BLOCKS for slash in ("", "/")),
    *('<｜DSML｜invoke name="weather">', '<｜DSML｜invoke name="now"/>', "</｜DSML｜invoke>"),
    *(
        f'<｜DSML｜parameter name="{n}"{t}>'
        for n in ("city", "input")
        for t in ("", ' string="true"')
    ),
    *(
        "</｜DSML｜parameter>",
        "<｜DSML｜",
        "<｜DSML｜tool",
        "_calls>",
        "calls>",
        "</think>",
        "<think>",
    ),
    *('{"n": 1}', "{", '"', "hm", "\n\n", " ", "<", ">", "12"),
]


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join), st.data())
@settings(max_examples=examples(300), deadline=None)
def test_no_cut_changes_anything(text, data):
    prompt = data.draw(st.sampled_from([THINKS, TALKS]))
    assert read(text, anyhow(data, text), prompt) == read(text, (), prompt)


def test_names_that_others_use():
    for reasoning, calls in [("deepseek_v4", "deepseek_v4"), ("deepseek-v4", "deepseekv4")]:
        chosen = choose_parsers(reasoning, calls, (None, None))
        assert (chosen.reasoning, chosen.tool_calls) == ("deepseek-v4", "deepseekv4")
