"""The load generator against servers whose every byte and pause the test wrote."""

from __future__ import annotations

import asyncio
import json
import math
import re
import statistics
from itertools import islice, pairwise

import numpy as np
import pytest
from raw_server import DONE, STREAM, chunk, serving

from ds_runtime.cli import main
from ds_runtime.errors import ConfigError
from ds_runtime_bench.serving import prompts
from ds_runtime_bench.serving.answer import Answer
from ds_runtime_bench.serving.client import Target
from ds_runtime_bench.serving.load import Load, arrivals
from ds_runtime_bench.serving.report import felt, figures, most_at_once


def ask(server, count=1, **target):
    async def post():
        one = Target(server.url, **target)
        found = [await one.post("/v1/chat/completions", {}) for _ in range(count)]
        await one.close()
        return found

    return asyncio.run(post())


def test_a_stream_cut_anywhere_gives_the_same_events():
    whole = chunk("", role="assistant") + chunk("h\u00e9") + chunk(reasoning_content="th")
    whole += b": a comment\r\n\r\n" + chunk("\u4f60") + chunk(tokens=5) + DONE
    for size in (1, 2, 7, 64, 10_000):
        pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
        with serving(lambda *_, pieces=pieces: (200, STREAM, [*pieces, 0.0])) as server:
            (answer,) = ask(server)
        assert (answer.error, answer.text) == (None, "h\u00e9th\u4f60")
        assert len(answer.events) == 3 and (answer.prompt_tokens, answer.output_tokens) == (3, 5)
        assert server.seen[0][0] == "/v1/chat/completions"


def test_connections_are_used_again_and_replaced_when_the_server_closed_them():
    with serving(lambda *_: (200, STREAM, [chunk("a"), chunk(tokens=1), DONE])) as server:
        assert [a.text for a in ask(server, 5)] == ["a"] * 5
        assert server.connections == 1
    closing = {**STREAM, "connection": "close"}
    with serving(lambda *_: (200, closing, [chunk("a"), chunk(tokens=1), DONE])) as server:
        assert [a.error for a in ask(server, 3)] == [None] * 3
        assert server.connections == 3


