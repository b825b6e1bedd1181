"""Asks for an answer that follows a JSON schema.

python examples/schema.py [URL]

OPENAI_API_KEY is sent, if it is set.
"""

from __future__ import annotations

import argparse
import json
import os

from openai import OpenAI

KEY = os.environ.get("OPENAI_API_KEY") or "none"
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}


def main(url: str) -> None:
    """Prints the object."""
    with OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key=KEY) as client:
        model = client.models.list().data[0].id
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What is 12 + 30?"}],
            temperature=0,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "result", "schema": SCHEMA, "strict": True},
            },
        )
        print(json.loads(answer.choices[0].message.content or ""))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:30000", metavar="URL")
    main(parser.parse_args().url)
