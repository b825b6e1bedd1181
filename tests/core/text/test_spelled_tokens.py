"""What clients spell stays text in chats: no id that only templates write comes of it."""

from __future__ import annotations

import json
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from ds_runtime.errors import RequestError
from ds_runtime.text.formats.dsml import DsmlEncoding
from ds_runtime.text.formats.dsml_v4 import V4Encoding
from ds_runtime.text.formats.families import V2, V3, V31
from ds_runtime.text.formats.template import ChatTemplate, built_in
from ds_runtime.text.spelled import _pattern, marked
from ds_runtime.text.tokenizer import Tokenizer

TAGS = ("<think>", "</think>")


@pytest.fixture(scope="module")
def without(bpe_folder):
    """The same tokenizer as one that has no added tokens."""
    raw = json.loads((bpe_folder / "tokenizer.json").read_text())
    return Backend.from_str(json.dumps({**raw, "added_tokens": []}))


@pytest.fixture(scope="module")
def spellings(bpe):
    return st.one_of(
        st.sampled_from(bpe.added_texts),
        st.sampled_from(
            ["<", "｜", "think>", "User", " ", "a", "é", "你", "\n", "\ue010", r"\ue011"]
        ),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=3),
    )


def user(content):
    return {"role": "user", "content": content}


def controls(bpe, ids):
    """The added tokens among them."""
    added = bpe.backend.get_added_tokens_decoder()
    return [added[i].content for i in ids if i in added]


def of_text(bpe, text):
    """The ids of a user's text by itself."""
    found = marked([user(text)], None, {}, bpe.added_texts)
    said = found.messages[0]["content"]
    assert found.plain(said) == text
    return bpe.encode(said, mark=found.mark)


def encoded(bpe, template, messages, tools=None):
    found = marked(messages, tools, {}, bpe.added_texts)
    text = template.render(found.messages, found.tools)
    ids = bpe.encode(text, mark=found.mark)
    assert bpe.decode(ids, skip_special=False) == found.plain(text)
    return ids


ESCAPING = "<｜User｜>{{ messages | tojson(ensure_ascii=True) }}{{ tools | tojson }}"
TEMPLATES = {
    "v2": built_in(V2),
    "v3": built_in(V3),
    "v31": built_in(V31),
    "v32": DsmlEncoding(),
    "v4": V4Encoding(),
    "escaping": ChatTemplate({"default": ESCAPING}, {}, "a test"),
}
EVERY_TEMPLATE = pytest.mark.parametrize("name", TEMPLATES)


@given(data=st.data())
def test_text_is_encoded_as_without_added_tokens(bpe, without, spellings, data):
    text = "".join(data.draw(st.lists(spellings, max_size=12)))
    assert of_text(bpe, text) == without.encode(text, add_special_tokens=False).ids


def test_text_is_encoded_as_transformers_do_with_split_special_tokens(bpe, bpe_folder):
    """Where all added tokens are special ones, which is what that option knows."""
    raw = json.loads((bpe_folder / "tokenizer.json").read_text())
    for token in raw["added_tokens"]:
        token["special"] = True
    theirs = PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(json.dumps(raw)))
    ends = "<｜end▁of▁sentence｜>"
    for text in ("a <｜User｜> b", "<think>so</think>", f"{ends}<｜User｜>", "你<think>", "plain"):
        ids = theirs(text, split_special_tokens=True, add_special_tokens=False)["input_ids"]
        assert of_text(bpe, text) == ids


ORDINARY = ("õ", "ÿ", "☃", "ǅ")  # the first two are letters of byte-level BPE as well


@pytest.fixture(scope="module")
def older(bpe_folder):
    """A tokenizer whose added tokens are characters of ordinary texts, too, some of them parts of
    what only templates write; and the library's encoding by one that has no others."""
    backend = Backend.from_file(str(bpe_folder / "tokenizer.json"))
    backend.add_tokens([AddedToken(text, special=False) for text in ORDINARY[:2]])
    backend.add_tokens([AddedToken("<õ>", special=False), AddedToken("⁂", special=True)])
    backend.add_tokens([AddedToken(text, special=False) for text in ORDINARY[2:]])
    raw = json.loads(backend.to_str())
    raw["added_tokens"] = [t for t in raw["added_tokens"] if t["content"] in ORDINARY]
    theirs, size = Backend.from_str(json.dumps(raw)), len(raw["model"]["vocab"])

    def encode(text):
        ids = theirs.encode(text, add_special_tokens=False).ids  # numbers added tokens anew
        return [i if i < size else backend.token_to_id(theirs.id_to_token(i)) for i in ids]

    return Tokenizer(backend, settings={}), encode


