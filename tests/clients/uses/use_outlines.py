"""outlines over an OpenAI client, and over one that is said to be vLLM's or SGLang's."""

from __future__ import annotations

from typing import Literal

import openai
import outlines
from each import MODEL, V1, main, use
from outlines.inputs import Chat
from outlines.types import CFG, Regex
from pydantic import BaseModel, ConfigDict

own = openai.OpenAI(base_url=V1, api_key="none")
MORE = {"max_tokens": 256, "temperature": 0}


class Sum(BaseModel):
    model_config = ConfigDict(extra="forbid")  # a small model does not end by itself
    total: int


@use
def plain():
    model = outlines.from_openai(own, MODEL)
    assert "42" in model("12+30=", **MORE)
    assert model(Chat([{"role": "user", "content": "12+30="}]), **MORE)
    assert "".join(model.stream("12+30=", **MORE))


@use
def structured():
    model = outlines.from_openai(own, MODEL)
    assert Sum.model_validate_json(model("12+30=", Sum, **MORE))
    assert Sum.model_validate_json("".join(model.stream("12+30=", Sum, **MORE)))


@use
def like_vllm():
    model = outlines.from_vllm(own, MODEL)
    assert model("12+30=", Literal["42", "43"], **MORE) in ("42", "43")
    assert model("12+30=", Regex(r"\d{2}"), **MORE).isdigit()
    assert Sum.model_validate_json(model("12+30=", Sum, **MORE))
    assert model("12+30=", CFG('?start: "yes" | "no"'), **MORE) in ("yes", "no")
    assert model("12+30=", int, **MORE)


@use
def like_sglang():
    model = outlines.from_sglang(own, MODEL)
    assert model("12+30=", Literal["42", "43"], **MORE) in ("42", "43")
    assert Sum.model_validate_json(model("12+30=", Sum, **MORE))
    assert model("12+30=", CFG('root ::= "yes" | "no"'), **MORE) in ("yes", "no")


@use
async def asynchronous():
    client = openai.AsyncOpenAI(base_url=V1, api_key="none")
    model = outlines.from_vllm(client, MODEL)
    assert (await model("12+30=", Regex(r"\d{2}"), **MORE)).isdigit()


main()
