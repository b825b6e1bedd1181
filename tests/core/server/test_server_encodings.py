"""What a chat's fields make of the prompt: reasoning to go on from, formats told in words."""

from __future__ import annotations

import json

import pytest
from server_harness import serving

from ds_runtime.text.formats.families import R1, V2, V32
from ds_runtime.text.formats.template import built_in


def test_reasoning_is_continued(client, parsing):
    """Inside `<think>` where the last message has reasoning alone; behind it where it has text."""

    def ask(order, **begun):
        messages = [{"role": "user", "content": order}, {"role": "assistant", **begun}]
        answer = client.chat.completions.create(
            model="fake", messages=messages, extra_body={"continue_final_message": True}
        )
        prompt = parsing.engine.submits[-1].prompt
        return parsing.tokenizer.decode(prompt, skip_special=False), answer.choices[0].message

    text, message = ask("[say or</think>4]", content="", reasoning_content="two ")
    assert text.endswith("]<｜Assistant｜><think>two ")
    assert (message.reasoning_content, message.content) == ("or", "4")
    text, message = ask("[say 4]", reasoning="two", content="It is ")
    assert text.endswith("]<｜Assistant｜><think>two</think>It is ")
    assert message.content == "4" and not hasattr(message, "reasoning_content")


def test_the_encoding_s_own_way_into_reasoning(bpe_folder):
    """R1's line breaks around the tags; a template that opens none says so."""
    begun = {"role": "assistant", "reasoning_content": "two", "content": "It is"}
    body = {"messages": [{"role": "user", "content": "[say 4]"}, begun]}
    for family, ending in ((R1, "<｜Assistant｜><think>\ntwo\n</think>\n\nIt is"), (V2, None)):
        with serving(bpe_folder, template=built_in(family)) as served:
            answer = served.post("/v1/chat/completions", **body, continue_final_message=True)
            if ending is None:
                error = answer.json()["error"]
                assert error["param"] == "messages[1].reasoning_content"
                assert "opens no reasoning" in error["message"]
            else:
                text = served.tokenizer.decode(served.engine.submits[-1].prompt, skip_special=False)
                assert text.endswith(ending)


def test_an_encoding_that_words_the_format_is_told_the_schema(bpe_folder):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    named = {"name": "x", "schema": schema}
    with serving(bpe_folder, template=built_in(V32)) as served:

        def asked(**body):
            served.chat("[say {}]", **body)
            return served.tokenizer.decode(served.engine.submits[-1].prompt, skip_special=False)

        text = asked(response_format={"type": "json_schema", "json_schema": named})
        assert f"schema to reply:\n{json.dumps(schema)}<｜User｜>" in text
        assert "Response Format" not in asked(response_format={"type": "json_object"})
        own = {"response_format": {"type": "string"}}
        text = asked(
            response_format={"type": "json_schema", "json_schema": named}, chat_template_kwargs=own
        )
        assert 'schema to reply:\n{"type": "string"}<｜User｜>' in text


@pytest.mark.parametrize("said", ["<", "｜", "e", "end", " of ", "a\n"])
def test_a_last_message_that_the_end_of_turn_holds_as_well(client, parsing, said):
    begun = {"role": "assistant", "content": said}
    client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "[say 4]"}, begun],
        extra_body={"continue_final_message": True},
    )
    text = parsing.tokenizer.decode(parsing.engine.submits[-1].prompt, skip_special=False)
    assert text.partition("<｜Assistant｜>")[2].removeprefix("</think>").rstrip() == said.rstrip()
