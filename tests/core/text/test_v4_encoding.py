"""V4's prompts against DeepSeek's own encoder, token by token, over generated conversations."""

from __future__ import annotations

import json

import deepseek_recipe as recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from ds_runtime.errors import RequestError
from ds_runtime.server.generate.chat import chat_prompt
from ds_runtime.server.generate.protocol import ChatRequest
from ds_runtime.text.formats.dsml_v4 import V4Encoding
from ds_runtime.text.tokenizer import Tokenizer
from examples import examples

# No marker in it: the server takes markers in a message for what they spell, the other does not.
TEXT = st.text(st.sampled_from("aé你 \n<>{\"'1/"), max_size=6)
SOME = TEXT.filter(bool)
# The other writes 1e-7 where V4's training data, made by Python, has 1e-07.
NUMBERS = st.integers(-(2**53), 2**53) | st.sampled_from([0.5, -2.0, 1e5, 123.25])
VALUES = st.recursive(
    TEXT | NUMBERS | st.booleans() | st.none(),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXT, v, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(SOME, VALUES, max_size=3).map(json.dumps) | st.sampled_from(
    ["", "{", "null", "[1]", '"x"', '{"a":  1}']
)
SCHEMAS = st.sampled_from(
    [None, {"type": "object"}, {"type": "object", "properties": {"z": {"type": "string"}, "a": {}}}]
)
FUNCTIONS = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "get_weather"])},
    optional={"description": TEXT, "parameters": SCHEMAS},
)
EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"]


@st.composite
def conversations(draw):
    """Messages; ids of calls that sort as they stand, for the other goes by their order."""
    messages, number = [], 0
    for kind in draw(st.lists(st.sampled_from("suuac"), min_size=1, max_size=7)):
        if kind in "su":
            role = "system" if kind == "s" else "user"
            messages.append({"role": role, "content": draw(TEXT)})
            continue
        message = {"role": "assistant", "content": draw(TEXT)}
        if draw(st.booleans()):
            message["reasoning_content"] = draw(TEXT)
        messages.append(message)
        if kind == "c":
            calls = []
            for arguments in draw(st.lists(ARGUMENTS, min_size=1, max_size=3)):
                function = {"name": draw(st.sampled_from("fg")), "arguments": arguments}
                calls.append({"id": f"c{number:02}", "type": "function", "function": function})
                number += 1
            message["tool_calls"] = calls
            results = [
                {"role": "tool", "tool_call_id": c["id"], "content": draw(TEXT)} for c in calls
            ]
            messages += draw(st.permutations(results))
    return messages


@st.composite
def requests(draw):
    body = {"messages": draw(conversations())}
    if draw(st.booleans()):
        functions = draw(st.lists(FUNCTIONS, min_size=1, max_size=2, unique_by=lambda f: f["name"]))
        body["tools"] = [{"type": "function", "function": f} for f in functions]
        body |= draw(st.sampled_from([{}, {"tool_choice": "none"}, {"tool_choice": "auto"}]))
    if draw(st.booleans()):
        body["reasoning_effort"] = draw(st.sampled_from(EFFORTS))
    if draw(st.booleans()):
        body["thinking"] = {"type": draw(st.sampled_from(["enabled", "disabled"]))}
    kind = draw(st.sampled_from(["none", "none", "json_object", "json_schema"]))
    if kind == "json_schema":
        named = {"name": "x", "schema": {"type": "object", "title": "é"}}
        body["response_format"] = {"type": kind, "json_schema": named}
    elif kind == "json_object":  # which the other takes only where a message says so
        body["response_format"] = {"type": kind}
        body["messages"].append({"role": "user", "content": "json"})
    return body


@pytest.fixture(scope="module")
def vocabulary(bpe_folder, tmp_path_factory):
    """(ours, theirs), over one tokenizer that has V4's markers as tokens."""
    folder = tmp_path_factory.mktemp("v4")
    backend = Backend.from_file(str(bpe_folder / "tokenizer.json"))
    markers = ("<think>", "</think>", "｜DSML｜", "<｜User｜>", "<｜Assistant｜>")
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in markers])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_bytes(
        (bpe_folder / "tokenizer_config.json").read_bytes()
    )
    theirs = recipe.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder), recipe.DeepseekV4Encoding().with_tokenizer(theirs)


def theirs_of(encoding, body):
    body = json.loads(json.dumps({"model": "DeepSeek-V4-Pro", **body}))
    return recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions()).conversation


def check(vocabulary, body, **ours):
    tokenizer, encoding = vocabulary
    conversation = theirs_of(encoding, body)
    found = chat_prompt(ChatRequest(**body | ours), V4Encoding(), tokenizer)
    assert found.text == encoding.render_conversation(conversation).prompt
    # Their words between markers are encoded apart from these, ours all at once.
    assert found.ids == encoding.encode(conversation)


@given(body=requests())
@settings(max_examples=examples(300), deadline=None)
def test_what_the_recipe_writes(vocabulary, body):
    check(vocabulary, body)


@given(body=requests(), said=TEXT, thought=st.none() | SOME)
@settings(max_examples=examples(100), deadline=None)
def test_an_answer_that_is_begun(vocabulary, body, said, thought):
    """`continue_final_message` here is their `prefix`."""
    for name in ("tools", "tool_choice", "response_format"):  # which the other refuses here
        body.pop(name, None)
    body["messages"] = [m for m in body["messages"] if m["role"] in ("system", "user")]
    by_effort = "disabled" if body.get("reasoning_effort") == "none" else "enabled"
    thinks = body.get("thinking", {"type": by_effort})["type"] == "enabled"
    last = {"role": "assistant", "content": said or "a"}
    if thought is not None and thinks:
        last["reasoning_content"] = thought
    messages = [*body["messages"], {"role": "user", "content": "q json"}]
    theirs = {**body, "messages": [*messages, {**last, "prefix": True}]}
    ours = [*messages, last]
    check(vocabulary, theirs, messages=ours, continue_final_message=True)


def test_efforts_are_texts_at_the_head():
    def head(**kwargs):
        text = V4Encoding().render([{"role": "user", "content": "q"}], None, True, kwargs)
        return text.partition("<｜User｜>")[0].removeprefix("<｜begin▁of▁sentence｜>")

    assert head() == head(reasoning_effort="high") == head(thinking=True)
    assert head().startswith("Reasoning Effort: Absolute maximum")
    assert head(reasoning_effort="max").startswith("Reasoning Effort: Beyond maximum")
    assert head(reasoning_effort="low") == head(reasoning_effort="none") == ""
    assert head(thinking=False, reasoning_effort="max") == ""
    with pytest.raises(RequestError, match=r"reasoning_effort is 'most': must be one of none, min"):
        head(reasoning_effort="most")


def test_reasoning_is_kept_where_asked_too():
    """`drop_thinking` false keeps it without tools, as tools do."""
    said = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    turns = [{"role": "user", "content": "q"}, said, {"role": "user", "content": "r"}]
    assert "<｜Assistant｜></think>a<" in V4Encoding().render(turns)
    kept = V4Encoding().render(turns, None, True, {"drop_thinking": False})
    assert "<｜Assistant｜><think>hm</think>a<" in kept
