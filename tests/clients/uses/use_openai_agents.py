"""openai-agents: runs over responses and over chats, with a tool, streamed, with an output type."""

from __future__ import annotations

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from each import MODEL, V1, main, use
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)


def agents(**more):
    """One agent per protocol."""
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model=MODEL, openai_client=AsyncOpenAI(base_url=V1, api_key="none"))
        yield Agent(name="sums", instructions="Be brief.", model=model, **more)


@function_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


class Sum(BaseModel):
    total: int


@use
async def plain():
    for agent in agents(model_settings=ModelSettings(temperature=0, max_tokens=256)):
        assert "42" in (await Runner.run(agent, "12+30=")).final_output


@use
async def streaming():
    for agent in agents(model_settings=ModelSettings(temperature=0, include_usage=True)):
        run = Runner.run_streamed(agent, "12+30=")
        assert [event async for event in run.stream_events()] and run.final_output


@use
async def tools():
    for agent in agents(tools=[add], model_settings=ModelSettings(tool_choice="required")):
        run = await Runner.run(agent, "Add 12 and 30.")
        kinds = [item.type for item in run.new_items]
        assert kinds[:2] == ["tool_call_item", "tool_call_output_item"], kinds


@use
async def streamed_tools():
    settings = ModelSettings(tool_choice="add", parallel_tool_calls=False, temperature=0)
    for agent in agents(tools=[add], model_settings=settings):
        run = Runner.run_streamed(agent, "Add 12 and 30.")
        assert [event async for event in run.stream_events()]
        assert "tool_call_item" in [item.type for item in run.new_items]


@use
async def structured():
    for agent in agents(output_type=Sum):
        assert isinstance((await Runner.run(agent, "12+30=")).final_output, Sum)


@use
async def conversation():
    for agent in agents():
        first = await Runner.run(agent, "12+30=")
        said = [*first.to_input_list(), {"role": "user", "content": "1+1="}]
        assert (await Runner.run(agent, said)).final_output is not None


main()
