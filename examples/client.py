"""Streams an answer from a server with the `openai` client.

python examples/client.py [URL]

OPENAI_API_KEY is sent, if it is set.
"""

from __future__ import annotations

import argparse
import os

from openai import OpenAI

KEY = os.environ.get("OPENAI_API_KEY") or "none"


def main(url: str) -> None:
    """Prints the answer as it comes."""
    with OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key=KEY) as client:
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What is 123 + 456?"}],
            temperature=0,
            stream=True,
        )
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:30000", metavar="URL")
    main(parser.parse_args().url)
