"""Streams an answer from a server with the `openai` client.

python examples/client.py [URL]
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main(url: str = "http://127.0.0.1:30000") -> None:
    """Prints the answer as it comes."""
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        stream = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "What is 123 + 456?"}],
            temperature=0,
            stream=True,
        )
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()


if __name__ == "__main__":
    main(*sys.argv[1:2])
