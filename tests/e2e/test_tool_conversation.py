"""A conversation with tools, as programs hold it: `ds-runtime serve` with the demo model in a
process of its own, the `openai` client, a function that runs here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import openai
import pytest

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "name of the city"}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "set_timer",
            "description": "Start a timer.",
            "parameters": {
                "type": "object",
                "properties": {"minutes": {"type": "integer", "description": "duration"}},
                "required": ["minutes"],
            },
        },
    },
]


@pytest.fixture(scope="module")
def client():
    command = [sys.executable, "-m", "ds_runtime", "serve", "--port", "0", "--platform", "cpu"]
    process = subprocess.Popen(
        [*command, "--context-length", "2048", "--kv-memory", "64MB"],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        text=True,
    )
    try:
        lines = iter(process.stdout.readline, "")
        url = next(line.split()[-1].rstrip(")") for line in lines if "OpenAI base URL" in line)
        with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as one:
            yield one
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)


def ask(client, messages, **more):
    return client.chat.completions.create(
        model="demo", messages=messages, tools=TOOLS, temperature=0, max_tokens=96, **more
    )


@pytest.mark.parametrize("stream", [False, True])
def test_two_turns_with_tools(client, stream):
    messages = [{"role": "user", "content": "What is the weather in Lisbon?"}]
    if stream:
        message = streamed(ask(client, messages, stream=True))
    else:
        choice = ask(client, messages).choices[0]
        assert choice.finish_reason == "tool_calls"
        message = choice.message.model_dump(exclude_none=True)
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Lisbon"}
    result = {"role": "tool", "tool_call_id": call["id"], "content": '{"temperature": 23}'}
    answer = ask(client, [*messages, message, result]).choices[0]
    assert answer.finish_reason == "stop" and not answer.message.tool_calls
    assert "23" in answer.message.content and "Lisbon" in answer.message.content
    assert "<｜" not in answer.message.content


def streamed(chunks):
    """The message that the deltas add up to."""
    calls, finish = {}, None
    for chunk in chunks:
        choice = chunk.choices[0]
        finish = choice.finish_reason or finish
        assert not choice.delta.content
        for part in choice.delta.tool_calls or []:
            call = calls.setdefault(part.index, {"type": "function", "function": {"arguments": ""}})
            if part.id:
                call["id"] = part.id
                call["function"]["name"] = part.function.name
            call["function"]["arguments"] += part.function.arguments or ""
    assert finish == "tool_calls"
    return {"role": "assistant", "content": None, "tool_calls": list(calls.values())}


def test_reasoning_of_a_sum(client):
    messages = [{"role": "user", "content": "What is 123 + 456?"}]
    answer = client.chat.completions.create(model="demo", messages=messages, temperature=0)
    message = answer.choices[0].message
    assert message.content.strip() == "579" and message.reasoning_content
    assert "think>" not in message.content + message.reasoning_content
    assert answer.usage.completion_tokens_details.reasoning_tokens > 5
