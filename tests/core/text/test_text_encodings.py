"""The prompt encodings of every family: V3.2's against DeepSeek's own fixture, the others as the
templates that DeepSeek ships with the checkpoints write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_runtime.errors import RequestError
from ds_runtime.text.formats.dsml import DsmlEncoding
from ds_runtime.text.formats.families import (
    R1,
    V2,
    V3,
    V3_0324,
    V4,
    V31,
    V32,
    find_family,
    tool_format,
)
from ds_runtime.text.formats.template import ChatTemplate, built_in, load_template
from ds_runtime.text.tokenizer import Tokenizer

FIXTURES = Path(__file__).with_name("fixtures")
FIXTURE = json.loads((FIXTURES / "dsml_input.json").read_text(encoding="utf-8"))
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, BOT = "<｜User｜>", "<｜Assistant｜>"
SYSTEM = {"role": "system", "content": "S"}
ASK, ASK2 = {"role": "user", "content": "q"}, {"role": "user", "content": "r"}
SAY = {"role": "assistant", "content": "hm</think>a"}
RESULT = {"role": "tool", "content": "42"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"x": 1}}}


def calls(*pairs, **more):
    made = [{"function": {"name": n, "arguments": a}} for n, a in pairs]
    return {"role": "assistant", "content": None, "tool_calls": made} | more


def test_the_fixture_byte_for_byte():
    expected = (FIXTURES / "dsml_output.txt").read_text(encoding="utf-8")
    text = DsmlEncoding().render(FIXTURE["messages"], FIXTURE["tools"], kwargs={"thinking": True})
    assert text == expected


def dsml(*messages, tools=None, generate=True, **kwargs):
    return DsmlEncoding().render(messages, tools, generate, kwargs).removeprefix(BOS)


CALLED = calls(("f", '{"a": "x", "n": [1, null], "b": true}'), ("g", {}))
INVOKES = (
    '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">[1, null]</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="b" string="false">true</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
RESULTS = (
    "\n\n<function_results>\n<result>42</result>\n<result>42</result>\n</function_results>\n\n"
)


def test_dsml_modes():
    assert dsml(SYSTEM, ASK) == f"S{USER}q{BOT}</think>"
    assert dsml(SYSTEM, ASK, thinking=True) == f"S{USER}q{BOT}<think>"
    said = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    turn = f"{USER}q{BOT}</think>a{EOS}{USER}r{BOT}"
    assert dsml(ASK, said, ASK2) == turn + "</think>"
    assert dsml(ASK, said, ASK2, thinking=True) == turn + "<think>"
    assert dsml(ASK, said, thinking=True) == f"{USER}q{BOT}<think>hm</think>a{EOS}"
    assert dsml(ASK, generate=False) == f"{USER}q"
    prefix = {"role": "assistant", "content": "a", "prefix": True}
    assert dsml(ASK, prefix) == f"{USER}q{BOT}</think>a"


def test_dsml_calls_and_results():
    assert dsml(ASK, CALLED, RESULT, RESULT) == (
        f"{USER}q{BOT}</think>{INVOKES}{EOS}{RESULTS}</think>"
    )
    thought = CALLED | {"reasoning_content": "hm"}
    assert dsml(ASK, thought, RESULT, RESULT, thinking=True) == (
        f"{USER}q{BOT}<think>hm</think>{INVOKES}{EOS}{RESULTS}<think>"
    )
    later = dsml(ASK, thought, RESULT, RESULT, ASK2, thinking=True)
    assert later == f"{USER}q{BOT}</think>{INVOKES}{EOS}{RESULTS}</think>{USER}r{BOT}<think>"


def test_dsml_tools_stand_in_the_existing_system_message():
    text = dsml(SYSTEM, ASK, tools=[TOOL])
    assert text.startswith("S\n\n## Tools\n\nYou have access") and text.count("## Tools") == 1
    assert "<functions>\n" + json.dumps(TOOL["function"]) + "\n</functions>\n" + USER in text
    assert dsml(ASK, tools=[TOOL]).startswith("\n\n## Tools\n\n")


def test_dsml_response_format_and_developer():
    schema = {"type": "object", "title": "é"}
    wanted = (
        "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
        '{"type": "object", "title": "é"}'
    )
    assert dsml(SYSTEM, ASK, response_format=schema) == f"S{wanted}{USER}q{BOT}</think>"
    developer = {"role": "developer", "content": "q", "response_format": schema, "tools": [TOOL]}
    text = dsml(SYSTEM, developer, thinking=True)
    assert text.startswith(f"S{USER}\n\n## Tools\n\n")
    assert text.endswith(f"</functions>\n{wanted}\n\n# The user's message is: q{BOT}<think>")
    assert dsml(developer, SAY, ASK, thinking=True) == f"hm</think>a{EOS}{USER}q{BOT}<think>"
    kept = dsml(developer, SAY, ASK, thinking=True, drop_thinking=False)
    assert "# The user's message is: q" in kept


@pytest.mark.parametrize(
    "messages, said",
    [
        ([ASK, {"role": "assistant", "content": "a"}], "neither reasoning_content nor tool_calls"),
        ([ASK, calls(("f", "{"))], "a JSON object is needed"),
        ([ASK, calls(("f", "[1]"))], "a JSON object is needed"),
    ],
)
def test_dsml_refusals(messages, said):
    with pytest.raises(RequestError, match=said):
        dsml(*messages, thinking=True)


def text_of(family, *messages, tools=None, generate=True, **kwargs):
    return built_in(family).render(messages, tools, generate, kwargs)


def test_v2():
    assert text_of(V2, SYSTEM, ASK, SAY, ASK2) == (
        f"{BOS}S\n\nUser: q\n\nAssistant: hm</think>a{EOS}User: r\n\nAssistant:"
    )
    with pytest.raises(RequestError, match="does not know tools"):
        text_of(V2, ASK, calls(("f", "{}")))
    with pytest.raises(RequestError, match="no place for tools"):
        text_of(V2, ASK, tools=[TOOL])


def v3_call(name, arguments):
    return (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
        "<｜tool▁call▁end｜>"
    )


@pytest.mark.parametrize(
    "family, history, between, opening",
    [(V3, "hm</think>a", "", ""), (V3_0324, "hm</think>a", "\n", ""), (R1, "a", "", "<think>\n")],
)
def test_v3_and_r1(family, history, between, opening):
    assert text_of(family, SYSTEM, SYSTEM, ASK, SAY, ASK2) == (
        f"{BOS}S\n\nS{USER}q{BOT}{history}{EOS}{USER}r{BOT}{opening}"
    )
    one = calls(("f", '{"x": 1}'))
    begun = f"{BOS}{USER}q{BOT}<｜tool▁calls▁begin｜>" + v3_call("f", '{"x": 1}')
    output = "<｜tool▁output▁begin｜>42<｜tool▁output▁end｜>"
    after = f"<｜tool▁calls▁end｜>{EOS}<｜tool▁outputs▁begin｜>{output}"
    assert text_of(family, ASK, one, RESULT) == f"{begun}{after}<｜tool▁outputs▁end｜>"
    two = calls(("f", '{"x": 1}'), ("g", "{}"))
    text = text_of(family, ASK, two, RESULT, RESULT, SAY, ASK2)
    assert text == (
        f"{begun}\n{v3_call('g', '{}')}{after}{between}{output}<｜tool▁outputs▁end｜>"
        f"{history}{EOS}{USER}r{BOT}{opening}"
    )
    assert text_of(family, SYSTEM, ASK, tools=[TOOL]).startswith(f"{BOS}S\n\n## Tools\n")


def test_0324_ends_the_users_turn_with_the_assistants_marker():
    assert text_of(V3_0324, ASK, generate=False) == f"{BOS}{USER}q{BOT}"
    assert text_of(V3, ASK, generate=False) == f"{BOS}{USER}q"


def test_v31():
    assert text_of(V31, SYSTEM, ASK, SAY, ASK2) == (
        f"{BOS}S{USER}q{BOT}</think>a{EOS}{USER}r{BOT}</think>"
    )
    assert text_of(V31, ASK, thinking=True) == f"{BOS}{USER}q{BOT}<think>"
    assert text_of(V31, SYSTEM) == f"{BOS}S{BOT}</think>"
    two = calls(("f", '{"x": 1}'), ("g", "{}"))
    called = (
        f"{BOS}{USER}q{BOT}</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
        '{"x": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
        f"<｜tool▁calls▁end｜>{EOS}" + "<｜tool▁output▁begin｜>42<｜tool▁output▁end｜>" * 2
    )
    assert text_of(V31, ASK, two, RESULT, RESULT, thinking=True) == called
    reopened = text_of(V31, ASK, two, RESULT, RESULT, reopen_after_tool=True)
    assert reopened == f"{called}{BOT}</think>"
    answered = text_of(V31, ASK, two, RESULT, RESULT, {"role": "assistant", "content": "a"}, ASK2)
    assert answered == f"{called}a{EOS}{USER}r{BOT}</think>"
    prefix = {"role": "assistant", "content": "a", "prefix": True}
    assert text_of(V31, ASK, prefix, thinking=True) == f"{BOS}{USER}q{BOT}<think>a"


def test_v31_words_the_tools_as_its_model_card_does():
    assert text_of(V31, SYSTEM, ASK, tools=[TOOL]) == (
        f"{BOS}S\n\n## Tools\nYou have access to the following tools:\n\n### f\n"
        'Description: d\n\nParameters: {"x": 1}\n\n'
        "IMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments"
        "<｜tool▁call▁end｜>{additional_tool_calls}<｜tool▁calls▁end｜>\n\nWhere:\n"
        "- `tool_call_name` must be an exact match to one of the available tools\n"
        "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters "
        "Schema\n- For multiple tool calls, chain them directly without separators or spaces"
        f"{USER}q{BOT}</think>"
    )


@pytest.mark.parametrize(
    "name, config, family",
    [
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", {"model_type": "deepseek_v2"}, V2),
        ("deepseek-ai/DeepSeek-V2.5-1210", {"model_type": "deepseek_v2"}, V3),
        ("deepseek-ai/DeepSeek-V3", {"model_type": "deepseek_v3"}, V3),
        ("deepseek-ai/DeepSeek-V3-0324", {"model_type": "deepseek_v3"}, V3_0324),
        ("deepseek-ai/DeepSeek-R1-0528", {"model_type": "deepseek_v3"}, R1),
        ("/models/DeepSeek-V3.1-Terminus", {"model_type": "deepseek_v3"}, V31),
        (
            "/models/mine",
            {"model_type": "deepseek_v3", "quantization_config": {"scale_fmt": "ue8m0"}},
            V31,
        ),
        ("deepseek-ai/DeepSeek-V3.2-Exp", {"model_type": "deepseek_v32"}, V31),
        ("deepseek-ai/DeepSeek-V3.2", {"model_type": "deepseek_v32"}, V32),
        ("deepseek-ai/DeepSeek-V4-Flash", {"model_type": "deepseek_v4"}, V4),
        ("/models/mine", {"model_type": "deepseek-v4"}, V4),
        ("some/llama", {"model_type": "llama"}, None),
    ],
)
def test_families_by_name_and_config(tmp_path, name, config, family):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_family(tmp_path, name) is family


def test_the_checkpoints_own_template_wins(bpe_folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((bpe_folder / name).read_bytes())
    tokenizer = Tokenizer.load(tmp_path)
    assert isinstance(load_template(tmp_path, tokenizer, None, V32), DsmlEncoding)
    assert load_template(tmp_path, tokenizer, None, V3).render([ASK]) == f"{BOS}{USER}q{BOT}"
    (tmp_path / "chat_template.jinja").write_text("own")
    assert load_template(tmp_path, tokenizer, None, V32).render([ASK]) == "own"


@pytest.mark.parametrize("family", [V2, V3, V3_0324, R1, V31, V32, V4])
def test_one_begin_of_sentence(bpe, family):
    ids = bpe.encode(built_in(family).render([SYSTEM, ASK]))
    assert ids[0] == bpe.bos_id and ids.count(bpe.bos_id) == 1


def test_a_template_without_words_for_tools_gets_them_in_the_system_message():
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    template = ChatTemplate({"default": source}, {}, "x", V3)
    assert template.render([SYSTEM, ASK], [TOOL]).startswith("[system]S\n\n## Tools\n")
    assert template.render([ASK], [TOOL]).startswith("[system]## Tools\n")
    assert template.render([ASK]) == "[user]q"


@pytest.mark.parametrize(
    "source, expected",
    [
        ("<｜tool▁sep｜>{{ name }}\n```json", "deepseekv3"),
        ("{{ name }}<｜tool▁sep｜>", "deepseekv31"),
        ("<｜DSML｜invoke", "deepseekv32"),
        ("<｜DSML｜tool_calls><｜DSML｜invoke", "deepseekv4"),
        ("plain", "deepseekv31"),
    ],
)
def test_the_template_tells_the_format_of_calls(source, expected):
    assert tool_format([source], V31) == expected
    assert ChatTemplate({"default": source}, {}, "x", V31).tool_calls == expected