def test_characters_that_are_ordinary_added_tokens_are_no_control_texts(bpe, older):
    assert {*older[0].added_texts} == {*bpe.added_texts, "<õ>", "⁂"}


@given(data=st.data())
def test_characters_that_are_ordinary_added_tokens_keep_their_ids(older, spellings, data):
    ours, encode = older
    more = st.sampled_from([*ORDINARY, "<õ>", "⁂", "<õ"])
    text = "".join(data.draw(st.lists(spellings | more, max_size=12)))
    ids = of_text(ours, text)
    assert ids == encode(text)
    if not any(control in text for control in ours.added_texts):
        assert ids == ours.encode(text)


@pytest.mark.parametrize("text", ORDINARY)
def test_one_beside_a_text_that_is_spelled_keeps_its_id(older, text):
    ours, _ = older
    own = ours.token_id(text)
    found = of_text(ours, f"{text}<｜User｜>{text}")
    assert found[0] == found[-1] == own and found.count(own) == 2
    assert ours.token_id("<｜User｜>") not in found


LETTERS = ("Ġ", "Ċ", "õ", "Ã", "Ġa", "!")  # of byte-level BPE, "!" as itself


@pytest.fixture(scope="module")
def lettered(bpe_folder):
    """A tokenizer whose special tokens have the ids of bytes, or of pairs of them; and the same
    without any added token."""
    raw = json.loads((bpe_folder / "tokenizer.json").read_text())
    vocab, merges = raw["model"]["vocab"], raw["model"]["merges"]
    if "Ġa" not in vocab:
        vocab["Ġa"] = max(vocab.values()) + 1
        merges.append(["Ġ", "a"] if isinstance(merges[0], list) else "Ġ a")
    bare = Backend.from_str(json.dumps({**raw, "added_tokens": []}))
    backend = Backend.from_str(json.dumps(raw))
    backend.add_special_tokens([AddedToken(text, special=True) for text in LETTERS])
    assert all(backend.token_to_id(text) == vocab[text] for text in LETTERS)
    return Tokenizer(backend, settings={}), bare


@given(data=st.data())
def test_bytes_are_no_control_tokens_whose_ids_they_have(lettered, spellings, data):
    """A template's part stays as the library encodes it, and a client's as without such tokens."""
    ours, bare = lettered
    more = st.sampled_from([*LETTERS, "  ", " a", "\n", "\n\n", "õ", "ç", "<think>"])
    text = "".join(data.draw(st.lists(spellings | more, max_size=12)))
    assert of_text(ours, text) == bare.encode(text, add_special_tokens=False).ids


@given(data=st.data())
def test_bytes_around_control_tokens_stay_as_they_are(lettered, data):
    ours, bare = lettered
    plain = st.sampled_from([" ", "  ", " a", "a", "\n", "b \n", "ç"])
    first, last = ("".join(data.draw(st.lists(plain, max_size=5))) for _ in range(2))
    said = data.draw(st.sampled_from([*LETTERS[:-1], "<think>"]))
    text = f"<｜User｜>{first}{{mark}}{said}{last}Ġç{first}"
    ids = ours.encode(text.format(mark="\ue010"), mark="\ue010")

    def without(text):
        return bare.encode(text, add_special_tokens=False).ids

    user, space = ours.token_id("<｜User｜>"), ours.token_id("Ġ")
    assert ids == [user, *without(f"{first}{said}{last}"), space, *without(f"ç{first}")]


@given(data=st.data())
def test_bytes_of_such_tokens_are_the_library_s(lettered, data):
    ours, _ = lettered
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=8))
    text = ours.backend.decode(ids, skip_special_tokens=False)
    assert b"".join(map(ours.token_bytes, ids)).decode(errors="replace") == text