def ask_by_hand(answers, requests):
    """(answers, requests of each connection) of a server that answers `answers` requests of a
    connection and closes it with the next."""
    body = b"".join((chunk("a"), chunk(tokens=1), DONE))
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
    seen = []

    async def serve(reader, writer):
        seen.append(0)
        while seen[-1] <= answers:
            while (await reader.readline()).strip():
                pass
            if not await reader.read(2):  # {}
                break
            seen[-1] += 1
            if seen[-1] <= answers:
                writer.write(head % len(body) + body)
        writer.close()

    async def run():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
            target = Target(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
            try:
                return [await target.post("/v1/chat/completions", {}) for _ in range(requests)]
            finally:
                await target.close()

    return asyncio.run(run()), seen


def test_a_connection_that_was_closed_while_idle_is_replaced():
    """Its end is seen with the next request, which goes out again on another."""
    found, seen = ask_by_hand(answers=1, requests=4)
    assert [(a.error, a.text) for a in found] == [(None, "a")] * 4
    assert seen == [2, 2, 2, 1]


def test_a_new_connection_that_answers_nothing_is_an_error():
    (answer,), seen = ask_by_hand(answers=0, requests=1)
    assert "the server closed the connection" in answer.error and seen == [1]


def test_what_is_no_http_is_an_error():
    with serving(lambda *_: ("raw", {}, [b"hello"])) as server:
        (answer,) = ask(server)
    assert answer.error.startswith("the answer is no HTTP: ")


@pytest.mark.parametrize(
    "status, headers, pieces, said",
    [
        (503, {}, [b'{"error": {"message": "full up"}}'], "HTTP 503: full up"),
        (429, {}, [b'{"detail": "slow down"}'], "HTTP 429"),
        (500, {}, [b"<html>no</html>"], "HTTP 500: <html>no</html>"),
        (200, STREAM, [chunk("a"), 0.0], r"ended without \[DONE\]"),
        (200, STREAM, [chunk("a"), 0.01, "close"], "closed the connection within an answer"),
        (200, STREAM, [b"data: {]\n\n", 0.0], "not as OpenAI's servers"),
        (200, STREAM, [b'data: {"error": {"message": "rank 1 fell"}}\n\n', DONE], "rank 1 fell"),
        (200, STREAM, [chunk("a"), 5.0], r"within 0\.3 s \(--timeout\)"),
        (200, {}, [b"{]"], "not as OpenAI's servers"),
        (200, {}, [b"<html>login</html>"], "no choices: '<html>login</html>'"),
        (200, {}, [b'{"object": "list"}'], "no choices"),
        (200, {}, [b'{"error": {"message": "no such route"}}'], "status 200: no such route"),
        (200, STREAM, [DONE], "no choices"),
    ],
    ids=range(13),
)
def test_whatever_goes_wrong_is_a_sentence(status, headers, pieces, said):
    with serving(lambda *_: (status, headers, pieces)) as server:
        (answer,) = ask(server, timeout=0.3)
    assert re.search(said, answer.error), answer.error


def timed(begin, events, tokens, end=None):
    last = events[-1][0] if events else begin
    return Answer(begin, events=events, output_tokens=tokens, end=end or last, status=200)


def test_several_tokens_per_event_share_its_gap():
    exact = timed(1.0, [(1.5, 2), (1.9, 6), (1.9, 6), (2.0, 7)], 7)
    one = felt(exact)
    assert (one.ttft, one.e2el) == (0.5, 1.0)
    assert one.itl == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.1])
    assert one.tpot == pytest.approx(0.5 / 6)
    uncounted = felt(timed(0.0, [(1.0, None), (1.4, None), (2.0, None)], 6))
    assert uncounted.itl == pytest.approx([0.2, 0.3])
    unknown = felt(timed(0.0, [(1.0, None), (1.4, None)], None))
    assert unknown.itl == pytest.approx([0.4]) and unknown.tpot is None
    whole = felt(timed(0.0, [], 9, end=3.0))
    assert (whole.ttft, whole.itl, whole.e2el) == (None, [], 3.0)


def test_figures_are_those_of_numpy_and_of_arithmetic():
    rng = np.random.default_rng(3)
    answers = []
    for i in range(50):
        times = np.cumsum(rng.uniform(0.01, 0.1, 9)) + i
        answers.append(timed(float(i), [(float(t), None) for t in times], 9))
    answers.append(Answer(60.0, end=61.0, status=503, error="HTTP 503: full"))
    report = figures(answers, 10.0, {"ttft": 60.0, "e2el": 600.0})
    ttft = [(a.events[0][0] - a.begin) * 1e3 for a in answers[:50]]
    gaps = [(y[0] - x[0]) * 1e3 for a in answers for x, y in pairwise(a.events)]
    e2el = [(a.end - a.begin) * 1e3 for a in answers[:50]]
    assert report["p90_ttft_ms"] == pytest.approx(np.percentile(ttft, 90))
    assert report["p99_itl_ms"] == pytest.approx(np.percentile(gaps, 99))
    assert report["p50_e2el_ms"] == pytest.approx(statistics.median(e2el))
    assert (report["completed"], report["failed"]) == (50, 1)
    assert report["errors"] == {"HTTP 503: full": 1}
    assert report["output_throughput"] == 45.0 and report["request_throughput"] == 5.0
    good = sum(t <= 60 and e <= 600 for t, e in zip(ttft, e2el, strict=True))
    assert 0 < good < 50 and report["request_goodput"] == good / 10
    assert report["itl_from"] == "mean tokens per event"


