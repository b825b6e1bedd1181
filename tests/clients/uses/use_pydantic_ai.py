"""pydantic-ai: agents over chats, responses and Anthropic's messages."""

from __future__ import annotations

from anthropic import AsyncAnthropic
from each import MODEL, URL, V1, main, use
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Sum(BaseModel):
    """The sum."""

    total: int


def models():
    own = OpenAIProvider(base_url=V1, api_key="none")
    anthropic = AsyncAnthropic(base_url=URL, api_key="none", max_retries=0)
    yield OpenAIChatModel(MODEL, provider=own)
    yield OpenAIResponsesModel(MODEL, provider=own)
    yield AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=anthropic))


COLD = {"temperature": 0, "max_tokens": 1024}


@use
async def plain():
    for model in models():
        agent = Agent(model, instructions="Be brief.", model_settings=COLD)
        assert "42" in (await agent.run("12+30=")).output


@use
async def streaming():
    for model in models():
        async with Agent(model, model_settings=COLD).run_stream("12+30=") as run:
            assert [text async for text in run.stream_text(delta=True)]


@use
async def tools():
    for model in models():
        agent = Agent(model, model_settings=COLD, output_type=ToolOutput(Sum))
        called = []

        @agent.tool_plain
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            called.append((a, b))  # noqa: B023
            return a + b

        assert isinstance((await agent.run("12+30=")).output, Sum)


@use
async def structured():
    for model in models():
        if not isinstance(model, AnthropicModel):
            agent = Agent(model, output_type=NativeOutput(Sum), model_settings=COLD)
            assert isinstance((await agent.run("12+30=")).output, Sum)
    for model in models():
        async with Agent(model, output_type=ToolOutput(Sum)).run_stream("12+30=") as run:
            assert isinstance(await run.get_output(), Sum)


@use
async def conversation():
    for model in models():
        agent = Agent(model, model_settings=COLD)
        first = await agent.run("12+30=")
        assert (await agent.run("1+1=", message_history=first.all_messages())).output


main()
