"""Output parsers: every format, cut everywhere, and the ways in which models get it wrong."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_runtime.errors import ConfigError
from ds_runtime.text.formats.dsml import DsmlEncoding
from ds_runtime.text.formats.families import V3 as V3_FAMILY
from ds_runtime.text.formats.families import V31 as V31_FAMILY
from ds_runtime.text.formats.template import ChatTemplate, built_in
from ds_runtime.text.parsers.events import Answer, CallArguments, CallBegin, Content, Reasoning
from ds_runtime.text.parsers.json_stream import JsonStream, quoted
from ds_runtime.text.parsers.registry import TOOL_CALLS, Parsers, choose_parsers
from ds_runtime.text.parsers.tool_calls import NO_JSON, strict_json
from examples import examples

TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "now"}},
]
ARGUMENTS = '{"city": "Par<is>", "n": [1, {"a": null}]}'
V3 = (
    "pre<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    + ARGUMENTS
    + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
V31 = (
    "pre<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    + ARGUMENTS
    + "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>"
)
V32 = """pre

<｜DSML｜function_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Par<is></｜DSML｜parameter>
<｜DSML｜parameter name="n" string="false">[1, {"a": null}]</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="now">

</｜DSML｜invoke>
</｜DSML｜function_calls>"""
FORMATS = {"deepseekv3": V3, "deepseekv31": V31, "deepseekv32": V32}


def parse(text, tools, *cuts, reasoning="deepseek-v3", prompt="<｜Assistant｜>", natural=True):
    """The answer to `text`, fed in the pieces between `cuts`."""
    parser = Parsers(reasoning, tools).start(prompt, TOOLS)
    answer = Answer()
    for begin, end in zip((0, *cuts), (*cuts, len(text)), strict=True):
        answer.add(parser.feed(text[begin:end]))
    answer.add(parser.finish(natural))
    calls = [(c.name, c.arguments) for c in answer.calls]
    return answer.reasoning, answer.content, calls


@pytest.mark.parametrize("name", FORMATS)
def test_a_cut_at_any_character_changes_nothing(name):
    text = "<think>hm</think>" + FORMATS[name]
    whole = parse(text, name)
    assert whole == ("hm", "pre", [("get_weather", ARGUMENTS), ("now", "{}")])
    assert json.loads(whole[2][0][1]) == {"city": "Par<is>", "n": [1, {"a": None}]}
    for cut in range(len(text)):
        assert parse(text, name, cut) == whole
    assert parse(text, name, *range(1, len(text))) == whole


def events(text, tools, *cuts, natural=True, prompt="<｜Assistant｜>", offered=TOOLS, **settings):
    """The events of `text`, neighbours of a kind joined and ids left out."""
    parser = Parsers("deepseek-v3", tools, **settings).start(prompt, offered)
    found = []
    for begin, end in zip((0, *cuts), (*cuts, len(text)), strict=True):
        found += parser.feed(text[begin:end])
    out = []
    for event in found + parser.finish(natural):
        plain = [type(event).__name__, *event]
        if isinstance(event, CallBegin):
            del plain[2]
        is_text = isinstance(event, Content | Reasoning | CallArguments)
        if is_text and out and out[-1][:-1] == plain[:-1]:
            plain = [*plain[:-1], out.pop()[-1] + plain[-1]]
        out.append(plain)
    return out


def v3(name, arguments):
    fenced = f"{name}\n```json\n{arguments}\n```"
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{fenced}<｜tool▁call▁end｜>"


def v31(name, arguments):
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def dsml(name, *parameters):
    inner = "\n".join(
        f'<｜DSML｜parameter name="{k}" string="{str(text).lower()}">{v}</｜DSML｜parameter>'
        for k, v, text in parameters
    )
    return f'<｜DSML｜invoke name="{name}">\n{inner}\n</｜DSML｜invoke>'


def block(*calls):
    return "<｜tool▁calls▁begin｜>" + "\n".join(calls) + "<｜tool▁calls▁end｜>"


def dsml_block(*invokes):
    inner = "\n".join(invokes)
    return f"\n\n<｜DSML｜function_calls>\n{inner}\n</｜DSML｜function_calls>"


# ---- the known ways to fail, by their number in the catalogue of formats ----


@pytest.mark.parametrize("name, text", [("deepseekv31", V31), ("deepseekv32", V32)])
def test_1_half_a_marker_is_never_content(name, text):
    for end in range(len(text)):
        _, content, _ = parse(text[:end], name, natural=False)
        assert content in "pre\n\n" or content in ("pre<", "pre<｜", "pre\n\n<", "pre\n\n<｜"), end
        assert "tool" not in content and "DSML" not in content


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", ["a < b", "</", "<", "x <b>y</b>", "1 <\n\n2", "<｜", "a\n\n\n"])
def test_2_a_bracket_in_prose_is_released(name, text):
    assert parse(text, name) == ("", text, [])
    assert parse(text, name, *range(1, len(text))) == ("", text, [])


def test_2_only_two_line_breaks_before_dsml_are_trimmed():
    for before, kept in [("a\n\n", "a"), ("a\n\n\n", "a\n"), ("a\n", "a\n"), ("a \n\n", "a ")]:
        text = before + V32.removeprefix("pre\n\n")
        for cut in range(len(before) + 3):
            assert parse(text, "deepseekv32", cut)[1] == kept


@pytest.mark.parametrize("natural", [True, False])
@pytest.mark.parametrize(
    "tail", ["<｜DSML｜function_calls", "</｜DSML｜function_calls", "<｜DSML｜"]
)
def test_3_no_tag_is_left_after_a_call(tail, natural):
    answer = parse(V32 + tail, "deepseekv32", natural=natural)
    assert answer == parse(V32, "deepseekv32")
    assert parse(V31 + "<｜tool▁calls▁beg", "deepseekv31", natural=natural)[1] == "pre"


@pytest.mark.parametrize("name", FORMATS)
def test_4_a_call_ends_the_reasoning(name):
    text = FORMATS[name]
    for opened in ("<think>", ""):
        prompt = "<｜Assistant｜>" if opened else "<｜Assistant｜><think>"
        for close in ("", "</think>", "\n</think>after"):
            whole = parse(opened + "hm " + text + close, name, prompt=prompt)
            reasoning = "hm pre\n\n" if name == "deepseekv32" else "hm pre"
            assert whole[0].rstrip("\n") == reasoning.rstrip("\n")
            assert [c[0] for c in whole[2]] == ["get_weather", "now"]
            assert whole[1] in ("", "after")
            cut = range(1, len(opened + "hm " + text + close))
            assert parse(opened + "hm " + text + close, name, *cut, prompt=prompt) == whole


@pytest.mark.parametrize(
    "style, prompt, expected",
    [
        ("deepseek-v3", "</function_results>\n\n<think>", ("a", "b")),
        ("deepseek-v3", "</function_results>\n\n</think>", ("", "a</think>b")),
        ("deepseek-v3", "x<｜tool▁output▁end｜>", ("", "a</think>b")),
        ("deepseek-v3", "<｜Assistant｜>", ("", "a</think>b")),
        ("deepseek-r1", "<｜tool▁outputs▁end｜>", ("", "a</think>b")),
        ("deepseek-r1", "<｜Assistant｜>", ("a", "b")),
        ("deepseek-r1", "<｜Assistant｜><think>\n", ("a", "b")),
        ("deepseek-r1", "<think>\n\n</think>\n\n", ("", "a</think>b")),
        # Inside what the assistant has begun.
        ("deepseek-v3", "<｜Assistant｜><think>so far ", ("a", "b")),
        ("deepseek-r1", "<｜Assistant｜><think>\nso far", ("a", "b")),
        ("deepseek-r1", "<｜Assistant｜>It is", ("", "a</think>b")),
        ("deepseek-v3", "<｜Assistant｜><think>so</think>It is", ("", "a</think>b")),
        ("deepseek-v3", "<｜Assistant｜></think>x<think>y", ("a", "b")),
        # Words of a user, or of an earlier turn, are none of it.
        ("deepseek-r1", "<｜User｜>what is <think>?", ("a", "b")),
        ("deepseek-v3", "<｜Assistant｜><think>x<｜end▁of▁sentence｜>", ("", "a</think>b")),
    ],
)
def test_5_the_prompt_says_where_the_text_begins(style, prompt, expected):
    assert parse("a</think>b", None, reasoning=style, prompt=prompt)[:2] == expected


@pytest.mark.parametrize(
    "value",
    [
        'say "hi"',
        "a\nb\t\\",
        "x </b> < y",
        "</｜DSML",
        '{"a": [1]}',
        "",
        " ",
        "tab\tü 你 👍🏽",
        "\x01",
    ],
)
def test_6_text_values_of_any_kind(value):
    text = dsml_block(dsml("f", ("k", value, True), ("l", "1", False)))
    for cuts in ((), range(1, len(text))):
        ((_, arguments),) = parse(text, "deepseekv32", *cuts)[2]
        assert json.loads(arguments) == {"k": value, "l": 1}


@pytest.mark.parametrize(
    "raw, value",
    [
        ("12", 12),
        (" [1, 2]\n", [1, 2]),
        ("null", None),
        ("NaN", "NaN"),
        ("-Infinity", "-Infinity"),
        ("{'a': 1}", "{'a': 1}"),
        ("[1, 2", "[1, 2"),
        ("[" * 10000, "[" * 10000),
        ("", ""),
    ],
)
def test_6_other_values_are_json_or_stay_text(raw, value):
    text = dsml_block(dsml("f", ("k", raw, False)))
    ((_, arguments),) = parse(text, "deepseekv32")[2]
    assert json.loads(arguments) == {"k": value}


@pytest.mark.parametrize("name, call", [("deepseekv3", v3), ("deepseekv31", v31)])
def test_7_several_calls_and_text_around_them(name, call):
    text = "before" + block(call("f", '{"a": 1}'), call("g", "{}")) + "\nafter"
    found = events(text, name)
    assert found == [
        ["Content", "before"],
        ["CallBegin", 0, "f"],
        ["CallArguments", 0, '{"a": 1}'],
        ["CallEnd", 0, True],
        ["CallBegin", 1, "g"],
        ["CallArguments", 1, "{}"],
        ["CallEnd", 1, True],
        ["Content", "after"],
    ]
    parser = Parsers(None, name).start("", TOOLS)
    ids = [e.id for e in parser.feed(text) if isinstance(e, CallBegin)]
    assert len(set(ids)) == 2 and all(i.startswith("call_") for i in ids)


@pytest.mark.parametrize("name", FORMATS)
def test_8_a_cut_call_is_not_whole(name):
    text = FORMATS[name]
    counts = []
    for end in range(len(text) + 1):
        found = parse(text[:end], name, natural=False)[2]
        assert [c for c in found if c[0] == "get_weather"] in ([], [("get_weather", ARGUMENTS)])
        counts.append(len(found))
    assert counts == sorted(counts) and counts[-1] == 2
    cut = events(text[: text.index("Par") + 2], name, natural=False)
    assert cut[-1] == ["CallEnd", 0, False] and cut[-2][0] == "CallArguments"


def test_9_unknown_functions_by_policy():
    text = "a" + block(v31("other", '{"x": 1}'), v31("now", "{}")) + "b"
    assert [c[0] for c in parse(text, "deepseekv31")[2]] == ["other", "now"]
    dropped = events(text, "deepseekv31", drop_unknown=True)
    assert [e for e in dropped if e[0] == "CallBegin"] == [["CallBegin", 0, "now"]]


@pytest.mark.parametrize(
    "arguments, value",
    [
        ('{"city": "Rome"', {"city": "Rome"}),
        ('{"city": "Rome', {"city": "Rome"}),
        ('{"a": [1, {"b": 2}', {"a": [1, {"b": 2}]}),
        ('{"a": [1, 2}', {"a": [1, 2]}),
        ('{"a": 1,}', {"a": 1}),
        ('{"a": 1}}', {"a": 1}),
        ('{"a": "x\ny"}', {"a": "x\ny"}),
        ('{"a": True, "b": None, "c": NaN}', {"a": True, "b": None, "c": "NaN"}),
        ("{a: 1}", {"a": 1}),
        ('{"a" 1 "b": 2}', {"a": 1, "b": 2}),
        ('{"a": "\\x"}', {"a": "\\x"}),
        ('{"a":', {"a": None}),
        ('{"a"', {"a": None}),
        ("", {}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ("Rome", "Rome"),
        ("[1]", [1]),
    ],
)
@pytest.mark.parametrize("name, call", [("deepseekv3", v3), ("deepseekv31", v31)])
def test_9_broken_json_is_mended(name, call, arguments, value):
    text = block(call("f", arguments), call("g", "{}"))
    whole = parse(text, name)
    assert [json.loads(a) for _, a in whole[2]] == [value, {}] and whole[:2] == ("", "")
    assert parse(text, name, *range(1, len(text))) == whole


def test_10_a_parser_of_another_format_loses_nothing():
    text = V32.removeprefix("pre")
    assert parse(text, "deepseekv31")[1:] == (text, [])
    assert parse(V31, "deepseekv32")[1:] == (V31, [])


def test_11_the_form_is_seen_call_by_call():
    both = block(v3("f", '{"a": 1}'), v31("g", '{"b": 2}'), v31("function", "{}"))
    for name in ("deepseekv3", "deepseekv31"):
        assert parse(both, name)[2] == [("f", '{"a": 1}'), ("g", '{"b": 2}'), ("function", "{}")]
    fenced = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>\n```json\n{}\n```<｜tool▁call▁end｜>"
    assert parse(block(fenced), "deepseekv31")[2] == [("f", "{}")]


def test_12_no_state_is_shared():
    parsers = Parsers("deepseek-v3", "deepseekv31")
    first, second = (parsers.start("<｜Assistant｜><think>", TOOLS) for _ in range(2))
    first.feed("hm" + V31[:40])
    assert second.feed("hm</think>" + "text") == [Reasoning("hm"), Content("text")]
    assert second.num_calls == 0 and second.finish() == []


@pytest.mark.parametrize("name", FORMATS)
def test_13_reasoning_first_then_the_call(name):
    text = "let me</think>" + FORMATS[name].removeprefix("pre")
    found = parse(text, name, prompt="<｜Assistant｜><think>")
    assert found[:2] == ("let me", "") and len(found[2]) == 2


@pytest.mark.parametrize("bar", ["|", "｜｜", "‖", "||"])
def test_14_other_bars_behind_a_canonical_beginning(bar):
    for name, text in FORMATS.items():
        begun = text.index(">") + 1
        other = text[:begun] + text[begun:].replace("｜", bar)
        assert parse(other, name) == parse(text, name)
        assert parse(other, name, *range(1, len(other))) == parse(text, name)
        assert parse(text.replace("｜", bar), name) == ("", text.replace("｜", bar), [])
    begun = V31.index(">") + 1
    blanks = V31[:begun] + V31[begun:].replace("▁", "_")
    assert parse(blanks, "deepseekv31") == parse(V31, "deepseekv31")


@pytest.mark.parametrize(
    "inside",
    [
        "f\n```json\n{}\n```",
        "f\n\n```json\n\n{}\n\n```\n",
        "f\n```\n{}\n```",
        "f\n```json{}```",
        "f\n```json\n{}\n",
        "f\n{}",
        " f \n ```json {} ",
        "f```json\n{}\n```",
    ],
)
def test_15_white_space_and_fences(inside):
    call = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{inside}<｜tool▁call▁end｜>"
    for text in (block(call, call), call + call, "<｜tool▁calls▁begin｜>\n" + call + "\n\n" + call):
        assert parse(text, "deepseekv3") == ("", "", [("f", "{}")] * 2)
        assert parse(text, "deepseekv3", *range(1, len(text)))[2] == [("f", "{}")] * 2


def test_16_arguments_of_earlier_calls_as_text_or_object():
    for arguments in ('{"x": "é"}', {"x": "é"}):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        chat = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        for family in (V3_FAMILY, V31_FAMILY):
            assert '{"x": "é"}' in built_in(family).render(chat)
        double = ChatTemplate(
            {"default": "{{ messages[0].tool_calls[0].function.arguments | tojson }}"}, {}, "x"
        )
        assert double.render(chat) == '{"x": "é"}'


# ---- DSML, as it should not be ----

UNTYPED = '<｜DSML｜invoke name="{}"><｜DSML｜parameter name="{}">7</｜DSML｜parameter>'


@pytest.mark.parametrize(
    "text, calls",
    [
        (dsml("f", ("a", "x", True)), [("f", '{"a": "x"}')]),  # no outer block
        ('<｜DSML｜invoke name="f"/>', [("f", "{}")]),
        ('<｜DSML｜invoke name="f">{"a": [1]}</｜DSML｜invoke>', [("f", '{"a": [1]}')]),
        ('<｜DSML｜invoke name="f">{"a": [1</｜DSML｜invoke>', [("f", '{"a": [1]}')]),
        (dsml_block(dsml("f", ("a", "x", True))).replace("function_calls", "tool_calls"),
         [("f", '{"a": "x"}')]),
        (UNTYPED.format("f", "a"), [("f", '{"a": 7}')]),
        (UNTYPED.format("get_weather", "city"), [("get_weather", '{"city": "7"}')]),
        (
            '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">x</｜DSML｜invoke>',
            [("f", '{"a": "x"}')],
        ),
        (
            '<｜DSML｜invoke name="f"><｜DSML｜invoke name="g"></｜DSML｜invoke>',
            [("f", "{}"), ("g", "{}")],
        ),
        ("<｜DSML｜invoke>", []),
        ("</｜DSML｜invoke></｜DSML｜parameter>", []),
    ],
)  # fmt: skip
def test_dsml_that_is_not_quite_right(text, calls):
    offered = [
        *TOOLS,
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "parameters": {"properties": {"city": {"type": "string"}}},
            },
        },
    ]
    for cuts in ((), range(1, len(text))):
        found = events(text, "deepseekv32", *cuts, offered=offered)
        begun = [e[2] for e in found if e[0] == "CallBegin"]
        arguments = [e[2] for e in found if e[0] == "CallArguments"]
        assert list(zip(begun, arguments, strict=True)) == calls
        assert not [e for e in found if e[0] == "Content"]


# ---- anything at all ----

PIECES = {
    "deepseekv3": [
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
        *(
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
            "function",
            "```json\n",
            "\n```",
            "f",
            '{"a": 1}',
        ),
        *('{"a": "x', "{", "}", "[", "]", ",", ":", '"', "\\", "NaN", "<|tool_calls_begin|>", "``"),
    ],
    "deepseekv32": [
        *("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", '<｜DSML｜invoke name="f">'),
        *(
            "</｜DSML｜invoke>",
            '<｜DSML｜parameter name="k" string="true">',
            "</｜DSML｜parameter>",
        ),
        *(
            '<｜DSML｜parameter name="k" string="false">',
            '<｜DSML｜parameter name="k">',
            "<｜DSML｜",
        ),
        *("\n\n", "{", '{"a": 1}', "12", "NaN", '"', ">", "/>", "<｜DSML｜invoke", "<|DSML|invoke"),
    ],
}
COMMON = ["<think>", "</think>", "<", "</", "prose", " ", "\n"]


@given(
    name=st.sampled_from(sorted(PIECES)),
    prompt=st.sampled_from(["<think>", "</think>", "<｜Assistant｜>"]),
    style=st.sampled_from(["deepseek-v3", "deepseek-r1"]),
    natural=st.booleans(),
    data=st.data(),
)
@settings(max_examples=examples(150), deadline=None)
def test_any_mixture_of_pieces_parses_the_same_however_it_is_cut(
    name, prompt, style, natural, data
):
    pieces = data.draw(st.lists(st.sampled_from(PIECES[name] + COMMON), max_size=12))
    text = "".join(pieces)
    whole = parse(text, name, reasoning=style, prompt=prompt, natural=natural)
    once = data.draw(st.integers(0, len(text)))
    for cuts in ([once], range(1, len(text))):
        assert parse(text, name, *cuts, reasoning=style, prompt=prompt, natural=natural) == whole
    said = "".join(whole[:2]) + "".join(json.loads(f'"{quoted(a)}"') for _, a in whole[2])
    assert said.count("prose") >= sum(p == "prose" for p in pieces) or not natural or whole[2]
    for _, arguments in whole[2]:
        assert json.loads(arguments) is not ...
    if not whole[2] and "<" not in text:
        assert whole[0] + whole[1] == text or style == "deepseek-r1"


def test_an_invocation_without_a_name_is_content():
    for text, said in (("<｜DSML｜invokeprose> x", "prose x"), ("a<｜DSML｜invoke>b", "ab")):
        for cuts in ((), range(1, len(text))):
            assert parse(text, "deepseekv32", *cuts, prompt="</think>") == ("", said, [])


NAMES = st.from_regex(r"[a-zA-Z0-9_-]{1,64}", fullmatch=True)
PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<|｜‖"))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN, inner, max_size=3),
    max_leaves=6,
)
KEYS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters='<|｜‖"'))
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(KEYS, VALUES, max_size=4)), max_size=3)


@given(calls=CALLS, prose=PLAIN, name=st.sampled_from(sorted(FORMATS)), data=st.data())
@settings(max_examples=examples(150), deadline=None)
def test_what_a_model_calls_arrives(calls, prose, name, data):
    if name == "deepseekv32":
        turn = {"role": "assistant", "content": prose, "tool_calls": []}
        for called, arguments in calls:
            turn["tool_calls"].append({"function": {"name": called, "arguments": arguments}})
        rendered = DsmlEncoding().render([turn])
        text = rendered.removeprefix("<｜begin▁of▁sentence｜>").removesuffix(
            "<｜end▁of▁sentence｜>"
        )
    else:
        write = v3 if name == "deepseekv3" else v31
        text = prose
        if calls:
            text += block(*(write(n, json.dumps(a, ensure_ascii=False)) for n, a in calls))
    cut = data.draw(st.integers(0, len(text)))
    _, content, found = parse(text, name, cut, prompt="</think>")
    assert content == prose
    assert [(n, json.loads(a)) for n, a in found] == calls


@given(text=st.text(alphabet='{}[],:"\\ \nuabtruefalsn0123.-eE\x01NTé', max_size=30))
@settings(max_examples=examples(300), deadline=None)
def test_json_comes_out_whole_whatever_goes_in(text):
    text = "{" + text
    results = set()
    for pieces in ([text], text):
        stream, out, rest = JsonStream(), "", ""
        for piece in pieces:
            if stream.done:
                rest += piece
                continue
            said, left = stream.feed(piece)
            out, rest = out + said, rest + left
        results.add((out if stream.done else out + stream.close(), rest))
    ((out, rest),) = results
    json.loads(out)
    if strict_json(text) is not NO_JSON:
        assert out + rest == text


def test_large_outputs_cost_linear_time():
    long = json.dumps({"text": "a < b " * 50_000, "list": list(range(50_000))})
    for name, text in [
        ("deepseekv31", block(*(v31("f", long) for _ in range(3)))),
        ("deepseekv32", dsml_block(dsml("f", ("k", "a < b " * 100_000, True)))),
        ("deepseekv31", "<｜tool▁call▁begin｜>" + "x" * 1_000_000),
        ("deepseekv31", "<" * 300_000),
        ("deepseekv32", '<｜DSML｜invoke name="' + "x" * 1_000_000),
    ]:
        begin = time.process_time()
        parse(text, name, *range(1000, len(text), 1000))
        assert time.process_time() - begin < 5


@pytest.mark.parametrize("flag", ["deepseekv3", "deepseek_v3", "DeepSeek-V3"])
def test_parser_names(flag):
    assert choose_parsers("deepseek_r1", flag, (None, None)) == Parsers("deepseek-r1", "deepseekv3")
    assert choose_parsers("auto", "auto", ("deepseek-r1", None)) == Parsers("deepseek-r1", None)
    assert choose_parsers("none", "none", ("x", "y")) == Parsers()
    with pytest.raises(ConfigError, match=r"--tool-call-parser 'qwen'.*deepseekv32"):
        choose_parsers("auto", "qwen", (None, None))


WORDS = ["Hi. ", "{", '"city": 1', "}", "get_weather", "\n", "</think>", "function", "```json\n"]


@pytest.mark.parametrize("name", TOOL_CALLS)
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_where_calls_are_forbidden_no_marker_is_text(name, data):
    """However the model uses them, and however the text is cut."""
    kind = TOOL_CALLS[name]
    tags = [tag if tag.endswith(">") else tag + ">" for tag in kind.TAGS.names]
    pieces = data.draw(st.lists(st.sampled_from([*WORDS, *tags]), max_size=12))
    text = "".join(pieces)
    reads = Parsers(None, name).start("", forbidden=True)
    events, at = [], 0
    while at < len(text):
        step = data.draw(st.integers(1, 9))
        events += reads.feed(text[at : at + step], 1)
        at += step
    events += reads.finish(data.draw(st.booleans()))
    assert all(isinstance(event, Content) for event in events) and reads.num_calls == 0
    said = "".join(event.text for event in events)
    assert not [tag for tag in kind.TAGS.names if tag in said], said
    if not any(tag in text for tag in kind.TAGS.names):
        assert said.split() == text.split()
