"""DeepSeek-V4 as it is served: a process, its chat, and turns that go on from the cache."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from served import serving

import ds_runtime
from ds_runtime.cli import main
from parts import mostly_slow

DEMO = Path(ds_runtime.__file__).parent / "demo"


def test_turns_of_a_chat_go_on_from_the_cache(chat_v4):
    flags = ("--dtype", "float32", "--context-length", "2048", "--threads", "1")
    with serving(chat_v4, *flags) as server, httpx.Client(timeout=60) as client:
        url = server.wait_url()
        messages, before = [{"role": "user", "content": "Count to " + "ten and then " * 40}], 0
        for _ in range(3):
            asked = {"messages": messages, "max_tokens": 60, "seed": 1}
            asked |= {"ignore_eos": True, "chat_template_kwargs": {"thinking": False}}
            found = client.post(f"{url}/v1/chat/completions", json=asked)
            assert found.status_code == 200, found.text
            answer = found.json()
            usage = answer["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            assert cached >= before, "what was there before is there again"
            before = (usage["prompt_tokens"] - 1) // 128 * 128
            assert usage["completion_tokens"] == 60
            said = answer["choices"][0]["message"]["content"] or "-"
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": "go on"},
            ]
        assert before > 0


TRACE = {"num-turns": 20, "prefix-len": 1500, "input-len": 64, "output-len": 24, "think-time": 0}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Random weights of a small shape, with room for a long conversation."""
    made = tmp_path_factory.mktemp("v4-tiny")
    assert main(["bench", "make-checkpoint", "--shape", "v4-tiny", str(made)]) == 0
    path = made / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 40960}))
    return made


@pytest.mark.parametrize("sessions", mostly_slow([3, 1], 1), ids=["at once", "one by one"])
def test_agents_of_twenty_turns_find_what_their_trace_allows(tiny, capsys, sessions):
    """97 % at least of the tokens that unlimited memory could serve, by ids that come back."""
    with serving(tiny, "--threads", "1") as server:
        flags = ["--base-url", server.wait_url(), "--dataset-name", "agent", "--num-prompts", "3"]
        flags += [word for name, value in TRACE.items() for word in (f"--{name}", str(value))]
        flags += ["--tool-result-len", "20", "150", "--max-concurrency", str(sessions)]
        code = main(["bench", "serving", *flags, "--endpoint", "/v1/completions", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0, report["errors"]
    assert report["completed"] == 60
    assert 0.97 <= report["share_of_bound"] <= 1, report["turns"]
