"""/generate in the meaning that SGLang's route of this name has."""

from __future__ import annotations

import json
import re

import pytest
from fake_engine import EOS, VOCAB
from server_harness import serving

from ds_runtime.engine.messages import Failed
from ds_runtime.errors import RequestError
from ds_runtime.grammar.compile import Compiler
from ds_runtime.server.http.body import validate
from ds_runtime.server.protocols.fields import NATIVE
from ds_runtime.server.protocols.native import GenerateRequest

TEXT = "native 你"


def streamed(served, **body):
    with served.http.stream("POST", "/generate", json=body | {"stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_one_prompt(served):
    ids = served.tokenizer.encode(f"[say {TEXT}]")
    said = [*served.tokenizer.encode(TEXT), 1]
    params = {"temperature": 0, "max_new_tokens": 50}
    body = served.post("/generate", input_ids=ids, sampling_params=params).json()
    assert set(body) == {"text", "output_ids", "meta_info"}
    assert (body["text"], body["output_ids"]) == (TEXT, said)
    meta = body["meta_info"]
    assert meta.pop("e2e_latency") > 0 and meta.pop("id").startswith("gen-")
    assert meta == {
        "finish_reason": {"type": "stop", "matched": 1},
        "prompt_tokens": len(ids),
        "completion_tokens": len(said),
        "cached_tokens": 4,
    }
    params = served.engine.submits[-1].params
    assert (params.temperature, params.max_tokens, params.top_p) == (0, 50, 0.95)
    assert params.logprobs is None and params.prompt_logprobs is None


def test_a_stream_carries_all_that_there_is_so_far(served):
    events = streamed(served, text=f"[say {TEXT}]", return_logprob=True)
    whole = served.post("/generate", text=f"[say {TEXT}]", return_logprob=True).json()
    last = events[-1]
    for name in ("text", "output_ids"):
        assert last[name] == whole[name]
        assert all(last[name][: len(e[name])] == e[name] for e in events)
    counts = [e["meta_info"]["completion_tokens"] for e in events]
    assert counts == [*range(1, len(whole["output_ids"]) + 1)]
    assert [len(e["meta_info"]["output_token_logprobs"]) for e in events] == counts
    assert [e["meta_info"]["finish_reason"] for e in events[:-1]] == [None] * (len(events) - 1)
    assert last["meta_info"]["finish_reason"] == {"type": "stop", "matched": 1}
    assert "e2e_latency" in last["meta_info"] and "e2e_latency" not in events[0]["meta_info"]
    assert len({e["meta_info"]["id"] for e in events}) == 1 and "index" not in last


@pytest.mark.parametrize("texts", [False, True])
@pytest.mark.parametrize("top", [None, 0, 2])
@pytest.mark.parametrize("start", [None, -1, 0, 2, "all"])
def test_log_probabilities(served, start, top, texts):
    ids = served.tokenizer.encode("[say a b]")
    said = [*served.tokenizer.encode("a b"), 1]
    asked = {"logprob_start_len": len(ids) if start == "all" else start, "top_logprobs_num": top}
    body = {"input_ids": ids, "return_logprob": True, "return_text_in_logprobs": texts} | asked
    meta = served.post("/generate", **body).json()["meta_info"]

    def text(token):
        return served.tokenizer.token_text(token) if texts else None

    begin = start if start in (0, 2) else len(ids)
    inputs = meta["input_token_logprobs"]
    assert inputs == [[-0.5 if i else None, t, text(t)] for i, t in enumerate(ids[begin:])]
    assert meta["output_token_logprobs"] == [[-0.5, t, text(t)] for t in said]
    best = [[-0.25, said[0] + 1, text(said[0] + 1)], [-0.5, said[0], text(said[0])]]
    if top:
        assert meta["output_top_logprobs"][0] == best
        assert [one and len(one) for one in meta["input_top_logprobs"]] == [
            None if i == 0 else 2 for i in range(len(inputs))
        ]
    else:
        assert "output_top_logprobs" not in meta and "input_top_logprobs" not in meta
    params = served.engine.submits[-1].params
    assert params.logprobs == (top or 0)
    assert params.prompt_logprobs == (None if begin == len(ids) else top or 0)


def test_a_prompt_s_log_probabilities_alone(served):
    ids = served.tokenizer.encode("[say a b]")
    body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0}
    for extra in ({}, {"stream": True}):
        reply = served.post("/generate", **body, sampling_params={"max_new_tokens": 0}, **extra)
        found = reply.json() if not extra else json.loads(reply.text.split("\n")[0][6:])
        assert (found["text"], found["output_ids"]) == ("", [])
        meta = found["meta_info"]
        assert meta["completion_tokens"] == 0 and meta["output_token_logprobs"] == []
        assert [t for _, t, _ in meta["input_token_logprobs"]] == ids
    assert served.post("/generate", **body, sampling_params={"max_new_tokens": 0}).json()[
        "meta_info"
    ]["finish_reason"] == {"type": "length", "length": 0}
    params = {"max_new_tokens": 0, "min_new_tokens": 1}
    error = served.post("/generate", **body, sampling_params=params).json()["error"]
    assert error["param"] == "min_new_tokens" and "above max_new_tokens 0" in error["message"]


def test_lists(served):
    texts = ["[say a]", "[say b c]", "[say d]"]
    params = [{"max_new_tokens": 9, "sampling_seed": n} for n in range(3)]
    body = served.post(
        "/generate",
        text=texts,
        sampling_params=params,
        return_logprob=[True, False, True],
        logprob_start_len=[0, -1, -1],
        top_logprobs_num=[1, 0, 2],
    ).json()
    assert [one["text"] for one in body] == ["a", "b c", "d"]
    assert ["output_token_logprobs" in one["meta_info"] for one in body] == [True, False, True]
    lengths = [len(one["meta_info"].get("input_token_logprobs", ())) for one in body]
    assert lengths == [body[0]["meta_info"]["prompt_tokens"], 0, 0]
    assert len(body[2]["meta_info"]["output_top_logprobs"][0]) == 2
    assert [s.seed for s in served.engine.submits[-3:]] == [0, 1, 2]
    ids = [served.tokenizer.encode(text) for text in texts]
    assert [one["text"] for one in served.post("/generate", input_ids=ids).json()] == [
        "a",
        "b c",
        "d",
    ]
    (one,) = served.post("/generate", input_ids=ids[:1]).json()  # a list is answered with a list
    assert one["text"] == "a"
    many = served.post("/generate", text=texts[:2], sampling_params={"n": 2}).json()
    assert [one["text"] for one in many] == ["a", "a", "b c", "b c"]


def test_each_prompt_of_a_list_has_an_id_and_a_salt_of_its_own(served):
    two = {"text": ["[say a]", "[say b]"], "sampling_params": {"n": 2}}

    def ids(**more):
        body = served.post("/generate", **two, **more).json()
        assert [one["text"] for one in body] == ["a", "a", "b", "b"]
        return [one["meta_info"]["id"] for one in body]

    assert ids(rid=["x", "y"]) == ["x", "x", "y", "y"]
    assert ids(rid="z") == ["z_0", "z_0", "z_1", "z_1"]
    first, again, drawn, _ = ids(rid=["x", None])
    assert (first, again) == ("x", "x") and drawn.startswith("gen-")
    assert served.post("/generate", text="[say a]", rid="z").json()["meta_info"]["id"] == "z"
    (one,) = served.post("/generate", text=["[say a]"], rid="z").json()
    assert one["meta_info"]["id"] == "z_0"
    salts = {}
    for given in (["p", "q"], ["p", None], "p", None):
        ids(cache_salt=given)
        salts[str(given)] = [submit.salt for submit in served.engine.submits[-4::2]]
    (p, q), (same, none) = salts["['p', 'q']"], salts["['p', None]"]
    assert p == same != q and salts["p"] == [p, p] and salts["None"] == [none, none] == ["", ""]
    events = streamed(served, text=["[say a b]", "[say c]"], rid=["s", "t"])
    assert {(e["index"], e["meta_info"]["id"]) for e in events} == {(0, "s"), (1, "t")}


def test_a_stream_of_several_says_whose_an_event_is(served):
    events = streamed(served, text=["[say a b]", "[say c]"])
    last = {e["index"]: e for e in events if e["meta_info"]["finish_reason"]}
    assert {n: e["text"] for n, e in last.items()} == {0: "a b", 1: "c"}


def test_why_it_ends(served):
    def ends(order, **params):
        body = served.post("/generate", text=order, sampling_params=params).json()
        return body["text"], body["meta_info"]["finish_reason"]

    b = served.tokenizer.encode("b")[0]
    assert ends("[go ab]", max_new_tokens=3)[1] == {"type": "length", "length": 3}
    assert ends("[say abc]", stop=["b"]) == ("a", {"type": "stop", "matched": "b"})
    found = ends("[say abc]", stop="b", no_stop_trim=True)
    assert found == ("ab", {"type": "stop", "matched": "b"})
    assert ends("[say b]", stop_token_ids=[b]) == ("", {"type": "stop", "matched": b})
    assert ends("[say ok]", regex="ok")[0] == "ok"
    params = served.engine.submits[-1].params
    assert params.rules is not None and params.rules.regex == "ok"
    ends("[go ab]", ignore_eos=True, min_new_tokens=2, max_new_tokens=4, top_k=1 << 30)
    params = served.engine.submits[-1].params
    assert (params.ignore_eos, params.min_tokens, params.max_tokens) == (True, 2, 4)
    for rule in ({"ebnf": 'root ::= "x"'}, {"json_schema": '{"type": "object"}'}):
        ends("[say ok]", **rule)
        assert served.engine.submits[-1].params.rules is not None


BAD = [
    ({"logprob_start_len": 99, "return_logprob": True}, "logprob_start_len", "must be -1, or a p"),
    ({"logprob_start_len": -2, "return_logprob": True}, "logprob_start_len", "must be -1, or a p"),
    ({"top_logprobs_num": 21, "return_logprob": True}, "top_logprobs_num", "between 0 and 20"),
    ({"return_logprob": [True, True]}, "return_logprob", "2 entries, but there are 1 prompts"),
    (
        {"text": ["a", "b"], "sampling_params": [{}]},
        "sampling_params",
        "1 entries, but there are 2",
    ),
    ({"sampling_params": {"max_new_tokens": 9999}}, "max_new_tokens", "and max_new_tokens 9999 m"),
    ({"sampling_params": {"min_new_tokens": 200}}, "min_new_tokens", "above max_new_tokens 128"),
    ({"sampling_params": {"sampling_seed": 1 << 70}}, "sampling_seed", "must be between"),
    (
        {"text": ["a", "b"], "sampling_params": [{}, {"colour": 1}]},
        "sampling_params[1].colour",
        "unknown field",
    ),
    ({"sampling_params": {"logprobs": 1}}, "sampling_params.logprobs", "unknown field"),
    ({"sampling_params": {"stop_regex": "a+"}}, "sampling_params.stop_regex", "not supported"),
    ({"token_ids_logprob": [1]}, "token_ids_logprob", "leave it out"),
    ({"return_hidden_states": True}, "return_hidden_states", "leave it out or send false"),
    ({"session_params": {"id": "x"}}, "session_params", "leave it out"),
    ({"lora_path": "x"}, "lora_path", "is no loaded adapter: load it first"),
    ({"lora_path": ["x"]}, "lora_path", "is no loaded adapter: load it first"),
    (
        {"text": ["a", "b"], "lora_path": ["", "x"]},
        "lora_path",
        "is no loaded adapter: load it first",
    ),
    ({"text": ["a", "b"], "rid": ["x"]}, "rid", "1 entries, but there are 2"),
    ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid", "has 'x' twice"),
    ({"text": ["a", "b"], "rid": ["x", 3]}, "rid[1]", "must be a string"),
    ({"text": ["a", "b"], "rid": ["x", "y z"]}, "rid[1]", "without white space"),
    ({"rid": ["x"]}, "rid", "is a list, but there is one prompt: send a string"),
    ({"cache_salt": ["x"]}, "cache_salt", "is a list, but there is one prompt: send a string"),
    ({"text": ["a", "b"], "cache_salt": ["x"]}, "cache_salt", "1 entries, but there are 2"),
    ({"text": ["a", "b"], "cache_salt": ["x", 3]}, "cache_salt[1]", "must be a string"),
    ({"text": ["a", "b"], "lora_path": ["x"]}, "lora_path", "1 entries, but there are 2"),
    ({"text": ["a"], "token_ids_logprob": [[1]]}, "token_ids_logprob", "leave it out"),
    ({"text": ["a", "b"], "session_params": [{}, {"id": "x"}]}, "session_params", "leave it out"),
]


@pytest.mark.parametrize("body, param, said", BAD, ids=range(len(BAD)))
def test_bad_requests_name_the_field(served, body, param, said):
    answer = served.post("/generate", **({"text": "[say a]"} | body))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and said in error["message"], error


@pytest.mark.parametrize("regex, reason", [("a(b", "unclosed group"), ("*", "repetition operator")])
def test_a_wrong_regex_is_said_in_the_client_s_words(
    served, bpe_folder, monkeypatch, regex, reason
):
    """By the field that was sent, and without the grammar that the library makes of it."""
    compiler = Compiler(bpe_folder, VOCAB, [EOS])

    def admit(submit):
        with pytest.raises(RequestError) as caught:
            compiler.compile(submit.params.rules)
        failed = Failed(submit.rid, "invalid", caught.value.said, caught.value.param)
        served.engine.send(failed)

    monkeypatch.setattr(served.engine, "admit", admit)
    for text in ("x", ["x", "y"]):
        answer = served.post("/generate", text=text, sampling_params={"regex": regex})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == "sampling_params.regex"
        assert error["message"].startswith("sampling_params.regex cannot be compiled: ")
        assert reason in error["message"] and len(error["message"]) < 120
        assert not re.search(r"start:|lark|\berror\b|\|", error["message"])
    answer = served.post("/generate", text=["x"], sampling_params=[{"regex": regex}])
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"]


@pytest.mark.parametrize("regex", ["\\", "a\\", "a\\\\\\"])
def test_a_regex_does_not_end_in_half_an_escape(served, regex):
    answer = served.post("/generate", text="[say ok]", sampling_params={"regex": regex})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "sampling_params.regex"
    assert error["message"] == "sampling_params.regex: ends in a backslash: write two for one"
    begun = len(served.engine.submits)
    whole = served.post("/generate", text="[say ok]", sampling_params={"regex": regex + "\\"})
    assert whole.status_code == 200 and len(served.engine.submits) == begun + 1


def test_lists_whose_entries_ask_for_nothing(served):
    """One entry a prompt; a null is what a request without the field means."""
    plain = {"text": ["[say a]", "[say b]"]}
    nothing = {name: value for name, value in NATIVE.items() if value is not None}
    own = ("return_logprob", "logprob_start_len", "top_logprobs_num", "sampling_params")
    nulls = {name: [None, None] for name in (*own, "lora_path", "rid", "cache_salt")}
    nulls |= {"lora_path": ["", None], "sampling_params": [{"max_new_tokens": 5}, None]}
    for name, entries in nulls.items():
        reply = served.post("/generate", **plain, **{name: entries})
        assert reply.status_code == 200, reply.text
        assert [one["text"] for one in reply.json()] == ["a", "b"]
        assert "output_token_logprobs" not in reply.json()[0]["meta_info"]
    assert served.engine.submits[-1].params.max_tokens == 128
    for name in nothing.keys() - GenerateRequest.model_fields.keys():
        for value in (None, *nothing[name]):
            validate(GenerateRequest, plain | {name: [value, None]})
    params = [None, {"max_new_tokens": 1}]
    told = served.post("/generate", **plain, return_logprob=[None, True], sampling_params=params)
    assert ["output_token_logprobs" in one["meta_info"] for one in told.json()] == [False, True]


def test_what_the_serving_benchmark_sends(served):
    """As python -m sglang.bench_serving does with its native backend, adapters left empty."""
    body = {
        "text": "[go ab]",
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 7, "ignore_eos": True},
        "lora_path": "",
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
    }
    events = streamed(served, **body)
    assert events[-1]["meta_info"]["completion_tokens"] == 7
    assert events[-1]["text"].startswith(events[0]["text"])


