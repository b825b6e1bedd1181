"""GLM's reasoning and tool calls, as its templates write them and as models get them wrong."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_runtime.errors import RequestError
from ds_runtime.server.generate.protocol import ChatRequest
from ds_runtime.server.generate.rules import chat_rules
from ds_runtime.text.formats.families import GLM, find_family, tool_format
from ds_runtime.text.formats.template import ChatTemplate
from ds_runtime.text.parsers.events import Answer, CallArguments
from ds_runtime.text.parsers.reasoning import opening
from ds_runtime.text.parsers.registry import Parsers, choose_parsers
from examples import examples

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "unit": {"enum": ["C", "1"]},
        "n": {"type": "integer"},
        "any": {},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "write", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
LINES = (  # GLM-4.5, 4.6
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '\\n<tool_call>' + c.function.name }}\n"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n"
    "{% endfor %}</tool_call>{% endfor %}{% endfor %}"
)
BARE = LINES.replace("\\n", "").replace("\n", "")  # GLM-4.7, 5
TEMPLATES = {"glm45": LINES, "glm47": BARE}
MARKERS = [
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "<|tool_call_end|>",
]


def write(name, *calls, content=""):
    turn = {"role": "assistant", "content": content, "tool_calls": []}
    turn["tool_calls"] = [
        {"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls
    ]
    return ChatTemplate({"default": TEMPLATES[name]}, {}, "x").render([turn])


def read(name, text, cuts=(), prompt="</think>", natural=True, **settings):
    parser, answer = Parsers("glm45", name, **settings).start(prompt, TOOLS), Answer()
    for begin, end in zip((0, *cuts), (*cuts, len(text)), strict=True):
        answer.add(parser.feed(text[begin:end]))
    answer.add(parser.finish(natural))
    calls = [(c.name, json.loads(c.arguments)) for c in answer.calls]
    return answer.reasoning, answer.content, calls


def both_ways(name, text, **settings):
    whole = read(name, text, **settings)
    assert read(name, text, range(1, len(text)), **settings) == whole
    return whole


WORDS = st.sampled_from(
    [*MARKERS, '"', "\\", "\n", " ", "<", "</", "x", "12", "{", "}", "你", "null", "</think>"]
)
TEXT = st.lists(WORDS, max_size=6).map("".join)
QUOTED = st.lists(WORDS | st.just("</arg_value>"), max_size=6).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | QUOTED,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXT,
        "unit": st.sampled_from(["C", "1"]),
        "n": st.integers(),
        "any": VALUES.filter(lambda v: not isinstance(v, str)),
        "other": VALUES.filter(lambda v: not isinstance(v, str))
        | st.sampled_from(["a b", *MARKERS]),
    },
)


@given(
    name=st.sampled_from(sorted(TEMPLATES)),
    calls=st.lists(st.tuples(st.just("write"), ARGUMENTS), min_size=1, max_size=3),
    content=st.sampled_from(["", "so", "a < b", "`</tool_call>` ends", "so <tool"]),
    data=st.data(),
)
@settings(max_examples=examples(300), deadline=None)
def test_what_the_template_writes_is_read_back(name, calls, content, data):
    text = write(name, *calls, ("now", {}), content=content)
    some = st.lists(st.integers(0, len(text)), max_size=6).map(sorted)
    cuts = data.draw(st.just(range(1, len(text))) | some)
    assert read(name, text, cuts) == ("", content, [*calls, ("now", {})])


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize(
    "prompt, text, thought, said",
    [
        ("<|assistant|><think>", "hm</think>so", "hm", "so"),
        ("<|assistant|><think>", "\nhm\n</think>\nso", "hm", "so"),
        ("<|assistant|>", "\n<think>hm</think>\nso", "hm", "so"),
        ("<|assistant|>", "so", "", "so"),
        ("<|assistant|></think>", "so", "", "so"),
        ("<|assistant|>\n<think></think>", "so", "", "so"),
        ("<|user|><think><|assistant|>", "so", "", "so"),
        ("<|assistant|><think>so far", ", hm</think>so", ", hm", "so"),
        ("<think>a</think>b<|observation|>x<|assistant|><think>", "hm</think>so", "hm", "so"),
        ("<|assistant|><think>", "<|tool_call_begin|>.</think>so", "<|tool_call_begin|>.", "so"),
    ],
)  # fmt: skip
def test_reasoning_and_the_call_behind_it(name, prompt, text, thought, said):
    assert both_ways(name, text, prompt=prompt) == (thought, said, [])
    calls = [("write", {"text": "x", "n": 1})]
    assert both_ways(name, text + write(name, *calls), prompt=prompt) == (thought, said, calls)


def test_a_call_ends_the_reasoning():
    text = "hm" + write("glm47", ("write", {"n": 1})) + "</think>so"
    got = both_ways("glm47", text, prompt="<|assistant|><think>")
    assert got == ("hm", "so", [("write", {"n": 1})])


@pytest.mark.parametrize(
    "prompt, told",
    [
        ("<|assistant|><think>", "open"),
        ("<|assistant|>", "optional"),
        ("<|assistant|></think>", "none"),
    ],
)
def test_the_prompt_says_whether_reasoning_comes(prompt, told):
    assert opening("glm45", prompt) == told


@pytest.mark.parametrize(
    "text",
    [
        *("`<tool_call>` begins a call", "<tool_call>", "a\n<tool_call> b", "<tool_call", "so\n"),
        *("</tool_call> and <arg_key>k</arg_key>", "`<tool_call>`/`</tool_call>`", "a\n\n"),
        '<tool_call>{"name": "f"}</tool_call>',
    ],
)
def test_tags_that_no_call_has_stay_text(text):
    assert both_ways("glm47", text) == ("", text, [])


@pytest.mark.parametrize(
    "text, calls",
    [
        ("<tool_call>now</tool_call>", [("now", {})]),
        ("<tool_call>now\n</tool_call>\n", [("now", {})]),
        ("<tool_call>write <arg_key>n</arg_key> <arg_value>1</arg_value> </tool_call>",
         [("write", {"n": 1})]),
        ("<tool_call>write<arg_key>n</arg_key><arg_value>1</arg_value>", [("write", {"n": 1})]),
        ("<tool_call>write<arg_key>text</arg_key><arg_value>1</tool_call>",
         [("write", {"text": "1"})]),
        ("<tool_call>write<arg_key>n</arg_key><arg_value>1</tool_call>", [("write", {"n": 1})]),
        ("<tool_call>write<arg_key>any</arg_key><arg_value>5\" pipe</arg_value></tool_call>",
         [("write", {"any": '5" pipe'})]),
        ("<tool_call>write<arg_key>n</arg_key><arg_value>one</arg_value></tool_call>",
         [("write", {"n": "one"})]),
        ("<tool_call>write<arg_key>any</arg_key><arg_value>NaN</arg_value></tool_call>",
         [("write", {"any": "NaN"})]),
        ("<tool_call>write<arg_key>text</arg_key><arg_value> 1\n</arg_value></tool_call>",
         [("write", {"text": " 1\n"})]),
        ("<tool_call>other<arg_key>x</arg_key><arg_value>[1]</arg_value></tool_call>",
         [("other", {"x": [1]})]),
    ],
)  # fmt: skip
def test_calls_that_are_not_quite_right(text, calls):
    assert both_ways("glm47", text) == ("", "", calls)


def test_a_cut_call_is_not_whole():
    text = write("glm47", ("write", {"text": "x </tool_call> y", "n": 1}))
    for stop in range(len(text)):
        assert read("glm47", text[:stop], natural=False)[2] == []
    assert read("glm47", text, natural=False)[2]


def test_text_values_come_as_they_are_written():
    parser = Parsers(None, "glm47").start("", TOOLS)
    parser.feed("<tool_call>write<arg_key>text</arg_key><arg_value>one")
    (more,) = parser.feed(" two")
    assert isinstance(more, CallArguments) and more.text == " two"


def test_unknown_functions_are_dropped_on_demand():
    text = "<tool_call>other</tool_call><tool_call>now</tool_call>"
    assert read("glm47", text, drop_unknown=True)[2] == [("now", {})]


def test_the_parsers_are_chosen(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "glm_moe_dsa"}')
    assert find_family(tmp_path) is GLM
    for name, source in TEMPLATES.items():
        assert tool_format([source], None) == tool_format([source], GLM) == name
        assert choose_parsers("auto", "auto", (GLM.reasoning, name)) == Parsers("glm45", name)
    assert tool_format(["plain"], GLM) == "glm47"
    assert choose_parsers("glm45", "GLM-47", (None, None)) == Parsers("glm45", "glm47")


def test_calls_that_no_grammar_knows_cannot_be_demanded():
    parsers = Parsers("glm45", "glm47")
    asked = {"messages": [{"role": "user", "content": "q"}], "tools": TOOLS}
    with pytest.raises(RequestError, match=r"glm47.*deepseekv32"):
        chat_rules(ChatRequest(**asked, tool_choice="required"), parsers, "<think>")
    assert chat_rules(ChatRequest(**asked), parsers, "<think>") is None
    json_object = ChatRequest(**asked, response_format={"type": "json_object"})
    rules = chat_rules(json_object, parsers, "<|assistant|><think>")
    assert rules.tool_calls is None and rules.reasoning == "open"
