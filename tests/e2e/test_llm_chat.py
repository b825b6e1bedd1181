"""Chats of the offline API: the demo model's reasoning and calls, told apart as a server does."""

from __future__ import annotations

import json

import pytest

from ds_runtime import LLM, SamplingParams

WEATHER = {
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
}


@pytest.fixture(scope="module")
def demo():
    with LLM("demo", platform="cpu", kv_memory="32MB", context_length=1024) as llm:
        yield llm


def ask(demo, text, tools=None, **params):
    messages = [{"role": "user", "content": text}]
    params = SamplingParams(max_tokens=96, **params)
    return demo.chat(messages, params, tools)[0].outputs


def test_a_call_is_one_and_a_sum_is_thought_about(demo):
    (called,) = ask(demo, "What is the weather in Lisbon?", [WEATHER])
    (call,) = called.answer.calls
    assert call.name == "get_weather" and json.loads(call.arguments) == {"city": "Lisbon"}
    assert called.finish_reason == "tool_calls" and not called.answer.content
    (said,) = ask(demo, "What is the weather in Lisbon?")
    assert said.answer.calls == [] and said.finish_reason == "stop"
    for thought in ask(demo, "What is 12 plus 30?", n=2, seed=1):
        assert thought.answer.reasoning and "42" in thought.answer.content
        assert thought.text.endswith(thought.answer.content)
        assert thought.finish_reason == "stop"


def test_a_cut_or_stopped_call_is_none(demo):
    (cut,) = ask(demo, "What is the weather in Lisbon?", [WEATHER], stop=("Lis",))
    assert cut.answer.calls == [] and (cut.finish_reason, cut.stop_reason) == ("stop", "Lis")