def test_requests_at_once():
    spans = [(0.0, 3.0), (1.0, 2.0), (2.0, 4.0), (5.0, 6.0)]
    assert most_at_once([Answer(b, end=e) for b, e in spans]) == 2


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_spread_that_were_asked_for(burstiness):
    times = list(islice(arrivals(Load(rate=20.0, burstiness=burstiness, seed=1)), 20_001))
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_prompts_have_their_lengths_and_beginnings():
    words = prompts.Words(5, None, chat=False)
    made = prompts.random_prompts(words, 40, 20, 10, 0.5)
    lengths = [len(p.text.split()) for p in made]
    assert 10 <= min(lengths) < 12 and 18 < max(lengths) <= 20
    assert len({p.text for p in made}) == 40
    again = prompts.random_prompts(prompts.Words(5, None, chat=False), 40, 20, 10, 0.5)
    assert again == made
    shared = prompts.shared_prefix(words, 12, 30, 3, 4, 8)
    assert len({tuple(p.text.split()[:30]) for p in shared}) == 3
    assert {len(p.text.split()) for p in shared} == {34}


def test_a_tokenizer_makes_ids(bpe_folder):
    from ds_runtime.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(bpe_folder)
    (one,) = prompts.random_prompts(prompts.Words(5, tokenizer, False), 1, 50, 3, 1.0)
    assert len(one.body(False)["prompt"]) == 50
    assert not set(one.ids) & (tokenizer.special_ids | set(tokenizer.eos_ids))
    (one,) = prompts.random_prompts(prompts.Words(5, tokenizer, True), 1, 50, 3, 1.0)
    assert one.body(True)["messages"] == [{"role": "user", "content": one.text}] and one.text


def test_a_dataset(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 2}\n\n{"messages": [{"role": "user"}]}\n')
    found = prompts.from_file(path, 5, 7, chat=True)
    assert [p.max_tokens for p in found] == [2, 7, 2, 7, 2]
    with pytest.raises(ConfigError, match="line 3: messages need --endpoint"):
        prompts.from_file(path, None, 7, chat=False)
    for text, said in (
        ("{", "line 1: no JSON"),
        ("[]", "line 1: write an object"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens 0"),
        ('{"text": "a"}', "needs prompt"),
        ("", "holds no prompt"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=said):
            prompts.from_file(path, None, 7, chat=True)
    with pytest.raises(ConfigError, match="cannot be read"):
        prompts.from_file(tmp_path / "none", None, 7, chat=True)


def counted(path, head, body):
    """A server that counts tokens event by event, two in each."""
    assert body["stream_options"]["continuous_usage_stats"]
    pieces = [chunk("a b", 2), 0.01, chunk("c d", 4), chunk(tokens=4), DONE]
    return 200, STREAM, pieces


def test_the_command(tmp_path, capsys):
    out = tmp_path / "o.jsonl"
    with serving(counted) as server:
        flags = f"--base-url {server.url}/v1 --num-prompts 6 --concurrency 2 --input-len 5 --json"
        more = f"--output-len 4 --ignore-eos --goodput ttft:60000 --output-file {out}"
        code = main(["bench", "serving", *flags.split(), *more.split()])
    assert code == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(out.read_text())
    assert (report["completed"], report["model"], report["load"]["concurrency"]) == (
        6,
        "other-7b",
        2,
    )
    assert report["tokens_per_event"] == 2 and report["itl_from"] == "tokens of each event"
    assert report["max_concurrent_requests"] <= 2 and report["good_completed"] == 6
    path, _, body = server.seen[-1]
    assert path == "/v1/chat/completions" and body["ignore_eos"] is True
    assert len(body["messages"][0]["content"].split()) == 5 and body["max_tokens"] == 4
    assert len([s for s in server.seen if s[2]]) == 7  # a warm-up


def plain(path, head, body):
    """A server that knows no counts within a stream, and answers whole when asked so."""
    if "continuous_usage_stats" in body.get("stream_options", {}):
        return 400, {}, [b'{"error": {"message": "unknown field"}}']
    if not body.get("stream"):
        usage = {"prompt_tokens": 3, "completion_tokens": 1}
        whole = {"choices": [{"text": "a", "finish_reason": "stop"}], "usage": usage}
        return 200, {}, [json.dumps(whole).encode()]
    return 200, STREAM, [chunk("a"), chunk(tokens=1), DONE]


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ((200, {}, [b'{"weights": "DUMMY"}']), True),
        ((200, {}, [b'{"weights": "checkpoint"}']), False),
        ((200, {}, [b'["other server"]']), False),
        ((200, {}, [b"no JSON"]), False),
    ],
)
def test_the_record_says_that_weights_are_random_where_the_server_does(capsys, info, said):
    common = ["--num-prompts", "1", "--json", "--endpoint", "/v1/completions"]
    with serving(plain) as server:
        server.info = info
        assert main(["bench", "serving", "--base-url", server.url, *common]) == 0
    assert ("weights" in json.loads(capsys.readouterr().out)) == said


