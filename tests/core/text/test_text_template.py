"""Chat templates: agreement with transformers, the three places they come from, refusals."""

from __future__ import annotations

import json
import re

import pytest
from transformers import PreTrainedTokenizerFast

from ds_runtime.errors import CheckpointError, ConfigError, RequestError
from ds_runtime.text.formats.template import ChatTemplate, load_template
from ds_runtime.text.tokenizer import Tokenizer

TOOLS = [{"type": "function", "function": {"name": "f", "description": "<b>ü & 你</b>"}}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "<é>"}'}}
CHATS = [
    [{"role": "user", "content": "Hi  \n"}],
    [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "<b>你好</b>"}],
    [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "hm</think>a"},
        {"role": "user", "content": "r"},
    ],
    [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "42"},
    ],
]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("chat", range(len(CHATS)))
def test_renders_what_transformers_renders(bpe, bpe_folder, chat, generate, tools):
    template = load_template(bpe_folder, bpe)
    source = (bpe_folder / "chat_template.jinja").read_text(encoding="utf-8")
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(bpe_folder / "tokenizer.json"), **bpe.special_tokens
    )
    expected = theirs.apply_chat_template(
        CHATS[chat],
        tools=tools,
        chat_template=source,
        add_generation_prompt=generate,
        tokenize=False,
        thinking=True,
    )
    assert template.render(CHATS[chat], tools, generate, {"thinking": True}) == expected


def test_helpers_of_the_template_language(bpe):
    source = (
        "{% for m in messages %}\n"
        "    {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ m | tojson(indent=2) }}\n"
        "{% endfor %}\n"
        "{{ strftime_now('%Y') }}"
    )
    text = ChatTemplate({"default": source}, {}, "x").render([{"a": "<é>"}, {"b": 1}])
    assert re.fullmatch(r'\{\n  "a": "<é>"\n\}\n\d{4}', text)


def test_where_the_template_comes_from(bpe, bpe_folder, tmp_path):
    for name in ("tokenizer.json",):
        (tmp_path / name).write_bytes((bpe_folder / name).read_bytes())

    def load(chat_template=None, override=None):
        settings = {} if chat_template is None else {"chat_template": chat_template}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        return load_template(tmp_path, Tokenizer.load(tmp_path), override)

    assert load() is None
    assert load("config").render([]) == "config"
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    assert load(named).render([]) == "d"
    assert load(named).render([], TOOLS) == "t"
    with pytest.raises(CheckpointError, match="none of them 'default'"):
        load([{"name": "rag", "template": "r"}])
    with pytest.raises(CheckpointError, match="lack name or template"):
        load(["x"])
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load("config").render([]) == "file"
    (tmp_path / "mine.jinja").write_text("mine")
    assert load("config", str(tmp_path / "mine.jinja")).render([]) == "mine"
    with pytest.raises(ConfigError, match=r"--chat-template .*gone\.jinja: no such file"):
        load("config", str(tmp_path / "gone.jinja"))


def test_a_broken_template_names_its_line():
    with pytest.raises(CheckpointError, match=r"x: chat template 'default', line 2.*--chat-templ"):
        ChatTemplate({"default": "a\n{% if %}"}, {}, "x")


@pytest.mark.parametrize(
    "source, message",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", "nothing"),
        ("{{ 'a' + none }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "Range too big"),
        ("{{ 'x' * 10 ** 17 }}", "refuses these messages"),
    ],
)
def test_refusals_are_request_errors(source, message):
    template = ChatTemplate({"default": source}, {}, "x")
    with pytest.raises(RequestError, match=message):
        template.render([{"role": "user", "content": "q"}])


def test_kwargs_cannot_replace_the_messages():
    template = ChatTemplate({"default": "{{ messages }}"}, {}, "x")
    with pytest.raises(RequestError, match="may not set 'messages'"):
        template.render([], kwargs={"messages": []})
