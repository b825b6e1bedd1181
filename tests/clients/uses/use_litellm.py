"""litellm: OpenAI's, the text and Anthropic's route."""

from __future__ import annotations

import json

import litellm
from each import ADD, MODEL, URL, V1, main, refused, use
from pydantic import BaseModel

ASKED = [{"role": "user", "content": "12+30="}]
OPENAI = {
    "model": f"openai/{MODEL}",
    "api_base": V1,
    "api_key": "none",
    "messages": ASKED,
    "max_tokens": 256,
    "num_retries": 0,
}
ANTHROPIC = OPENAI | {"model": f"anthropic/{MODEL}", "api_base": URL}
HOSTED = OPENAI | {"model": f"hosted_vllm/{MODEL}"}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds", "parameters": ADD}}


class Sum(BaseModel):
    total: int


def text_of(stream):
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


@use
def plain():
    for route in (OPENAI, ANTHROPIC, HOSTED):
        answer = litellm.completion(**route, temperature=0)
        assert "42" in answer.choices[0].message.content, answer


@use
def streaming():
    for route in (OPENAI, ANTHROPIC, HOSTED):
        options = {"include_usage": True}
        assert "42" in text_of(
            litellm.completion(**route, temperature=0, stream=True, stream_options=options)
        )


@use
def tools():
    for route in (OPENAI, ANTHROPIC):
        answer = litellm.completion(**route, tools=[TOOL], tool_choice="required")
        message = answer.choices[0].message
        (call,) = message.tool_calls
        assert set(json.loads(call.function.arguments)) == {"a", "b"}
        said = {"role": "tool", "tool_call_id": call.id, "content": "42"}
        after = litellm.completion(**route | {"messages": [*ASKED, message, said]}, tools=[TOOL])
        assert after.choices
        stream = litellm.completion(**route, tools=[TOOL], tool_choice="required", stream=True)
        built = litellm.stream_chunk_builder(list(stream))
        assert built.choices[0].message.tool_calls[0].function.name == "add"


@use
def structured():
    for route in (OPENAI, ANTHROPIC):
        answer = litellm.completion(**route, response_format=Sum)
        assert Sum.model_validate_json(answer.choices[0].message.content)


@use
def thinking():
    asked = {"max_tokens": 1500, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    known = {"allowed_openai_params": ["thinking"]}  # litellm does not know the model
    assert litellm.completion(**ANTHROPIC | asked | known).choices[0].message


@use
def text():
    route = {"model": f"text-completion-openai/{MODEL}", "api_base": V1, "api_key": "none"}
    assert litellm.text_completion(**route, prompt="12+30=", max_tokens=8).choices[0].text


@use
def responses():
    route = {"model": f"openai/{MODEL}", "api_base": V1, "api_key": "none"}
    assert litellm.responses(**route, input="12+30=", max_output_tokens=64).output


@use
async def asynchronous():
    for route in (OPENAI, ANTHROPIC):
        assert (await litellm.acompletion(**route)).choices[0].message.content
        stream = await litellm.acompletion(**route, stream=True)
        assert [chunk async for chunk in stream]


@use
def what_is_not_there():
    route = {"model": f"openai/{MODEL}", "api_base": V1, "api_key": "none", "num_retries": 0}
    refused(lambda: litellm.embedding(**route, input=["x"]), litellm.NotFoundError)


main()