@pytest.mark.parametrize("flags", [[], ["--disable-stream"], ["--request-rate", "500"]])
def test_servers_without_counts_and_a_key_that_stays_secret(capsys, flags):
    common = ["--num-prompts", "4", "--api-key", "hush", "--json", "--endpoint", "/v1/completions"]
    with serving(plain) as server:
        assert main(["bench", "serving", "--base-url", server.url, *common, *flags]) == 0
        assert all(head["authorization"] == "Bearer hush" for _, head, _ in server.seen)
    said = capsys.readouterr().out
    assert json.loads(said)["total_output_tokens"] == 4 and "hush" not in said


def test_a_chat_route_under_another_path_gets_messages(capsys):
    with serving(plain) as server:
        flags = ["--num-prompts", "1", "--endpoint", "/proxy/v1/chat/completions"]
        assert main(["bench", "serving", "--base-url", server.url, *flags]) == 0
    assert all("messages" in body for path, _, body in server.seen if body)
    capsys.readouterr()


def test_failed_requests_are_counted_and_told(capsys):
    calls = []

    def fails(path, head, body):
        calls.append(path)
        return plain(path, head, body) if len(calls) < 5 else (503, {}, [b'{"message": "full"}'])

    with serving(fails) as server:
        common = ["--num-prompts", "4", "--concurrency", "1"]
        assert main(["bench", "serving", "--base-url", server.url, *common]) == 1
    said = capsys.readouterr().out
    assert "2 of 4 requests complete" in said and "2 failed: HTTP 503: full" in said


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--base-url", "127.0.0.1:1"], "write scheme and host"),
        (["--base-url", "http://127.0.0.1:1"], "is the server up"),
        (["--base-url", f"http://{'a' * 64}.b:1"], "is the server up"),
        (["--base-url", "http://127.0.0.1:99999"], "--base-url"),
        (["--max-concurrency", "0"], "--max-concurrency 0: must be at least 1"),
        (["--request-rate", "0"], "--request-rate 0: must be above 0"),
        (["--goodput", "ttft"], "write NAME:MS"),
        (["--goodput", "itll:5"], "write NAME:MS"),
        (["--dataset-name", "custom"], "--dataset-path FILE"),
        (["--endpoint", "/generate"], "--endpoint /generate"),
        (["--extra-body", "[1]"], "must be a JSON object"),
        (["--extra-body", "{"], "no JSON"),
        (["--random-range-ratio", "1.5"], "--random-range-ratio 1.5: from 0 to 1"),
        (["--api-key", "a\nb"], "--api-key"),
    ],
)
def test_wrong_flags_are_sentences(capsys, flags, said):
    assert main(["bench", "serving", *flags]) == 1
    assert said in capsys.readouterr().err


def test_a_server_that_refuses_the_first_request(capsys):
    def refuses(*_):
        return 404, {}, [b'{"error": {"message": "no such model"}}']

    with serving(refuses) as server:
        assert main(["bench", "serving", "--base-url", server.url, "--model", "x"]) == 1
    assert "the first request failed: HTTP 404: no such model" in capsys.readouterr().err
