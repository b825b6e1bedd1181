"""Logits that are no numbers: the choice ends and says so, whichever way its tokens come to be, and
nothing of it stays in the prefix cache. One token's embedding is NaN, so that it is known when.
"""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

import httpx
import pytest
from served import serving

from ds_runtime import LLM, OutputRules, SamplingParams
from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.errors import LogitsError
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.plugins.select_platform import select_platform
from ds_runtime.text.tokenizer import Tokenizer
from parts import mostly_slow

SETTINGS: dict[str, Any] = {
    "platform": "cpu",
    "dtype": "float32",
    "context_length": 256,
    "kv_memory": 24_000_000,
    "threads": 1,
    "max_running_requests": 3,
    "chunked_prefill_size": 16,
    "max_step_tokens": 48,
    "page_size": 8,
    "allow_nan_weights": True,
}
CHAIN: dict[str, Any] = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 2}
TREE = {**CHAIN, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 5}
CAPTURED: dict[str, Any] = {"platform": "recorded", "plugins": (), "graph_sizes": (1, 3)}
WAYS: dict[str, dict[str, Any]] = {
    "op by op": {"disable_graph": True},
    "captured chains": {**CAPTURED, **CHAIN},
    "ranks": {"tp": 2, "dist_timeout": 60},
    "ahead": {"platform": "recorded", "plugins": (), "disable_graph": True},
    "captured": CAPTURED,
    "chains": {**CHAIN, "disable_graph": True},
    "trees": {**TREE, "disable_graph": True},
    "captured trees": {**CAPTURED, **TREE},
    "divided": {"tp": 2, "enable_dp_attention": True, "dist_timeout": 60},
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """The demo model, in which one token's embedding is NaN: its folder, and that token."""
    source, folder = resolve_model("demo"), tmp_path_factory.mktemp("broken") / "demo"
    shutil.copytree(source, folder)
    (bad,) = Tokenizer.load(folder).encode("~")
    entry = Checkpoint(folder).entry("model.embed_tokens.weight")
    row = entry.nbytes // entry.shape[0]
    with entry.file.open("r+b") as file:
        file.seek(entry.begin + bad * row)
        file.write(b"\xc0\x7f" * (row // 2))
    return folder, bad


def cases(llm: LLM, bad) -> list[tuple[list[int], dict[str, Any], str]]:
    """(prompt, parameters, the token that cannot be drawn)."""
    ids = llm.tokenizer.encode("What is 12 + 30? And what is it then, if one is twice it? " * 2)
    assert len(ids) > 2 * SETTINGS["chunked_prefill_size"], "several chunks"
    first, second = "1 of the answer", "2 of the answer"
    drawn = {"logit_bias": {bad: 100.0}, "max_tokens": 9}
    return [
        ([*ids[:5], bad], {}, first),
        ([*ids[:20], bad, *ids], {"temperature": 1.0, "seed": 1}, first),
        ([*ids, bad], {"n": 3, "temperature": 0.7, "logprobs": 2}, first),
        ([bad, *ids], {"frequency_penalty": 0.5, "repetition_penalty": 1.2}, first),
        ([*ids, bad, *ids[:9]], {"prompt_logprobs": 1}, f"{len(ids) + 2} of the prompt"),
        ([*ids[:7], bad], {"rules": OutputRules(regex="[a-z]{3,9}")}, first),
        ([*ids[:7], bad], {"min_tokens": 3, "stop_token_ids": tuple(range(300, 500))}, first),
        (ids, {"rules": OutputRules(regex="12 34 56~[a-z]+"), "max_tokens": 20}, "of the answer"),
        (ids, drawn, second),
        (ids[:9], {**drawn, "temperature": 1.0, "seed": 5, "logprobs": 1}, second),
        (ids[:12], {**drawn, "presence_penalty": 0.5, "ignore_eos": True}, second),
    ]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("way", mostly_slow(WAYS, 3))
def test_the_choice_ends_and_nothing_of_it_stays(broken, recorded, way):
    folder, bad = broken
    with LLM(folder, extra_plugins=[recorded], **{**SETTINGS, **WAYS[way]}) as llm:
        # What was counted: in other ways a second one of n = 3 choices breaks before all are ended.
        check_all(llm, bad, together=int(way not in ("captured", "ahead")))


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["op by op", "captured", "chains", "captured chains"])
def test_the_choice_ends_on_the_device_too(broken, way):
    best, _ = select_platform(load_plugins())
    if not best.asynchronous:
        pytest.skip(f"the best platform here is {best.name}")
    folder, bad = broken
    own = {k: v for k, v in WAYS[way].items() if k not in ("platform", "plugins")}
    device = {"platform": best.name, "dtype": "bfloat16", "page_size": 64, "kv_memory": 1 << 28}
    with LLM(folder, **{**SETTINGS, **device, **own}) as llm:
        check_all(llm, bad, exact=False)


def check_all(llm: LLM, bad, exact=True, together=0):
    """exact: a row's logits do not hang on the rows beside it. Elsewhere attention of a tile may
    carry NaN to rows before the token that brings it, so that an earlier one is named."""
    asked = cases(llm, bad)
    lasting = SamplingParams(max_tokens=60, ignore_eos=True)
    prompt = llm.tokenizer.encode("Once upon a time there was a ship")
    (alone,) = llm.generate([prompt], lasting)
    llm.flush_cache()
    stream = llm.stream(prompt, lasting)
    pieces = [next(stream)]
    for ids, params, said in asked:
        if not exact and said.endswith("of the prompt"):
            said = r"\d+ of the prompt"
        with pytest.raises(LogitsError, match=rf"token (\d+ )?{said} are not finite"):
            llm.generate([ids], SamplingParams(**{"max_tokens": 4, **params}))
        pieces.append(next(stream, ""))
    pieces += stream
    assert not exact or "".join(pieces) == alone.text, "others in the same steps go on"
    assert "".join(pieces)
    broken = llm.stats().broken  # of n = 3 choices those that stood in the same step
    low, high = (together, together) if exact else (0, 2)
    assert len(asked) + low <= broken <= len(asked) + high, broken
    # What the broken ones have computed is not read again, whatever they broke at.
    for ids in (asked[1][0][:20], asked[0][0][:5], asked[8][0]):
        (after,) = llm.generate([[*ids, *prompt]], SamplingParams(max_tokens=2))
        assert after.usage.cached_tokens == 0 and len(after.token_ids) == 2
        llm.flush_cache()
    stats = llm.stats()
    assert stats.pages_free == stats.pages_total, "a page is lost"


def test_what_was_read_from_the_cache_stays_there(broken):
    folder, bad = broken
    with LLM(folder, **SETTINGS) as llm:
        ids = llm.tokenizer.encode("What is 12 + 30? And what is it then, if one of them is twice?")
        size = SETTINGS["page_size"]
        few = SamplingParams(max_tokens=2)
        llm.generate([ids[: 2 * size + 1]], few)
        with pytest.raises(LogitsError):
            llm.generate([[*ids, bad]], few)
        (after,) = llm.generate([ids], few)
        assert after.usage.cached_tokens == 2 * size
        assert llm.stats().broken == 1


def test_several_prompts_at_once(broken):
    """One of a batch: the error is raised, and the rest can be asked again."""
    folder, bad = broken
    with LLM(folder, **SETTINGS) as llm:
        good, few = [[5, 6, 7], [8, 9]], SamplingParams(max_tokens=3)
        with pytest.raises(LogitsError):
            llm.generate([good[0], [5, bad], good[1]], few)
        assert [len(o.token_ids) for o in llm.generate(good, few)] == [3, 3]


@pytest.fixture(scope="module")
def served(broken):
    folder, _ = broken
    with (
        serving(folder, "--allow-nan-weights", "--context-length", "512") as one,
        httpx.Client(base_url=one.wait_url(), timeout=60) as http,
    ):
        yield one, http


CHAT = {"messages": [{"role": "user", "content": "a ~ b"}], "max_tokens": 5}
ROUTES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": ["fine", "a ~ b"], "max_tokens": 5},
    "/v1/messages": {**CHAT, "model": "demo"},
    "/v1/responses": {"input": "a ~ b", "max_output_tokens": 5},
    "/generate": {"text": "a ~ b", "sampling_params": {"max_new_tokens": 5}},
}


@pytest.mark.parametrize("path", ROUTES)
def test_an_answer_is_an_error(served, path):
    one, http = served
    before, lines = counter(http), len(one.lines)
    reply = http.post(path, json=ROUTES[path])
    assert reply.status_code == 500, reply.text
    assert "the model's logits for token 1 of the answer are not finite" in reply.text
    error = reply.json()["error"]
    if path == "/v1/messages":
        assert error["type"] == "api_error"
    else:
        assert (error["type"], error["code"]) == ("server_error", "logits_not_finite")
    for _ in range(100):
        if counter(http) > before:
            break
    assert counter(http) == before + 1
    said = [line for line in one.lines[lines:] if "not finite" in line]
    assert len(said) == 1 and "ERROR" in said[0] and reply.headers["x-request-id"] in said[0]
    assert not any("Traceback" in line for line in one.lines)
    assert http.get("/health_generate").status_code == 200


@pytest.mark.parametrize("path", [p for p in ROUTES if p != "/v1/completions"])
def test_a_stream_ends_with_an_event(served, path):
    """Biased towards the token, a stream has begun when it breaks."""
    _, http = served
    body = json.loads(json.dumps(ROUTES[path]).replace("a ~ b", "go on"))
    bad = http.post("/tokenize", json={"prompt": "~", "add_special_tokens": False}).json()["tokens"]
    if path in ("/v1/messages", "/v1/responses"):
        body = json.loads(json.dumps(body).replace("go on", "~"))  # no biases here
    elif path == "/generate":
        body["sampling_params"]["logit_bias"] = {str(bad[0]): 100}
    else:
        body["logit_bias"] = {str(bad[0]): 100}
    reply = http.post(path, json={**body, "stream": True})
    if reply.status_code != 200:  # broken before anything was sent
        assert reply.status_code == 500 and path in ("/v1/messages", "/v1/responses")
        assert "not finite" in reply.text
        return
    events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]" and len(events) > 1
    assert re.search(r"logits for token 2 of the answer are not finite", events[-1])
    assert json.loads(events[-1])["error"]["status"] == 500
    assert 'finish_reason": "' not in events[-2]


def counter(http):
    text = http.get("/metrics").text
    found = re.search(r"^ds_runtime_corrupted_requests_total\{.*\} (\S+)$", text, re.M)
    assert found is not None, text
    return float(found[1])
