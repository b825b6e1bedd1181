"""Sessions of agents on the demo model: the prefix cache gives what the trace allows."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from served import serving

from ds_runtime.cli import main

LENGTHS = {"num-turns": 5, "prefix-len": 1500, "input-len": 16, "output-len": 48, "think-time": 0}
CALLS = json.dumps({"tool_choice": "required"})
CASES = {
    "chat": ["--tokenizer", "demo"],
    "calls": ["--tokenizer", "demo", "--extra-body", CALLS, "--num-turns", "3"],
    "ids": ["--tokenizer", "demo", "--endpoint", "/v1/completions"],
    "words": ["--endpoint", "/v1/completions"],
}


@pytest.fixture(scope="module")
def url():
    with serving("demo", "--threads", "1") as served:
        yield served.wait_url()


@pytest.mark.parametrize("case", CASES)
def test_an_unbounded_cache_reaches_98_percent_of_what_the_trace_allows(
    url, capsys, tmp_path, case
):
    ids = tmp_path / "ids.jsonl"
    flags = ["--base-url", url, "--dataset-name", "agent", "--num-prompts", "2"]
    flags += [word for name, value in LENGTHS.items() for word in (f"--{name}", str(value))]
    flags += ["--tool-result-len", "20", "60", "--max-concurrency", "1", "--flush-cache", "--json"]
    flags += ["--save-token-ids", str(ids), *CASES[case]]
    code = main(["bench", "serving", *flags])
    report = json.loads(capsys.readouterr().out)
    assert code == 0, report["errors"]
    assert 0.98 <= report["share_of_bound"] <= 1, report["turns"]
    rows = [json.loads(line) for line in ids.read_text().splitlines()]
    assert len(rows) == 1 + report["completed"] and all(r["answer"] for r in rows)
    for session in (0, 1):
        turns = [r for r in rows if r["session"] == session and not r["warmup"]]
        assert [r["turn"] for r in turns] == list(range(len(turns)))
        grown = [len(r["prompt"]) for r in turns]
        assert grown == sorted(set(grown)) and turns[-1]["cached"] > turns[0]["cached"]


def test_sessions_that_start_together_compute_the_system_prompt_once(url):
    """64 at once, before anything of it is cached."""
    httpx.post(f"{url}/flush_cache").raise_for_status()
    system, params = [50 + i % 700 for i in range(1024)], {"max_new_tokens": 4}

    def ask(number):
        ids = [*system, *(60 + (number * k) % 800 for k in range(1, 20))]
        body = {"input_ids": ids, "sampling_params": params}
        reply = httpx.post(f"{url}/generate", json=body, timeout=120).raise_for_status()
        return reply.json()["meta_info"]["cached_tokens"]

    with ThreadPoolExecutor(64) as clients:
        cached = sorted(clients.map(ask, range(1, 65)))
    assert cached == [0] + 63 * [1024]
    assert "ds_runtime_prefix_waits_total" in httpx.get(f"{url}/metrics").text
