"""The `openai` package: every resource that the server has, sync and async."""

from __future__ import annotations

import json

import openai
from each import ADD, MODEL, V1, main, refused, use
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel

client = OpenAI(base_url=V1, api_key="none")
ASKED = [{"role": "user", "content": "12+30="}]
CHAT = {"model": MODEL, "messages": ASKED, "temperature": 0, "max_tokens": 256}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds", "parameters": ADD}}
TOOLS = {"tools": [TOOL], "tool_choice": "required"}


class Sum(BaseModel):
    total: int


class add(BaseModel):  # the function's name
    a: int
    b: int


@use
def models():
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@use
def plain():
    answer = client.chat.completions.create(**CHAT)
    assert "42" in answer.choices[0].message.content and answer.usage.total_tokens


@use
def many_choices():
    answer = client.chat.completions.create(
        **CHAT | {"temperature": 1}, n=2, seed=3, logprobs=True, top_logprobs=2, stop=["@@"]
    )
    assert len(answer.choices) == 2 and len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


@use
def streaming():
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options=options))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert "42" in text and chunks[-1].usage.completion_tokens


@use
def stream_helper():
    with client.chat.completions.stream(**CHAT) as stream:
        assert "content.done" in [event.type for event in stream]
        assert stream.get_final_completion().choices[0].message.content


@use
def tools():
    answer = client.chat.completions.create(**CHAT, **TOOLS)
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and call.function.name == "add"
    said = {"role": "tool", "tool_call_id": call.id, "content": "42"}
    messages = [*ASKED, answer.choices[0].message, said]
    after = client.chat.completions.create(**CHAT | {"messages": messages}, tools=[TOOL])
    assert after.choices[0].message.content is not None


@use
def streamed_tools():
    arguments = ""
    for chunk in client.chat.completions.create(**CHAT, **TOOLS, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            arguments += call.function.arguments or ""
    assert set(json.loads(arguments)) == {"a", "b"}


@use
def structured():
    parsed = client.chat.completions.parse(**CHAT, response_format=Sum)
    assert isinstance(parsed.choices[0].message.parsed, Sum)
    tool = pydantic_function_tool(add)
    parsed = client.chat.completions.parse(**CHAT, tools=[tool], tool_choice="required")
    assert isinstance(parsed.choices[0].message.tool_calls[0].function.parsed_arguments, add)
    form = {"type": "json_object"}
    text = client.chat.completions.create(**CHAT, response_format=form).choices[0].message.content
    assert text.startswith("{")


@use
def raw_and_with_options():
    raw = client.with_options(max_retries=0, timeout=60).chat.completions.with_raw_response
    answer = raw.create(**CHAT, extra_headers={"x-extra": "1"}, extra_body={"top_k": 5}, user="me")
    assert answer.headers["x-request-id"] and answer.parse().choices


@use
def completions():
    answer = client.completions.create(model=MODEL, prompt=["12+30=", "1+1="], max_tokens=8)
    assert len(answer.choices) == 2
    scored = client.completions.create(
        model=MODEL, prompt="12+30=", max_tokens=4, echo=True, logprobs=1, temperature=0
    )
    assert scored.choices[0].logprobs.token_logprobs[0] is None
    chunks = list(client.completions.create(model=MODEL, prompt="1+1=", max_tokens=8, stream=True))
    assert chunks[-1].choices[0].finish_reason


@use
def responses():
    answer = client.responses.create(
        model=MODEL, input="12+30=", temperature=0, max_output_tokens=64, instructions="Be brief."
    )
    assert answer.status == "completed" and answer.output_text
    after = client.responses.create(
        model=MODEL, input="1+1=", previous_response_id=answer.id, max_output_tokens=64
    )
    assert client.responses.retrieve(after.id).id == after.id
    client.responses.delete(after.id)
    parsed = client.responses.parse(model=MODEL, input="12+30=", text_format=Sum, temperature=0)
    assert isinstance(parsed.output_parsed, Sum)


@use
def streamed_responses():
    tool = {"type": "function", "name": "add", "parameters": ADD, "strict": True}
    asked = {"model": MODEL, "input": "12+30=", "temperature": 0, "max_output_tokens": 256}
    kinds = [event.type for event in client.responses.create(**asked, stream=True)]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    with client.responses.stream(**asked, tools=[tool], tool_choice="required") as stream:
        found = [event.type for event in stream]
        assert "response.function_call_arguments.done" in found
        assert stream.get_final_response().output[-1].type == "function_call"


@use
async def asynchronous():
    async with AsyncOpenAI(base_url=V1, api_key="none") as own:
        answer = await own.chat.completions.create(**CHAT)
        assert answer.choices[0].message.content
        stream = await own.chat.completions.create(**CHAT, stream=True)
        assert [chunk async for chunk in stream]


@use
def what_is_not_there():
    refused(lambda: client.embeddings.create(model=MODEL, input="x"), openai.NotFoundError)
    refused(lambda: client.moderations.create(input="x"), openai.NotFoundError)
    refused(
        lambda: client.chat.completions.create(**CHAT | {"model": "gpt-5"}), openai.NotFoundError
    )
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    asked = [{"role": "user", "content": [image]}]
    refused(
        lambda: client.chat.completions.create(**CHAT | {"messages": asked}),
        openai.BadRequestError,
    )


main()
