"""Runs a model in this process, without a server.

python examples/offline.py [MODEL]
"""

from __future__ import annotations

import sys

from ds_runtime import LLM, SamplingParams


def main(model: str = "demo") -> None:
    """Prints the answers of a chat, then a completion as it comes."""
    with LLM(model=model, platform="cpu") as llm:
        chats = [[{"role": "user", "content": f"What is {a} + {a + 1}?"}] for a in (11, 42)]
        for output in llm.chat(chats, SamplingParams(max_tokens=96)):
            print(output.text, output.finish_reason)
        for piece in llm.stream("12+30=", SamplingParams(max_tokens=96), chat=True):
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    main(*sys.argv[1:2])
