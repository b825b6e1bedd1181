"""guidellm as a command: chats and completions, at once and at a rate."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from each import MODEL, TOKENIZER, URL, command, main, use


def benchmark(route, profile):
    """The report of a run; every request must have succeeded."""
    with tempfile.TemporaryDirectory() as temp:
        out = Path(temp) / "report.json"
        command(
            "guidellm",
            "run",
            "--backend",
            f"kind=openai_http,target={URL},model={MODEL},request_format={route}",
            "--tokenizer",
            f"kind=huggingface_auto,model={TOKENIZER}",
            "--data",
            "kind=synthetic_text,prompt_tokens=24,output_tokens=8",
            "--constraint",
            "kind=max_requests,count=4",
            "--output",
            f"kind=json,path={out}",
            "--disable-console",
            "--profile",
            profile,
            HF_HUB_OFFLINE="1",
        )
        report = json.loads(out.read_text())
        for one in report["benchmarks"]:
            made = one["metrics"]["request_totals"]
            assert made["successful"] and not made["errored"], made


@use
def chats():
    benchmark("/v1/chat/completions", "kind=synchronous")


@use
def completions():
    benchmark("/v1/completions", "kind=concurrent,streams=2")


main()
