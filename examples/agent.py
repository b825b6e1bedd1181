"""An agent: the model calls a tool, this script runs it, and the model answers.

python examples/agent.py [URL]

OPENAI_API_KEY is sent, if it is set.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from openai import OpenAI

KEY = os.environ.get("OPENAI_API_KEY") or "none"
WEATHER = {"Paris": "sunny, 21 degrees"}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Name of the city."}},
                "required": ["city"],
            },
        },
    }
]


def get_weather(city: str) -> str:
    """The weather that this script knows of."""
    return WEATHER.get(city, "unknown")


def main(url: str, turns: int = 4) -> None:
    """Asks until the model answers without a call, at most `turns` times."""
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    with OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key=KEY) as client:
        model = client.models.list().data[0].id
        for _ in range(turns):
            answer = client.chat.completions.create(
                model=model,
                messages=messages,
                tools=TOOLS,
                temperature=0,
                max_tokens=256,
            )
            message: Any = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                print("answer:", message.content)
                return
            for call in message.tool_calls:
                result = get_weather(**json.loads(call.function.arguments))
                print("call:", call.function.name, call.function.arguments, "->", result)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:30000", metavar="URL")
    main(parser.parse_args().url)