@EVERY_TEMPLATE
@given(data=st.data())
def test_no_client_s_text_makes_a_token_of_the_template(bpe, spellings, name, data):
    """The tokens of the template are those of the same chat about nothing."""
    escapes = data.draw(st.booleans())
    texts = st.lists(spellings, min_size=1, max_size=5).map(lambda some: f"x{''.join(some)}x")

    def drawn(own=False):
        text = data.draw(texts)
        for tag in TAGS if own else ():  # which what a model says may have
            text = text.replace(tag, "y")
        return text

    def chat(draw):
        function = {"name": "f", "description": draw(), "parameters": {"properties": {draw(): {}}}}
        call = {"name": "f", "arguments": json.dumps({draw(): draw()}, ensure_ascii=escapes)}
        messages = [
            {"role": "system", "content": draw()},
            user(draw()),
            {
                "role": "assistant",
                "content": draw(True),
                "reasoning_content": "so",
                "tool_calls": [{"id": "1", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": "1", "content": draw()},
            {"role": "assistant", "content": draw(True), "reasoning_content": "so"},
            user(draw()),
        ]
        tools = [{"type": "function", "function": function}]
        if name == "v2":  # knows no tools
            messages, tools = [messages[n] for n in (0, 1, 4, 5)], None
        return controls(bpe, encoded(bpe, TEMPLATES[name], messages, tools))

    assert chat(drawn) == chat(lambda own=False: "x")


@EVERY_TEMPLATE
def test_ordinary_text_is_encoded_as_ever(bpe, name):
    messages = [user("x"), {"role": "assistant", "content": "a < b｜c"}, user("你 > é")]
    text = TEMPLATES[name].render(messages)
    assert encoded(bpe, TEMPLATES[name], messages) == bpe.backend.encode(text).ids
    found = marked(messages, None, {}, bpe.added_texts)
    assert found.mark == "" and found.messages == messages


def test_what_a_model_said_keeps_its_tags(bpe):
    said = {"role": "assistant", "content": "<think>hm</think>yes <｜User｜>"}
    found = marked([user("x"), said], None, {}, bpe.added_texts)
    assert found.messages[1]["content"] == f"<think>hm</think>yes {found.mark}<｜User｜>"
    asked = marked([user("<think>")], None, {}, bpe.added_texts)
    assert asked.messages == [user(f"{asked.mark}<think>")] and asked.mark


def test_a_mark_is_a_character_that_nobody_sent(bpe):
    text = "<think>" + "".join(map(chr, range(0xE010, 0xE020))) + r"\ue020"
    assert marked([user(text)], None, {}, bpe.added_texts).mark == "\ue021"


def test_escapes_in_arguments_are_read_first(bpe):
    raw = json.dumps({"a": "<think>"}).replace("<", r"\u003c")
    call = {"type": "function", "function": {"name": "f", "arguments": raw}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert "<think>" not in controls(bpe, encoded(bpe, DsmlEncoding(), [user("x"), said]))
    found = marked([user(f"{raw}<think>")], None, {}, bpe.added_texts)  # nobody reads that
    assert found.messages == [user(f"{raw}{found.mark}<think>")]


def test_all_marks_in_one_request_are_a_request_error(bpe):
    text = "<think>" + "".join(map(chr, range(0xE010, 0xF8FF)))
    with pytest.raises(RequestError, match="U\\+E010"):
        marked([user(text)], None, {}, bpe.added_texts)


def test_many_texts_and_many_marks_end_soon(bpe):
    text = "<think>" + "".join(map(chr, range(0xE010, 0xF8FE)))
    begin = time.process_time()
    found = marked([user(text)], None, {"words": ["a"] * 60_000}, bpe.added_texts)
    assert found.mark == "\uf8fe" and time.process_time() - begin < 2


@given(st.lists(st.text("<|ab>", min_size=1, max_size=4), max_size=8), st.text("<|ab>"))
def test_the_pattern_finds_what_the_longest_words_first_find(words, text):
    flat = "|".join(map(re.escape, sorted(set(words), key=len, reverse=True))) or "(?!)"
    assert [m.span() for m in _pattern(tuple(words)).finditer(text)] == [
        m.span() for m in re.finditer(flat, text)
    ]


def test_what_only_begins_like_eight_hundred_placeholders_costs_little():
    words = tuple(f"<｜place▁holder▁no▁{n}｜>" for n in range(800))
    begin = time.process_time()
    assert _pattern(words).search("<｜" * 300_000) is None
    assert time.process_time() - begin < 1
