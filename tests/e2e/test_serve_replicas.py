"""Two whole engines behind one server, each in processes of its own."""

from __future__ import annotations

import json

import httpx
import pytest
from served import serving

FLAGS = ("--dtype", "float32", "--kv-memory", "2MB", "--threads", "1", "--dp", "2")
ASK = {"prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0}


@pytest.mark.slow
def test_both_engines_answer_alike_and_write_json(tiny):
    with serving(tiny, *FLAGS, "--log-format", "json") as served:
        url = served.wait(r"serving \S+ at (http://\S+) ")[1]
        assert len(served.ranks()) == 2
        with httpx.Client(base_url=url, timeout=60) as http:
            texts = {http.post("/v1/completions", json=ASK).json()["choices"][0]["text"]}
            texts |= {http.post("/v1/completions", json=ASK).json()["choices"][0]["text"]}
            assert len(texts) == 1
            assert http.post("/flush_cache").json()["pages_freed"] >= 2
            served_by = {
                line.split('engine="')[1][0]: float(line.rsplit(" ", 1)[1])
                for line in http.get("/metrics").text.splitlines()
                if line.startswith("ds_runtime_generation_tokens_total")
            }
    assert served_by == {"0": 20, "1": 20}
    lines = [json.loads(line) for line in served.lines]
    said = {(x["replica"], x["rank"]) for x in lines if x["logger"] == "ds_runtime.engine"}
    assert said == {(0, 0), (1, 0)}
