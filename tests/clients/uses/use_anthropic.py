"""The `anthropic` package: messages, streams, tools, thinking, counting."""

from __future__ import annotations

import anthropic
from anthropic import Anthropic, AsyncAnthropic
from each import ADD, MODEL, URL, main, refused, use

client = Anthropic(base_url=URL, api_key="none")
ASKED = [{"role": "user", "content": "12+30="}]
PLAIN = {"model": MODEL, "max_tokens": 256, "messages": ASKED}
TOOL = {"name": "add", "description": "Adds", "input_schema": ADD}
TOOLS = {"tools": [TOOL], "tool_choice": {"type": "any"}}


@use
def plain():
    answer = client.messages.create(**PLAIN, system="Be brief.", extra_body={"temperature": 0})
    assert "42" in answer.content[-1].text and answer.stop_reason == "end_turn"


@use
def blocks():
    part = {"type": "text", "text": "12+30=", "cache_control": {"type": "ephemeral"}}
    answer = client.messages.create(
        **PLAIN | {"messages": [{"role": "user", "content": [part]}]},
        system=[part | {"text": "Be brief."}],
        metadata={"user_id": "me"},
        stop_sequences=["@@"],
        extra_body={"top_k": 20, "top_p": 0.9},
    )
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


@use
def streaming():
    with client.messages.stream(**PLAIN) as stream:
        assert "".join(stream.text_stream)
        assert stream.get_final_message().stop_reason == "end_turn"
    kinds = [event.type for event in client.messages.create(**PLAIN, stream=True)]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"


@use
def tools():
    answer = client.messages.create(**PLAIN, **TOOLS)
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use" and set(call.input) == {"a", "b"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "42"}
    said = [*ASKED, {"role": "assistant", "content": answer.content}]
    said.append({"role": "user", "content": [result]})
    assert client.messages.create(**PLAIN | {"messages": said}, tools=[TOOL]).content is not None


@use
def streamed_tools():
    with client.messages.stream(**PLAIN, **TOOLS) as stream:
        final = stream.get_final_message()
    assert [b.input for b in final.content if b.type == "tool_use"]


@use
def thinking():
    asked = PLAIN | {"max_tokens": 1500}
    enabled = {"type": "enabled", "budget_tokens": 1024}
    assert client.messages.create(**asked, thinking=enabled).content
    assert client.messages.create(**asked, thinking={"type": "disabled"}).content


@use
def counting():
    assert client.messages.count_tokens(model=MODEL, messages=ASKED).input_tokens > 3
    assert client.beta.messages.create(**PLAIN).content
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).display_name


@use
async def asynchronous():
    async with AsyncAnthropic(base_url=URL, api_key="none") as own:
        assert (await own.messages.create(**PLAIN)).content
        async with own.messages.stream(**PLAIN) as stream:
            assert await stream.get_final_text()


@use
def what_is_not_there():
    refused(lambda: client.messages.create(**PLAIN | {"model": "claude"}), anthropic.NotFoundError)
    image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    asked = [{"role": "user", "content": [image]}]
    refused(
        lambda: client.messages.create(**PLAIN | {"messages": asked}), anthropic.BadRequestError
    )
    refused(
        lambda: client.messages.batches.create(requests=[]),
        anthropic.NotFoundError,
        anthropic.BadRequestError,
    )


main()