def test_limits_above_what_is_left(bpe_folder):
    """--clamp-max-tokens makes them what is left, on every route."""
    bodies = {
        "/generate": {"text": "[say a]", "sampling_params": {"max_new_tokens": 9999}},
        "/v1/completions": {"prompt": "[say a]", "max_tokens": 9999},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "[say a]"}],
            "max_tokens": 9999,
        },
        "/v1/responses": {"input": "[say a]", "max_output_tokens": 9999},
    }
    with serving(bpe_folder) as strict, serving(bpe_folder, clamp_max_tokens=True) as clamping:
        for path, body in bodies.items():
            refused = strict.post(path, **body)
            assert refused.status_code == 400 and "--clamp-max-tokens" in refused.text
            assert clamping.post(path, **body).status_code == 200
            submit = clamping.engine.submits[-1]
            assert submit.params.max_tokens == 4096 - len(submit.prompt)
            assert _clamped(clamping) == 1 + list(bodies).index(path)
            name = "min_new_tokens" if path == "/generate" else "min_tokens"
            own = {name: 4096}
            if path == "/generate":
                own = {"sampling_params": body["sampling_params"] | own}
            if path != "/v1/responses":  # which has no such field
                error = clamping.post(path, **body | own).json()["error"]
                assert (error["param"], error["code"]) == (name, "context_length_exceeded")
                assert f"{name} 4096 make" in error["message"]
            long = {k: "word " * 4000 for k, v in body.items() if isinstance(v, str)}
            if long:
                answer = clamping.http.post(path, json=body | long)
                assert answer.status_code == 400 and "holds 4096" in answer.text


def _clamped(served):
    found = re.search(
        r"ds_runtime_clamped_requests_total (\d\S*)", served.http.get("/metrics").text
    )
    return float(found[1])
