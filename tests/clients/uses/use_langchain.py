"""LangChain's chat models over OpenAI's and Anthropic's routes."""

from __future__ import annotations

import anthropic
import openai
from each import MODEL, URL, V1, main, refused, use
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

SAID = [SystemMessage("Be brief."), HumanMessage("12+30=")]


def openai_chat(**more):
    return ChatOpenAI(
        model=MODEL,
        base_url=V1,
        api_key="none",
        max_retries=0,
        max_tokens=256,
        stream_usage=True,
        **more,
    )


def anthropic_chat(**more):
    return ChatAnthropic(
        model=MODEL, base_url=URL, api_key="none", max_retries=0, max_tokens=256, **more
    )


KINDS = (openai_chat, anthropic_chat)


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


class Sum(BaseModel):
    """The sum."""

    total: int


@use
def plain():
    for kind in KINDS:
        answer = kind(temperature=0).invoke(SAID)
        assert "42" in answer.text and answer.usage_metadata["total_tokens"]


@use
def streaming():
    for kind in KINDS:
        whole = None
        for chunk in kind(temperature=0).stream(SAID):
            whole = chunk if whole is None else whole + chunk
        assert "42" in whole.text and whole.usage_metadata, whole


@use
def tools():
    for kind in KINDS:
        model = kind().bind_tools([add], tool_choice="any")
        answer = model.invoke(SAID)
        (call,) = answer.tool_calls
        assert call["name"] == "add"
        after = kind().bind_tools([add])
        assert after.invoke([*SAID, answer, ToolMessage("42", tool_call_id=call["id"])])
        whole = None
        for chunk in model.stream(SAID):
            whole = chunk if whole is None else whole + chunk
        assert whole.tool_calls[0]["name"] == "add"


@use
def structured():
    for method in ("json_schema", "function_calling"):
        for kind in KINDS:
            found = kind().with_structured_output(Sum, method=method).invoke(SAID)
            assert isinstance(found, Sum), found


@use
def responses():
    model = openai_chat(use_responses_api=True)
    assert model.invoke(SAID).text
    assert "".join(chunk.text for chunk in model.stream(SAID))


@use
def batches_and_text():
    assert len(openai_chat().batch(["1+1=", "2+2="])) == 2
    text = OpenAI(model=MODEL, base_url=V1, api_key="none", max_tokens=8)
    assert text.invoke("12+30=")


@use
async def asynchronous():
    for kind in KINDS:
        assert (await kind().ainvoke(SAID)).text
        assert [chunk async for chunk in kind().astream(SAID)]


@use
def what_is_not_there():
    embed = OpenAIEmbeddings(
        model=MODEL, base_url=V1, api_key="none", check_embedding_ctx_length=False
    )
    refused(lambda: embed.embed_query("x"), openai.NotFoundError)
    wrong = ChatAnthropic(model="claude", base_url=URL, api_key="none", max_retries=0)
    refused(lambda: wrong.invoke("x"), anthropic.NotFoundError)


main()
