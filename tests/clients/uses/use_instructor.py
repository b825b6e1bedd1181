"""instructor: an answer as an object, by tools, by schemas and by text."""

from __future__ import annotations

import instructor
from anthropic import Anthropic
from each import MODEL, URL, V1, main, use
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict

ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "12+30="}], "max_tokens": 256}
Mode = instructor.Mode


class Sum(BaseModel):
    """The sum."""

    model_config = ConfigDict(extra="forbid")  # a small model does not end by itself
    total: int


def client(mode):
    return instructor.from_openai(OpenAI(base_url=V1, api_key="none"), mode=mode)


@use
def by_tools():
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT):
        assert isinstance(client(mode).chat.completions.create(response_model=Sum, **ASKED), Sum)


@use
def by_schema():
    own = client(Mode.JSON_SCHEMA)
    assert isinstance(own.chat.completions.create(response_model=Sum, **ASKED), Sum)


@use
def by_responses():
    own = client(Mode.RESPONSES_TOOLS)
    found = own.responses.create(response_model=Sum, model=MODEL, input="12+30=")
    assert isinstance(found, Sum)


@use
def partly():
    stream = client(Mode.TOOLS).chat.completions.create_partial(response_model=Sum, **ASKED)
    assert list(stream)[-1].total is not None


@use
def several():
    found = client(Mode.TOOLS).chat.completions.create_with_completion(response_model=Sum, **ASKED)
    assert isinstance(found[0], Sum) and found[1].choices


@use
def by_anthropic():
    own = instructor.from_anthropic(Anthropic(base_url=URL, api_key="none"))
    assert isinstance(own.messages.create(response_model=Sum, **ASKED), Sum)


@use
async def asynchronous():
    own = instructor.from_openai(AsyncOpenAI(base_url=V1, api_key="none"))
    assert isinstance(await own.chat.completions.create(response_model=Sum, **ASKED), Sum)


main()
