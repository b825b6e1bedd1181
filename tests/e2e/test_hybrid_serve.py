"""DeepSeek-V4 as it is served: a process, its chat, and turns that go on from the cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import pytest
import torch
import transformers
from served import serving

import ds_runtime
from ds_runtime.cli import main

DEMO = Path(ds_runtime.__file__).parent / "demo"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model with the demo's tokenizer."""
    made = tmp_path_factory.mktemp("v4")
    torch.manual_seed(5)
    demo = json.loads((DEMO / "config.json").read_text())
    config = transformers.DeepseekV4Config(
        vocab_size=demo["vocab_size"], hidden_size=64, moe_intermediate_size=32,
        num_hidden_layers=4, num_attention_heads=8, head_dim=32, q_lora_rank=32,
        num_experts_per_tok=2, n_routed_experts=8, compress_ratios=[0, 4, 128, 4],
        qk_rope_head_dim=8, index_n_heads=16, index_head_dim=16, index_topk=8, o_groups=2,
        o_lora_rank=16, num_hash_layers=1, sliding_window=16, max_position_embeddings=2048,
        eos_token_id=demo["eos_token_id"],
    )  # fmt: skip
    model = transformers.DeepseekV4ForCausalLM(config)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(torch.arange(2).expand_as(buffer))
    model.save_pretrained(made)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, made)
    return made


def test_turns_of_a_chat_go_on_from_the_cache(folder):
    flags = ("--dtype", "float32", "--context-length", "2048", "--threads", "1")
    with serving(folder, *flags) as server, httpx.Client(timeout=60) as client:
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


@pytest.mark.parametrize("sessions", [1, 3], ids=["one by one", "at once"])
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
