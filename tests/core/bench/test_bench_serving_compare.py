"""Two servers that take turns: the same prompts, and figures of whole rounds alone."""

from __future__ import annotations

import asyncio
import json
import statistics

import pytest
from agent_server import AgentServer
from hypothesis import given
from hypothesis import strategies as st
from raw_server import DONE, STREAM, chunk, serving

from ds_runtime.cli import main
from ds_runtime.errors import ConfigError
from ds_runtime_bench.serving.compare import FIGURES, SIDES, compare, render


def bench(one, other, *flags):
    urls = ["--base-url", one.url, "--compare", other.url]
    return main(["bench", "serving", *urls, "--max-concurrency", "1", *flags])


def test_both_get_the_same_and_take_turns(capsys, tmp_path, monkeypatch):
    order = []

    class Told(AgentServer):
        def __call__(self, path, head, body):
            order.append(self)
            return super().__call__(path, head, body)

    mine, theirs, out = Told(), Told(), tmp_path / "o.jsonl"
    flags = [
        "--dataset-name",
        "agent",
        "--num-prompts",
        "2",
        "--num-turns",
        "3",
        "--prefix-len",
        "50",
        "--rounds",
        "3",
    ]
    flags += [
        "--tool-result-len",
        "1",
        "5",
        "--think-time",
        "0",
        "--flush-cache",
        "--json",
        "--api-key",
        "a",
    ]
    with serving(mine) as one, serving(theirs) as other:
        more = ["--output-file", str(out), "--compare-api-key=b"]
        monkeypatch.setattr("sys.argv", ["ds-runtime", *flags, *more])
        assert bench(one, other, *flags, *more) == 0
        assert [{h.get("authorization") for _, h, _ in s.seen} for s in (one, other)] == [
            {"Bearer a"},
            {"Bearer b"},
        ]
    said = capsys.readouterr().out
    report = json.loads(said)
    assert report == json.loads(out.read_text()) and "Bearer" not in said
    assert "--api-key ***" in report["command"] and "--compare-api-key=***" in report["command"]
    assert mine.bodies == theirs.bodies and mine.flushed == theirs.flushed == 3
    turns = [s for n, s in enumerate(order) if n == 0 or order[n - 1] is not s]
    assert turns == [mine, theirs, mine, theirs]  # the second round begins with theirs
    questions = [b["messages"][1]["content"] for b in mine.bodies]
    assert len(set(questions)) == 6, "rounds have their own seeds"
    assert report["counted"] == {"base_url": 3, "compare": 3} and report["failed"] == 0
    for side in SIDES:
        each = report["each"][side]
        for name, median in report["medians"][side].items():
            assert median == statistics.median(r[name] for r in each)
    ratio = report["ratios"]["p50_ttft_ms"]
    mine, theirs = (report["medians"][side]["p50_ttft_ms"] for side in SIDES)
    assert ratio == mine / theirs and report["ratios"]["share_of_bound"] == 1
    assert report["versions"]["ds-runtime"]


def slow(seconds):
    def reply(path, head, body):
        return 200, STREAM, [seconds, chunk("a"), chunk(tokens=1), DONE]

    return reply


def test_a_slower_server_is_told_by_its_ratio(capsys):
    flags = ["--num-prompts", "3", "--rounds", "3"]
    with serving(slow(0.05)) as one, serving(slow(0.01)) as other:
        assert bench(one, other, *flags) == 0
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if line.startswith("p50_ttft_ms"))
    mine, theirs, ratio = map(float, row.split()[1:])
    assert mine > 50 > theirs > 10 and ratio == pytest.approx(mine / theirs, rel=0.01)
    assert "medians of 3 of 3 rounds" in said


def test_errors_of_one_side_are_said_and_are_no_figures(capsys):
    calls = []

    def fails(path, head, body):
        calls.append(path)
        if len(calls) in (4, 6):  # the warm-up of its second round, a prompt of its third
            return 503, {}, [b'{"message": "full"}']
        return slow(0.0)(path, head, body)

    with serving(slow(0.0)) as one, serving(fails) as other:
        assert bench(one, other, "--num-prompts", "2", "--rounds", "4", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["counted"] == {"base_url": 2, "compare": 2}
    assert report["errors"]["base_url"] == [] and report["failed"] == 2
    second, third = report["errors"]["compare"]
    assert second.startswith("round 2: ") and "full" in second
    assert third == "round 3: 1 failed: HTTP 503: full"
    assert [r is None for r in report["each"]["compare"]] == [False, True, True, False]
    assert None not in report["each"]["base_url"]


def test_a_side_that_is_not_there_leaves_the_others_figures(capsys):
    with serving(slow(0.0)) as one:
        urls = ["--base-url", one.url, "--compare", "http://127.0.0.1:1"]
        flags = ["--num-prompts", "1", "--rounds", "2"]
        assert main(["bench", "serving", *urls, *flags]) == 1
    said = capsys.readouterr().out
    assert "compare   http://127.0.0.1:1: medians of 0 of 2 rounds" in said
    assert said.count("compare, round ") == 2 and "is the server up" in said
    row = next(line for line in said.splitlines() if line.startswith("p50_ttft_ms"))
    assert len(row.split()) == 2


outcome = st.sampled_from(["good", "failed", "gone"])


@given(st.lists(st.tuples(outcome, outcome), min_size=1, max_size=6), st.randoms())
def test_medians_are_of_rounds_that_are_whole_on_both_sides(rounds, draw):
    values, order = {}, []

    async def measure(side, number):
        order.append((number, side))
        kind = rounds[number][SIDES.index(side)]
        if kind == "gone":
            raise ConfigError("gone")
        values[side, number] = draw.uniform(1, 9)
        errors = {"full": 2} if kind == "failed" else {}
        return {"errors": errors, "p50_ttft_ms": values[side, number], "request_goodput": None}

    report = asyncio.run(compare(["a", "b"], len(rounds), measure))
    assert [n for n, _ in order] == [n for n in range(len(rounds)) for _ in SIDES]
    assert all(order[2 * n][1] == SIDES[n % 2] for n in range(len(rounds)))
    good = [{n for n, kinds in enumerate(rounds) if kinds[i] == "good"} for i in (0, 1)]
    both = good[0] & good[1]
    for i, side in enumerate(SIDES):
        used = both or good[i]
        found = report["medians"][side]
        assert report["counted"][side] == len(used)
        expected = {"p50_ttft_ms": statistics.median(values[side, n] for n in used)} if used else {}
        assert found == expected
        assert len(report["errors"][side]) == sum(kinds[i] != "good" for kinds in rounds)
    assert set(report["ratios"]) == ({"p50_ttft_ms"} if both else set())
    assert render(report) and set(FIGURES) >= set(report["ratios"])
