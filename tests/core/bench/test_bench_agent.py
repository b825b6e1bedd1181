"""Sessions of agents: what they send, and what is reported of their prefix hits."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from agent_server import AgentServer
from hypothesis import given
from hypothesis import strategies as st
from raw_server import serving

from ds_runtime.cli import main
from ds_runtime_bench.serving import trace_bound
from ds_runtime_bench.serving.answer import Answer
from ds_runtime_bench.serving.prompts import Words
from ds_runtime_bench.serving.report import figures
from ds_runtime_bench.serving.sessions import Agent, agent_sessions

SMALL = [
    "--dataset-name",
    "agent",
    "--num-prompts",
    "3",
    "--num-turns",
    "4",
    "--prefix-len",
    "400",
    "--input-len",
    "8",
    "--output-len",
    "5",
    "--tool-result-len",
    "3",
    "9",
    "--think-time",
    "0",
    "--json",
]


def bench(server, *flags):
    return main(["bench", "serving", "--base-url", server.url, *SMALL, *flags])


def sessions_of(bodies):
    """The bodies of each session in order, without the warm-up: that which has its question."""
    found = {}
    for body in bodies[1:]:
        found.setdefault(body["messages"][1]["content"], []).append(body)
    return list(found.values())


ids = st.lists(st.integers(0, 2) | st.sampled_from([255, 256, 70_000]), max_size=8)


def brute(requests):
    """The bound by comparing every prompt with all that came before, and what memory holds."""

    def common(one, other):
        n = 0
        while n < min(len(one), len(other)) and one[n] == other[n]:
            n += 1
        return n

    seen = [[*prompt, *answer] for prompt, answer in requests]
    most = [max((common(p, s) for s in seen[:i]), default=0) for i, (p, _) in enumerate(requests)]
    return most, len({tuple(s[: n + 1]) for s in seen for n in range(len(s))})


@given(st.lists(st.tuples(ids, ids), max_size=8))
def test_the_bound_is_that_of_brute_force(requests):
    assert trace_bound.bounds(requests) == brute(requests)


@given(st.lists(st.tuples(st.integers(0, 3), ids, ids), max_size=8))
def test_the_bound_of_sessions_is_that_of_brute_force(turns):
    requests, sessions = [], {}
    for session, said, answer in turns:
        prompt = sessions.get(session, [7, 7, 7]) + said
        requests.append((prompt, answer))
        sessions[session] = prompt + answer
    assert trace_bound.bounds(requests) == brute(requests)


def test_the_bound_knows_nothing_of_the_runtime():
    tree = ast.parse(Path(trace_bound.__file__).read_text())
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_a_session_is_a_chat_that_grows_behind_one_system_prompt(capsys):
    script = AgentServer(lambda turn: [("look", '{"at": "it"}')] * (turn % 3))
    with serving(script) as server:
        assert bench(server, "--max-concurrency", "2") == 0
    report = json.loads(capsys.readouterr().out)
    sessions = sessions_of(script.bodies)
    assert report["completed"] == 12 and [len(s) for s in sessions] == [4, 4, 4]
    firsts = [s[0] for s in sessions]
    assert len({json.dumps([f["messages"][0], f["tools"]]) for f in firsts}) == 1
    assert firsts[0]["messages"][0]["role"] == "system" and len(firsts[0]["tools"]) > 1
    for bodies in sessions:
        assert all(b["tools"] == firsts[0]["tools"] and b["max_tokens"] == 5 for b in bodies)
        for turn, (then, now) in enumerate(pairwise(bodies)):
            old, new = then["messages"], now["messages"]
            assert new[: len(old)] == old
            answer, *results = new[len(old) :]
            calls = answer.get("tool_calls", [])
            assert answer["role"] == "assistant" and len(calls) == turn % 3
            assert all(c["function"]["arguments"] == '{"at": "it"}' for c in calls)
            said = [(r["role"], r.get("tool_call_id")) for r in results]
            assert said == [("tool", c["id"]) for c in calls] or said == [("user", None)]
            assert 3 <= len(results[0]["content"].split()) <= 9


@pytest.mark.parametrize("cut", ['{"at": ', "[1]", ""])
def test_a_call_that_was_cut_gets_its_result_as_the_users(capsys, cut):
    script = AgentServer(lambda turn: [("look", "{}"), ("look", cut)])
    with serving(script) as server:
        assert bench(server) == 0
    for message in (m for body in script.bodies for m in body["messages"]):
        assert message["role"] != "tool" and "tool_calls" not in message
    capsys.readouterr()


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions"])
def test_a_cache_that_forgets_nothing_reaches_what_the_trace_allows(tmp_path, capsys, endpoint):
    path = tmp_path / "ids.jsonl"
    script = AgentServer(lambda turn: [("look", "{}")])
    if endpoint == "/v1/completions":
        script.calls = lambda turn: ()
    with serving(script) as server:
        assert bench(server, "--endpoint", endpoint, "--save-token-ids", str(path)) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["share_of_bound"] == 1 and 0.8 < report["prefix_hit_rate"] < 1
    assert report["cached_tokens"] == sum(script.cached[1:]) == report["bound_tokens"]
    assert report["held_tokens"] == brute([(s, []) for s in script.known])[1]
    assert [t["turn"] for t in report["turns"]] == [1, 2, 3, 4]
    for name in ("cached_tokens", "bound_tokens"):
        assert sum(t[name] for t in report["turns"]) == report[name]
    assert sum(t["prompt_tokens"] for t in report["turns"]) == report["total_input_tokens"]
    assert all(0 < t["p50_ttft_ms"] <= t["p99_ttft_ms"] for t in report["turns"])
    command = [sys.executable, trace_bound.__file__, str(path)]
    said = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert said["bound_tokens"] == said["cached_tokens"] == report["bound_tokens"]
    assert (said["requests"], said["held_tokens"]) == (12, report["held_tokens"])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["warmup"] for r in rows] == [True] + [False] * 12


def test_whole_pages_are_less(capsys):
    with serving(AgentServer(page=64)) as server:
        assert bench(server) == 0
    report = json.loads(capsys.readouterr().out)
    assert 0.5 < report["share_of_bound"] < 1


@pytest.mark.parametrize(
    "tells, rate, bound",
    [(("ids",), False, True), (("cached",), True, False), (("cached", "refuses"), True, False)],
)
def test_what_a_server_does_not_tell_is_not_reported(capsys, tells, rate, bound):
    with serving(AgentServer(tells=tells)) as server:
        assert bench(server) == 0
        report = json.loads(capsys.readouterr().out)
        assert bench(server, "--save-token-ids", "/dev/null") == int("ids" not in tells)
    assert (report["prefix_hit_rate"] is not None) == rate
    assert (report["bound_tokens"] is not None) == bound
    assert report["share_of_bound"] is None and len(report["turns"]) == 4
    if "ids" not in tells:
        assert "--save-token-ids: " in capsys.readouterr().err


def test_prompts_of_ids_need_the_answers_ids(bpe_folder, capsys):
    flags = ["--tokenizer", str(bpe_folder), "--endpoint", "/v1/completions"]
    script = AgentServer()
    with serving(script) as server:
        assert bench(server, *flags) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["share_of_bound"] == 1 and isinstance(script.bodies[-1]["prompt"], list)
    with serving(AgentServer(tells=("cached",))) as server:
        assert bench(server, *flags) == 1
    assert "returns no token ids" in capsys.readouterr().err


def test_people_read_the_same(capsys):
    with serving(AgentServer()) as server:
        flags = [f for f in SMALL if f != "--json"]
        assert main(["bench", "serving", "--base-url", server.url, *flags]) == 0
        said = capsys.readouterr().out
        assert re.search(r"prefix cache +\d+\.\d\d% of prompt tokens; the trace allows", said)
        assert re.search(r"of which that is 100\.00%\nturn +p50 ttft +p99 +hits +allowed", said)
        plain = ["bench", "serving", "--base-url", server.url, "--num-prompts", "2"]
        assert main([*plain, "--dataset-name", "shared-prefix", "--num-prefixes", "1"]) == 0
    said = capsys.readouterr().out
    assert "prefix cache" in said and "\nturn" not in said


def test_a_failed_turn_ends_its_session(capsys):
    with serving(AgentServer(fails=[4])) as server:
        assert bench(server, "--max-concurrency", "1") == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["completed"], report["failed"], report["unsent"]) == (10, 1, 1)
    assert report["errors"] == {"HTTP 503: full up": 1} and report["share_of_bound"] == 1


def test_concurrency_and_rate_are_those_of_sessions(capsys):
    script = AgentServer()
    with serving(script) as server:
        assert bench(server, "--max-concurrency", "1", "--num-warmups", "0") == 0
        questions = [b["messages"][1]["content"] for b in script.bodies[1:]]
        assert questions == sorted(questions, key=questions.index) and len(set(questions)) == 3
        capsys.readouterr()
        flags = ["--request-rate", "10", "--burstiness", "1000", "--num-prompts", "4"]
        assert bench(server, *flags, "--num-turns", "3") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["completed"] == 12 and 0.25 < report["duration"] < 2
    assert report["load"]["rate"] == 10


def test_agents_think_between_turns(capsys):
    words = Words(3, None, True)
    (session,) = agent_sessions(words, 1, 1, Agent(turns=2000, shared=100, pause=0.5), True)
    pauses = [step.pause for step in session.steps]
    assert sum(pauses) / len(pauses) == pytest.approx(0.5, rel=0.1) and min(pauses) >= 0
    with serving(AgentServer()) as server:
        assert bench(server, "--think-time", "0.1") == 0
    assert json.loads(capsys.readouterr().out)["duration"] > 0.1


@pytest.mark.parametrize("chat", [True, False])
def test_lengths_are_those_asked_for(bpe_folder, chat):
    from ds_runtime.text.tokenizer import Tokenizer

    for tokenizer in (None, Tokenizer.load(bpe_folder)):
        words = Words(1, tokenizer, chat)
        agent = Agent(turns=50, shared=6000, question=40, result=(200, 2000))
        one, two, three = agent_sessions(words, 3, 2, agent, chat)
        assert one.turns == 50

        def length(prompt, tokenizer=tokenizer):
            if prompt.ids:
                return len(prompt.ids)
            text = prompt.text or prompt.messages[0]["content"]
            return len(text.split()) if tokenizer is None else len(tokenizer.encode(text))

        results = [length(step.said) for step in one.steps]
        if tokenizer is None or not chat:  # ids of random tokens become text of other tokens
            assert 200 <= min(results) < 400 and 1800 < max(results) <= 2000
        if chat:
            tools = words.count(json.dumps(one.first.tools))
            shared = tools + len(one.first.messages[0]["content"].split())
            assert tokenizer is not None or 5900 <= shared <= 6100
            assert 2900 < tools < 3500
            assert one.first.messages[0] == three.first.messages[0] != two.first.messages[0]
        else:
            assert length(one.first) == 6040


def test_good_requests_keep_the_limit_of_their_gaps():
    def answer(*gaps):
        at, events = 1.0, [(1.0, 1)]
        for n, gap in enumerate(gaps, start=2):
            events.append((at := at + gap, n))
        return Answer(0.9, events=events, output_tokens=1 + len(gaps), end=at, status=200)

    answers = [answer(), answer(*[0.04] * 20), answer(*[0.01] * 19, 0.2), answer(*[0.06] * 20)]
    good = {name: figures(answers, 1.0, {name: 50.0})["good_completed"] for name in ("itl", "tpot")}
    assert good == {"itl": 2, "tpot": 3}
    assert figures(answers, 1.0, {"ttft": 500.0, "itl": 70.0})["good_completed"] == 3


def test_the_cache_is_flushed_where_that_is_asked_for(capsys):
    script = AgentServer()
    with serving(script) as server:
        assert bench(server) == 0 and script.flushed == 0
        first = json.loads(capsys.readouterr().out)
        assert bench(server, "--flush-cache") == 0 and script.flushed == 1
        again = json.loads(capsys.readouterr().out)
        assert again["cached_tokens"] == again["bound_tokens"]
        assert bench(server) == 0
        warm = json.loads(capsys.readouterr().out)
    assert first["share_of_bound"] == again["share_of_bound"] == 1 < warm["share_of_bound"]
    paths = []

    def other(path, head, body):
        paths.append(path)
        return (404 if path == "/flush_cache" else 403), {}, [b"no"]

    with serving(other) as server:
        assert bench(server, "--flush-cache") == 1
    assert paths == ["/flush_cache", "/reset_prefix_cache"]
    assert "/reset_prefix_cache: HTTP 403: no: its prefix cache" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--num-turns", "0"], "--num-turns 0: must be at least 1"),
        (["--tool-result-len", "9", "3"], "--tool-result-len 9 3: write the least"),
        (["--tool-result-len", "0", "3"], "--tool-result-len 0 3"),
        (["--think-time", "-1"], "--think-time -1: must be at least 0"),
        (["--prefix-len", "-1"], "--prefix-len -1"),
        (["--rounds", "3"], "need --compare URL"),
        (["--compare", "http://x", "--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--compare", "http://x", "--save-token-ids", "x"], "leave --compare out"),
        (["--compare", "x"], "--compare 'x': write scheme and host"),
        (["--compare", "http://x", "--compare-api-key", "a\nb"], "--compare-api-key: must be"),
        (["--compare", "http://x", "--base-url", "y"], "--base-url 'y': write scheme"),
    ],
)
def test_wrong_flags_are_sentences(capsys, flags, said):
    assert main(["bench", "serving", *flags]) == 1
    assert said in capsys.readouterr().err
