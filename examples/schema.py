"""Asks for an answer that follows a JSON schema.

python examples/schema.py [URL]
"""

from __future__ import annotations

import json
import sys

from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}


def main(url: str = "http://127.0.0.1:30000") -> None:
    """Prints the object."""
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "What is 12 + 30?"}],
            temperature=0,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "result", "schema": SCHEMA, "strict": True},
            },
        )
        print(json.loads(answer.choices[0].message.content or ""))


if __name__ == "__main__":
    main(*sys.argv[1:2])
