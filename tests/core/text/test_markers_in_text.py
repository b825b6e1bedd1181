"""Markers that are text: in arguments, answers and reasoning, own ones and other models'."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds_runtime.text.formats.dsml import DsmlEncoding
from ds_runtime.text.parsers.events import Answer, CallArguments, Content, Reasoning
from ds_runtime.text.parsers.json_stream import JsonStream
from ds_runtime.text.parsers.markers import Markers
from ds_runtime.text.parsers.registry import TOOL_CALLS, Parsers
from examples import examples

TOOLS = [{"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}]
TOKENS = [
    f"<｜tool▁{what}｜>"
    for what in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep", "output▁begin")
]
DSML = [
    *("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", '<｜DSML｜invoke name="f">'),
    *("</｜DSML｜invoke>", '<｜DSML｜parameter name="q" string="true">', "</｜DSML｜parameter>"),
    *("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
]
GLM = [
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
]
BARS = ("|", "｜｜", "‖", "||")
LENIENT = [m.replace("｜", bar) for m in (*TOKENS, *DSML) for bar in BARS]
LENIENT += [m.replace("▁", "_") for m in LENIENT if "▁" in m]
LENIENT += [
    "<|tool call end|>",
    "<|tool_calls_section_begin|>",
    "<|im_end|>",
    "<｜tool_call_end｜>",
]
PROSE = [
    "so ",
    "a < b",
    "<",
    "</",
    "\n",
    "`",
    "```",
    "ü你👍",
    "}",
    "]",
    "{",
    ":",
    ",",
    "/>",
    "|",
    "｜",
]
QUOTED = ['"', "\\", '\\"', "\t", "\x01", "\n```\n"]


def texts(*kinds):
    return st.lists(st.sampled_from([p for kind in kinds for p in kind]), max_size=8).map("".join)


ANY_TEXT = texts(TOKENS, DSML, GLM, LENIENT, PROSE, QUOTED)


def values(text):
    return st.recursive(
        st.none() | st.booleans() | st.integers() | text,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
        max_leaves=6,
    )


def read(name, text, cuts=(), prompt="</think>", natural=True, tools=TOOLS, style="deepseek-v3"):
    parser, answer = Parsers(style, name).start(prompt, tools), Answer()
    for begin, end in zip((0, *cuts), (*cuts, len(text)), strict=True):
        answer.add(parser.feed(text[begin:end]))
    answer.add(parser.finish(natural))
    return answer


def found(answer):
    calls = [(c.name, json.loads(c.arguments)) for c in answer.calls]
    return answer.reasoning, answer.content, calls


def some_cuts(data, text):
    """The whole, anywhere, or every character."""
    some = st.lists(st.integers(0, len(text)), max_size=6).map(sorted)
    return data.draw(st.just(range(1, len(text))) | some)


def json_call(form, arguments):
    if form == "deepseekv3":
        said = f"function<｜tool▁sep｜>write\n```json\n{arguments}\n```"
    elif form == "deepseekv31":
        said = f"write<｜tool▁sep｜>{arguments}"
    else:
        return f'<｜DSML｜invoke name="write">\n{arguments}\n</｜DSML｜invoke>'
    return f"<｜tool▁call▁begin｜>{said}<｜tool▁call▁end｜>"


def in_block(form, *calls):
    if form == "deepseekv32":
        return "\n\n<｜DSML｜function_calls>\n" + "\n".join(calls) + "\n</｜DSML｜function_calls>"
    return "<｜tool▁calls▁begin｜>" + "\n".join(calls) + "<｜tool▁calls▁end｜>"


# ---- arguments as JSON ----


@given(
    form=st.sampled_from(["deepseekv3", "deepseekv31", "deepseekv32"]),
    calls=st.lists(st.dictionaries(ANY_TEXT, values(ANY_TEXT), max_size=3), min_size=1, max_size=3),
    spaces=st.sampled_from([None, 1]),
    data=st.data(),
)
@settings(max_examples=examples(300), deadline=None)
def test_no_marker_counts_inside_a_json_string(form, calls, spaces, data):
    written = [json.dumps(c, ensure_ascii=False, indent=spaces) for c in calls]
    text = "so" + in_block(form, *(json_call(form, w) for w in written))
    answer = read(form, text, some_cuts(data, text))
    assert found(answer) == ("", "so", [("write", c) for c in calls])
    assert [c.arguments for c in answer.calls] == written


@given(
    form=st.sampled_from(["deepseekv3", "deepseekv31"]),
    value=values(ANY_TEXT).filter(lambda v: isinstance(v, list)),
    data=st.data(),
)
@settings(max_examples=examples(100), deadline=None)
def test_nor_where_the_arguments_are_no_object(form, value, data):
    text = in_block(form, json_call(form, json.dumps(value, ensure_ascii=False)))
    assert found(read(form, text, some_cuts(data, text)))[2] == [("write", value)]
    inside = {"a": value}
    twice = json.dumps(json.dumps(inside, ensure_ascii=False), ensure_ascii=False)
    text = in_block(form, json_call(form, twice))
    assert found(read(form, text, some_cuts(data, text))) == ("", "", [("write", inside)])


@pytest.mark.parametrize("form", ["deepseekv3", "deepseekv31", "deepseekv32"])
@pytest.mark.parametrize("left", ["x", "x\n", "", "x \\\\", "<|tool_call_end|> x"])
def test_a_string_that_is_never_closed_still_ends_at_the_marker(form, left):
    broken = json_call(form, '{"a": 1, "b": "' + left)
    if form == "deepseekv32":
        broken = broken.replace("\n</｜DSML｜invoke>", "</｜DSML｜invoke>")
    value = {"a": 1, "b": json.loads(f'"{left}"', strict=False)}
    for others in ([], [{"c": 1}], [{}, {"c": "d"}], [{"": ""}]):
        more = [json_call(form, json.dumps(o)) for o in others]
        text = in_block(form, broken, *more)
        for cuts in ((), range(1, len(text))):
            got = found(read(form, text, cuts))
            assert got == ("", "", [("write", v) for v in (value, *others)])


@pytest.mark.parametrize("form", ["deepseekv31", "deepseekv32"])
def test_a_cut_inside_a_string_in_doubt_gives_no_whole_call(form):
    end = "<｜tool▁call▁end｜>" if form == "deepseekv31" else "</｜DSML｜invoke>"
    arguments = json.dumps({"a": f"x {end} y"}, ensure_ascii=False)
    text = in_block(form, json_call(form, arguments))
    for stop in range(text.index(end) + len(end), text.index(" y")):
        answer = read(form, text[:stop], natural=False)
        assert not answer.calls and answer.content == ""
        assert arguments.startswith(answer.all_calls[0].arguments)


def test_text_passes_at_once_where_a_marker_is_another_models():
    parser = Parsers(None, "deepseekv31").start("", TOOLS)
    parser.feed(
        in_block("deepseekv31", json_call("deepseekv31", '{"a": "x')).split("<｜tool▁call▁end")[0]
    )
    (said,) = parser.feed("<|tool_call_end|> more")
    assert isinstance(said, CallArguments) and said.text == "<|tool_call_end|> more"


# ---- arguments in DSML ----


def dsml_text(content, *calls):
    turn = {"role": "assistant", "content": content, "tool_calls": []}
    turn["tool_calls"] = [{"function": {"name": "write", "arguments": c}} for c in calls]
    text = DsmlEncoding().render([turn])
    return text.removeprefix("<｜begin▁of▁sentence｜>").removesuffix("<｜end▁of▁sentence｜>")


NO_END = [m for m in (*TOKENS, *DSML, *GLM, *LENIENT) if m != "</｜DSML｜parameter>"]
DSML_TEXT = texts(NO_END, PROSE, QUOTED)
DSML_KEYS = texts(["a", "b", *TOKENS, "</｜DSML｜invoke>", "<|DSML|parameter", " ", ">"])


@given(
    calls=st.lists(
        st.dictionaries(
            DSML_KEYS, DSML_TEXT | values(ANY_TEXT).filter(lambda v: not isinstance(v, str)),
            max_size=3,
        ),
        min_size=1, max_size=3,
    ),
    data=st.data(),
)  # fmt: skip
@example(
    calls=[{"a": "</｜DSML｜invoke>\n</｜DSML｜function_calls>"}, {"a": ["</｜DSML｜parameter>"]}],
    data=None,
)
@settings(max_examples=examples(300), deadline=None)
def test_a_dsml_value_ends_at_its_own_tag_alone(calls, data):
    text = dsml_text("so", *calls)
    cuts = range(1, len(text)) if data is None else some_cuts(data, text)
    assert found(read("deepseekv32", text, cuts)) == ("", "so", [("write", c) for c in calls])


PARAM = '<{}parameter name="{}" string="{}">'


@pytest.mark.parametrize("bar", BARS)
@pytest.mark.parametrize("kind, value", [("true", "x"), ("false", 1)])
def test_a_dsml_value_without_its_tag_ends_at_the_first_that_could_be(bar, kind, value):
    canon, other = "｜DSML｜", f"{bar}DSML{bar}"
    head = f'<{canon}function_calls>\n<{canon}invoke name="write">\n'
    for ends in (
        [f"</{canon}invoke>", f"</{canon}function_calls>"],
        [f"</{other}parameter>", f"</{other}invoke>", f"</{other}function_calls>"],
        [f"</{canon}function_calls>"],
        [],
    ):
        text = head + PARAM.format(canon, "a", kind) + str(value) + "\n".join(ends)
        for cuts in ((), range(1, len(text))):
            assert found(read("deepseekv32", text, cuts)) == ("", "", [("write", {"a": value})])


# ---- answers and reasoning ----


@given(
    form=st.sampled_from(sorted(TOOL_CALLS)),
    thought=texts(LENIENT, PROSE),
    said=texts(LENIENT, PROSE),
    data=st.data(),
)
@settings(max_examples=examples(300), deadline=None)
def test_lenient_markers_in_reasoning_and_answers_stay_text(form, thought, said, data):
    text = f"{thought}</think>{said}."
    answer = read(form, text, some_cuts(data, text), prompt="<think>")
    assert found(answer) == (thought, said + ".", [])


@given(
    form=st.sampled_from(["deepseekv3", "deepseekv31", "deepseekv32"]),
    before=texts(LENIENT, PROSE),
    after=texts(LENIENT, PROSE),
    data=st.data(),
)
@settings(max_examples=examples(200), deadline=None)
def test_and_around_calls(form, before, after, data):
    text = f"{before}." + in_block(form, json_call(form, '{"a": 1}')) + f"\nso {after}."
    got = found(read(form, text, some_cuts(data, text)))
    assert got == ("", f"{before}.so {after}.", [("write", {"a": 1})])


@pytest.mark.parametrize("form", ["deepseekv3", "deepseekv31", "deepseekv32"])
@pytest.mark.parametrize("style", ["deepseek-v3", "deepseek-r1"])
def test_a_canonical_marker_still_ends_the_reasoning(form, style):
    text = "hm" + in_block(form, json_call(form, "{}")).lstrip("\n")
    for cuts in ((), range(1, len(text))):
        answer = read(form, text, cuts, prompt="<think>", style=style)
        assert found(answer) == ("hm", "", [("write", {})])


# ---- lenient spellings of a call that began canonically ----


@pytest.mark.parametrize("form", ["deepseekv3", "deepseekv31", "deepseekv32"])
@pytest.mark.parametrize("bar", BARS)
@pytest.mark.parametrize("blank", ["▁", "_", " "])
def test_lenient_spellings_count_where_a_call_began_canonically(form, bar, blank):
    if form == "deepseekv32":
        text = dsml_text("so", {"a": "x", "b": [1]}, {})
    else:
        text = "so" + in_block(form, json_call(form, '{"a": "x", "b": [1]}'), json_call(form, "{}"))
    first = text.index(">") + 1
    other = text[:first] + text[first:].replace("｜", bar).replace("▁", blank)
    for cuts in ((), range(1, len(text))):
        whole = found(read(form, other, [c for c in cuts if c < len(other)]))
        assert whole == ("", "so", [("write", {"a": "x", "b": [1]}), ("write", {})])
    # Where text follows that belongs to no call, the next call must begin canonically again.
    none = other[first:].lstrip("\n")
    assert found(read(form, text + "then " + none))[1] == "sothen " + none


# ---- anything at all ----

EVERYTHING = [*TOKENS, *DSML, *GLM, *LENIENT[::5], *PROSE, *QUOTED, "<think>", "</think>"]
EVERYTHING += [
    "write",
    "write\n",
    '{"a": "',
    '"}',
    '{"a": 1}',
    '<｜DSML｜parameter name="k">',
    "12",
]


@given(
    form=st.sampled_from(sorted(TOOL_CALLS)),
    prompt=st.sampled_from(["<think>", "</think>", "<｜Assistant｜>", "<|assistant|>"]),
    style=st.sampled_from(["deepseek-v3", "deepseek-r1", "glm45"]),
    pieces=st.lists(st.sampled_from(EVERYTHING), max_size=14),
    natural=st.booleans(),
    data=st.data(),
)
@settings(max_examples=examples(400), deadline=None)
def test_any_mixture_reads_the_same_however_it_is_cut(form, prompt, style, pieces, natural, data):
    text = "".join(pieces)
    whole = read(form, text, prompt=prompt, style=style, natural=natural)
    for cuts in (some_cuts(data, text), range(1, len(text))):
        again = read(form, text, cuts, prompt, natural, style=style)
        assert found(again) == found(whole)
        parts = [[c.name, c.arguments, c.complete] for c in again.all_calls]
        assert parts == [[c.name, c.arguments, c.complete] for c in whole.all_calls]
    for event in whole.events:
        if isinstance(event, Content | Reasoning):
            assert event.text


def test_doubts_cost_linear_time():
    again = '<｜tool▁call▁end｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\\"'
    param = '</|DSML|parameter><｜DSML｜parameter name="a" string="true">'
    loop = (
        '</｜DSML｜invoke><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">"\\"'
    )
    value = "<tool_call>f<arg_key>a</arg_key><arg_value>"
    for form, text in [
        ("deepseekv31", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"' + again * 20_000),
        ("deepseekv31", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"' + again * 20_000 + '" x'),
        ("deepseekv32", '<｜DSML｜invoke name="f">' + param * 10_000),
        ("deepseekv32", '<｜DSML｜invoke name="f">' + loop * 5_000),
        ("deepseekv32", '<｜DSML｜invoke name="f">' + loop * 5_000 + '" x'),
        ("glm47", value + "</tool_call>" * 50_000),
        ("glm47", value + f'"</arg_value></tool_call>{value}\\"' * 5_000),
        ("glm47", "<tool_call>" * 50_000),
    ]:
        begin = time.process_time()
        read(form, text, range(1000, len(text), 1000))
        assert time.process_time() - begin < 5, (form, text[:80])


def test_a_marker_outside_strings_ends_json_in_any_spelling():
    ends = Markers(["<｜end｜>"])
    for text, json_text, left in [
        ('{"a": 1 <|end|> x', '{"a": 1 }', "<|end|> x"),
        ('{"a": "<|end|>"<｜end｜>', '{"a": "<|end|>"}', "<｜end｜>"),
        ('{"<｜end｜>": "<｜end｜>"}x', '{"<｜end｜>": "<｜end｜>"}', "x"),
    ]:
        for pieces in ([text], text):
            stream, out, rest = JsonStream(ends), "", ""
            for piece in pieces:
                said, unread = (
                    stream.feed(piece) if not (stream.done or stream.stopped) else ("", piece)
                )
                out, rest = out + said, rest + unread
            assert (out if stream.done else out + stream.close(), rest) == (json_text, left)
