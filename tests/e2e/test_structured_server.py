"""Rules through the server: the openai client's own helpers, tool choices, bad schemas."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

ADD = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["m", "kg"]},
    },
    "required": ["a", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "measure", "parameters": ADD}},
    {"type": "function", "function": {"name": "now"}},
]
ASK = [{"role": "user", "content": "What is 12 plus 30?"}]


class Ring(BaseModel):
    """What the parse helper asks for."""

    kind: Literal["ring", "disc"]
    holes: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The demo model behind a real server: its address."""
    log = tmp_path_factory.mktemp("structured") / "log"
    command = [sys.executable, "-m", "ds_runtime", "serve", "--platform", "cpu"]
    with log.open("w") as out:
        process = subprocess.Popen([*command, "--port", "0"], stdout=out, stderr=out)
    try:
        yield _address(process, log)
    finally:
        process.terminate()
        process.wait(30)


def _address(process, log):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        for word in log.read_text().split():
            if word.startswith("http://127.0.0.1:"):
                url = word.rstrip(".,)")
                try:
                    if httpx.get(url + "/health").status_code == 200:
                        return url
                except httpx.TransportError:
                    pass
        time.sleep(0.1)
    raise AssertionError(log.read_text())


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_the_parse_helper_gets_its_type(client):
    answer = client.chat.completions.parse(
        model="demo", messages=ASK, response_format=Ring, max_tokens=400, n=2, seed=1
    )
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Ring)


def test_a_stream_keeps_to_its_schema(client):
    with client.chat.completions.stream(
        model="demo", messages=ASK, response_format=Ring, max_tokens=400, seed=1
    ) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Ring)


@pytest.mark.parametrize(
    ("extra", "judge"),
    [  # behind the model's reasoning
        ({"regex": "[a-c]{4}"}, lambda text: len(text) == 4 and set(text) <= set("abc")),
        ({"ebnf": 'root ::= "x" [0-9]'}, lambda text: text[0] == "x" and text[1:].isdigit()),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
        (
            {"structured_outputs": {"json": ADD}},
            lambda text: jsonschema.validate(json.loads(text), ADD) is None,
        ),
        ({"json_schema": json.dumps(ADD)}, lambda text: json.loads(text)["unit"] in ("m", "kg")),
    ],
)
def test_the_other_fields(client, extra, judge):
    chat = client.chat.completions.create(
        model="demo", messages=ASK, max_tokens=400, extra_body=extra, seed=3
    )
    assert chat.choices[0].finish_reason == "stop" and judge(chat.choices[0].message.content)
    plain = client.completions.create(
        model="demo", prompt="Say", max_tokens=400, extra_body=extra, seed=3, n=2
    )
    for choice in plain.choices:
        assert choice.finish_reason == "stop" and judge(choice.text)


@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_a_demanded_call_comes_and_fits_its_schema(client, temperature):
    for choice, names in (
        ("required", {"measure", "now"}),
        ({"type": "function", "function": {"name": "measure"}}, {"measure"}),
    ):
        answer = client.chat.completions.create(
            model="demo",
            messages=ASK,
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=600,
            temperature=temperature,
            seed=5,
        )
        (only,) = answer.choices
        assert only.finish_reason == "tool_calls" and not only.message.content
        (call,) = only.message.tool_calls
        assert call.function.name in names
        schema = ADD if call.function.name == "measure" else {"maxProperties": 0}
        jsonschema.validate(json.loads(call.function.arguments), schema)


def test_a_schema_that_cannot_be_compiled_is_a_400_with_its_path(client):
    def ask(**more):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="demo", messages=ASK, **more)
        return caught.value

    bad = {"type": "object", "properties": {"a": {"items": {"uniqueItems": True}}}}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": bad}}
    error = ask(response_format=response_format)
    assert error.param == "response_format.json_schema.schema.properties.a.items"
    assert "uniqueItems" in error.message
    assert ask(response_format=response_format, stream=True).status_code == 400
    tools = [TOOLS[1], {"type": "function", "function": {"name": "f", "parameters": bad}}]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        error = ask(tools=tools, tool_choice=choice)
        assert error.param == "tools[1].function.parameters.properties.a.items"
        assert "(of 'f')" in error.message
    good = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    error = ask(tools=tools, response_format=good)  # either of the two may come
    assert error.param == "tools[1].function.parameters.properties.a.items"
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        error = ask(tools=tools, tool_choice=choice)
        assert error.param == "tools[1].function.parameters.properties.a.items"
    # Beside a schema for the answer, each is told by its own name.
    fine = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    error = ask(tools=tools, response_format=fine)
    assert error.param == "tools[1].function.parameters.properties.a.items"
    assert "uniqueItems" in error.message and "response_format" not in error.message
    error = ask(tools=TOOLS, response_format=response_format)
    assert error.param == "response_format.json_schema.schema.properties.a.items"
    large = {"type": "object", "description": "x" * (1 << 18)}
    fine["json_schema"]["schema"] = large
    assert ask(tools=TOOLS, response_format=fine).param == "response_format.json_schema.schema"


HARMLESS = {
    "names": {"type": "array", "items": {"type": "string"}, "uniqueItems": False},
    "notes": {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "string"},
        "maxProperties": 1,
    },
    "where": {"type": "string", "format": "uri-reference", "maxLength": 4},
    "secret": {"type": "string", "format": "password", "maxLength": 4},
    "old": {"type": "boolean", "deprecated": True, "format": "markdown", "if": {"const": True}},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_words_in_a_schema_that_restrict_nothing(client, name):
    schema = {"type": "object", "properties": {name: HARMLESS[name]}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    wished = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for more in (
        {"tools": [tool], "tool_choice": "required"},
        {"response_format": wished},
        {"tools": [tool], "response_format": wished},
    ):
        client.chat.completions.create(model="demo", messages=ASK, max_tokens=40, **more)


def test_a_demanded_call_comes_where_an_answer_would_have_a_form(client):
    wished = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    for form in (wished, {"type": "json_object"}):
        answer = client.chat.completions.create(
            model="demo",
            messages=ASK,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            response_format=form,
            max_tokens=600,
            temperature=0.0,
            seed=5,
        )
        (only,) = answer.choices
        assert only.finish_reason == "tool_calls" and not only.message.content
    with pytest.raises(openai.BadRequestError, match="send one of them"):
        client.chat.completions.create(
            model="demo",
            messages=ASK,
            tools=TOOLS,
            tool_choice="required",
            extra_body={"regex": "a"},
        )


def test_a_bomb_is_refused_and_others_are_served(client):
    definitions = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"anyOf": [{"const": j} for j in "ab"]}]}
        for i in range(400)
    }
    bombs = (
        {"json_schema": {"$defs": definitions | {"d400": {}}, "$ref": "#/$defs/d0"}},
        {"ebnf": "start: " + "(" * 3000 + '"a"' + ")" * 3000},
        {"regex": "((((a{100}){100}){100}){100})"},
    )
    for bomb in bombs:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="demo", messages=ASK, extra_body=bomb)
        assert caught.value.param.partition(".")[0] in bomb
    answer = client.chat.completions.create(
        model="demo", messages=ASK, extra_body={"regex": "fine"}, max_tokens=400, seed=1
    )
    assert answer.choices[0].message.content == "fine"
