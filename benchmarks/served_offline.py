"""What clients get through `serve`, beside `LLM.generate` with the same prompts and flags.

    ds-runtime bench make-checkpoint --shape v2-lite --config-only DIR
    python benchmarks/served_offline.py DIR [--clients 1 16 64 256] [--lengths 512 1650] [--runs 5]
        [--parts throughput first gaps] [--set max_itl=0] [--record]

Both sides run on one machine, one after the other, each in a process of its own that is started
once. `throughput`: 4 × N prompts of random ids, N at once; a run warms up, then the median of
`--runs` counts. `first`: one request at a time: what the first token takes beyond the prefill of
`generate`. `gaps`: gaps between tokens of N streams while prompts arrive, and where none do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import uvloop
from bench_server import served

from ds_runtime import LLM, SamplingParams
from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime_bench.engine.one_batch import random_prompts
from ds_runtime_bench.record import append, environment, load_format
from ds_runtime_bench.serving.client import Target
from ds_runtime_bench.serving.load import Load
from ds_runtime_bench.serving.measure import Asked, measure
from ds_runtime_bench.serving.prompts import Prompt
from ds_runtime_bench.serving.sessions import Session

RESULTS = Path(__file__).with_name("results") / "served_offline.jsonl"
PARTS = ("throughput", "first", "gaps")
START = 400.0  # seconds that a first start may take, which compiles kernels
ALONE = 15  # requests one by one, of which the median counts
GAP_CLIENTS = 64
GAP_LIMIT = 50.0  # ms, or twice the gap without prompts
Row = dict[str, Any]


def _told(*words: object) -> None:
    """Progress: one line for each figure, as it is measured."""
    print(*words, file=sys.stderr, flush=True)


def _seed(clients: int, length: int, number: int) -> int:
    return (clients << 40) + (length << 20) + number


def _vocab(args: argparse.Namespace) -> int:
    config = json.loads((resolve_model(args.model) / "config.json").read_text())
    return int(config["vocab_size"])


def _settings(args: argparse.Namespace) -> Row:
    given = dict(one.split("=", 1) for one in args.set)
    folder = resolve_model(args.model)
    return {"load_format": load_format(folder)} | {k: _value(v) for k, v in given.items()}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def offline(args: argparse.Namespace) -> Row:
    """Requests per second by length and clients, and seconds of a prefill alone by length."""
    vocab, found = _vocab(args), Row(throughput={}, first={})
    with LLM(args.model, **_settings(args)) as llm:
        for length in args.lengths:
            if "throughput" in args.parts:
                cells = {n: _generated(llm, args, n, length, vocab) for n in args.clients}
                found["throughput"][length] = cells
            if "first" in args.parts:
                found["first"][length] = _prefill(llm, length, vocab)
    return found


def _generated(llm: LLM, args: argparse.Namespace, clients: int, length: int, vocab: int) -> Row:
    """Of `clients` requests at once, as --max-running-requests would have it: the others wait for a
    row. So one engine serves all numbers, with the flags that `serve` has."""
    params = SamplingParams(max_tokens=args.output_len, ignore_eos=True, temperature=0.0)
    rows = llm._alive().scheduler.holdings.rows
    spare = rows[clients:]
    del rows[clients:]
    rates = []
    try:
        for number in range(args.runs + 1):  # the first warms up
            given = random_prompts(4 * clients, length, vocab, _seed(clients, length, number))
            begin = time.perf_counter()
            llm.generate(given, params)
            rates.append(len(given) / (time.perf_counter() - begin))
    finally:
        rows += spare
    _told("generate", length, clients, [round(rate, 2) for rate in rates])
    return {"requests_per_s": statistics.median(rates[1:]), "runs": rates[1:]}


def _prefill(llm: LLM, length: int, vocab: int) -> float:
    """Milliseconds of one prompt with one token."""
    params, seconds = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0), []
    for given in random_prompts(ALONE + 3, length, vocab, _seed(0, length, 1)):
        begin = time.perf_counter()
        llm.generate([given], params)
        seconds.append(time.perf_counter() - begin)
    _told("prefill", length, [round(each * 1e3, 1) for each in seconds])
    return statistics.median(seconds[3:]) * 1e3


class Served:
    """The same figures of a server."""

    def __init__(self, args: argparse.Namespace, url: str) -> None:
        self._args, self._vocab, self._target = args, _vocab(args), Target(url)
        extra = {"ignore_eos": True, "temperature": 0.0}
        self._asked = Asked("/v1/completions", ids=True, extra=extra)

    async def run(self) -> Row:
        """All parts that were asked for."""
        args, found = self._args, Row(throughput={}, first={}, gaps={})
        try:
            for length in args.lengths:
                if "throughput" in args.parts:
                    cells = {n: await self._throughput(n, length) for n in args.clients}
                    found["throughput"][length] = cells
                if "first" in args.parts:
                    found["first"][length] = await self._first(length)
                if "gaps" in args.parts:
                    found["gaps"][length] = await self._gaps(length)
        finally:
            await self._target.close()
        return found

    async def _load(self, count: int, clients: int, length: int, output: int, seed: int) -> Row:
        ids = random_prompts(count, length, self._vocab, seed)
        given = [Session(Prompt(output, ids=tuple(each))) for each in ids]
        load = Load(concurrency=clients)
        report = (await measure(self._target, self._asked, given, load)).report
        assert report["failed"] == 0, report["errors"]
        return report

    async def _throughput(self, clients: int, length: int) -> Row:
        reports = [
            await self._load(
                4 * clients,
                clients,
                length,
                self._args.output_len,
                _seed(clients, length, 1000 + number),
            )
            for number in range(self._args.runs + 1)
        ][1:]
        rates = [report["request_throughput"] for report in reports]
        kept = ("p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms", "client_cpu")
        last = {name: reports[-1][name] for name in kept}
        _told("serve", length, clients, [round(rate, 2) for rate in rates], last)
        return {"requests_per_s": statistics.median(rates), "runs": rates} | last

    async def _first(self, length: int) -> float:
        """Milliseconds to the first token, of one request after the other."""
        await self._load(3, 1, length, 8, _seed(0, length, 2))
        report = await self._load(ALONE, 1, length, 8, _seed(0, length, 3))
        _told("first", length, report["p50_ttft_ms"])
        return float(report["p50_ttft_ms"])

    async def _gaps(self, length: int) -> Row:
        """Milliseconds between tokens: the median of streams beside which no prompt comes, and the
        99th percentile where one client's next prompt comes as soon as its answer ends."""
        seed = _seed(GAP_CLIENTS, length, 2000)
        quiet = await self._load(GAP_CLIENTS, GAP_CLIENTS, 16, 2 * self._args.output_len, seed)
        args = GAP_CLIENTS, length, self._args.output_len, seed + 1
        busy = await self._load(4 * GAP_CLIENTS, *args)
        limit = max(GAP_LIMIT, 2 * quiet["p50_itl_ms"])
        _told("gaps", length, quiet["p50_itl_ms"], busy["p99_itl_ms"])
        return {"quiet_p50": quiet["p50_itl_ms"], "busy_p99": busy["p99_itl_ms"], "limit": limit}


