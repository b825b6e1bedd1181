"""SGLang's serving benchmark: its native route, and OpenAI's two."""

from __future__ import annotations

import json
import tempfile
from itertools import chain
from pathlib import Path

from each import MODEL, TOKENIZER, URL, command, main, use

LOAD = {
    "--dataset-name": "random-ids",
    "--num-prompts": "4",
    "--random-input-len": "16",
    "--random-output-len": "8",
    "--random-range-ratio": "1",
    "--warmup-requests": "1",
    "--max-concurrency": "2",
}


def benchmark(backend, *words):
    """The report's line. Every request must have ended, with all the tokens that were asked for."""
    with tempfile.TemporaryDirectory() as temp:
        out = Path(temp) / "out.jsonl"
        command(
            "sglang.benchmark.serving",
            "--backend",
            backend,
            "--base-url",
            URL,
            "--model",
            TOKENIZER,
            "--served-model-name",
            MODEL,
            "--tokenizer",
            TOKENIZER,
            *chain.from_iterable(LOAD.items()),
            "--output-file",
            str(out),
            *words,
            HF_HUB_OFFLINE="1",
        )
        report = json.loads(out.read_text())
    assert report["completed"] == 4, report
    assert report["total_output_tokens"] == 4 * 8, report
    return report


@use
def native():
    report = benchmark("sglang")
    assert report["median_ttft_ms"] > 0 and report["mean_itl_ms"] > 0


@use
def native_ids_whole():
    benchmark("sglang", "--tokenize-prompt", "--disable-stream")


@use
def native_logprobs():
    benchmark("sglang", "--return-logprob", "--flush-cache")


@use
def completions():
    benchmark("sglang-oai")


@use
def chats():
    benchmark("sglang-oai-chat", "--extra-request-body", '{"ignore_eos": true}')


main()
