"""LlamaIndex's OpenAILike: chats, completions, tools, structured predictions."""

from __future__ import annotations

from each import MODEL, V1, main, use
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

LLM = {"model": MODEL, "api_base": V1, "api_key": "none", "max_tokens": 256, "max_retries": 0}
chat = OpenAILike(**LLM, is_chat_model=True, is_function_calling_model=True)
text = OpenAILike(**LLM, is_chat_model=False)
SAID = [ChatMessage(role="system", content="Be brief."), ChatMessage(content="12+30=")]


class Sum(BaseModel):
    """The sum."""

    total: int


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@use
def plain():
    assert chat.chat(SAID).message.content
    assert chat.complete("12+30=").text
    assert text.complete("12+30=").text


@use
def streaming():
    assert list(chat.stream_chat(SAID))[-1].message.content
    assert list(text.stream_complete("12+30="))[-1].text


@use
def tools():
    tool = FunctionTool.from_defaults(add)
    answer = chat.chat_with_tools([tool], "12+30=", tool_required=True)
    (call,) = chat.get_tool_calls_from_response(answer)
    assert call.tool_name == "add"
    streamed = list(chat.stream_chat_with_tools([tool], "12+30=", tool_required=True))
    assert chat.get_tool_calls_from_response(streamed[-1])
    assert chat.predict_and_call([tool], "12+30=", tool_required=True).sources


@use
def structured():
    own = chat.as_structured_llm(Sum)
    assert isinstance(own.chat(SAID).raw, Sum)
    strict = OpenAILike(
        **LLM, is_chat_model=True, should_use_structured_outputs=True, temperature=0
    )
    assert isinstance(strict.as_structured_llm(Sum).complete("12+30=").raw, Sum)


@use
async def asynchronous():
    assert (await chat.achat(SAID)).message.content
    assert [part async for part in await chat.astream_chat(SAID)]
    assert (await text.acomplete("12+30=")).text


main()