def table(row: Row) -> str:
    """The record, for reading."""
    out = []
    for length, cells in row["serve"]["throughput"].items():
        out.append(f"{length} in, {row['output_len']} out: requests per second")
        out.append(f"{'clients':>8}{'generate':>10}{'serve':>10}{'share':>8}")
        for clients, online in cells.items():
            one, other = row["generate"]["throughput"][length][clients], online["requests_per_s"]
            rate = one["requests_per_s"]
            out.append(f"{clients:>8}{rate:10.2f}{other:10.2f}{other / rate:8.3f}")
    for length, first in row["serve"]["first"].items():
        alone = row["generate"]["first"][length]
        out.append(
            f"{length} in: first token {first:.1f} ms, prefill {alone:.1f} ms: {first - alone:+.1f}"
        )
    for length, gaps in row["serve"]["gaps"].items():
        out.append(
            f"{length} in, {GAP_CLIENTS} clients: gap {gaps['busy_p99']:.1f} ms (99 %), "
            f"{gaps['quiet_p50']:.1f} without prompts (median): limit {gaps['limit']:.1f}"
        )
    return "\n".join(out)


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", metavar="DIR", help="a checkpoint, a config alone, or demo")
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 1650])
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a flag")
    parser.add_argument("--record", action="store_true", help=f"append to {RESULTS.name}")
    parser.add_argument("--half", action="store_true", help="the offline side alone, as JSON")
    args = parser.parse_args()
    if args.half:
        print(json.dumps(offline(args)))
        return 0
    again = [sys.executable, __file__, *sys.argv[1:], "--half"]
    done = subprocess.run(again, check=True, stdout=subprocess.PIPE, text=True)
    alone = json.loads(done.stdout.splitlines()[-1])
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in _settings(args).items()]
    with served("--model", args.model, *flags, seconds=START) as (url, _):
        online = json.loads(json.dumps(uvloop.run(Served(args, url).run())))
    row = {
        "bench": "served-offline",
        "model": Path(args.model).name,
        "device": _device(),
        "output_len": args.output_len,
        "settings": args.set,
        "command": " ".join(["python", "benchmarks/served_offline.py", *sys.argv[1:]]),
        "generate": alone,
        "serve": online,
        **environment(),
    }
    if _settings(args)["load_format"] == "dummy":
        row["weights"] = "DUMMY"
    if args.record:
        append(RESULTS, row)
    print(table(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
