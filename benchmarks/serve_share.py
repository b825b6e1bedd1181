"""How much of `LLM.generate`'s throughput clients get through `serve` with default flags.

    ds-runtime bench make-checkpoint --shape v2-lite --config-only DIR
    python benchmarks/serve_share.py DIR [--clients 64 256] [--out FILE]

The same prompts of random ids go through both, in processes of their own, one after the other on
one machine. A closed loop of N clients stands beside an engine that runs N requests at once.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import uvloop
from bench_server import served

from ds_runtime_bench.record import append, environment, load_format
from ds_runtime_bench.serving.client import Target
from ds_runtime_bench.serving.load import Load
from ds_runtime_bench.serving.measure import Asked, measure
from ds_runtime_bench.serving.prompts import Prompt
from ds_runtime_bench.serving.sessions import Session

REQUESTS = 256  # in a run, at least
RUNS = 3  # after a warm-up; the median counts
START = 400.0  # seconds that a first start may take, which compiles kernels


def _count(clients: int) -> int:
    """Requests of one run: at least two per client."""
    return max(2 * clients, REQUESTS)


def prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """Random ids: no prompt begins like another."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(length)] for _ in range(count)]


def offline(args: argparse.Namespace, clients: int) -> dict[str, Any]:
    """Tokens per second of one `generate` over all prompts; `clients` run at once."""
    from ds_runtime import LLM, SamplingParams

    vocab = json.loads((args.folder / "config.json").read_text())["vocab_size"]
    params = SamplingParams(max_tokens=args.output_len, ignore_eos=True, temperature=0.0)
    settings = {"load_format": load_format(args.folder), "max_running_requests": clients}
    with LLM(str(args.folder), **settings) as llm:
        rates = []
        for seed in range(RUNS + 1):  # the first warms up
            given = prompts(_count(clients), args.input_len, vocab, seed)
            begin = time.perf_counter()
            llm.generate(given, params)
            rates.append(len(given) / (time.perf_counter() - begin))
    return {"requests_per_s": statistics.median(rates[1:]), "runs": rates[1:]}


async def _online(args: argparse.Namespace, url: str, clients: int) -> dict[str, Any]:
    vocab = json.loads((args.folder / "config.json").read_text())["vocab_size"]
    target, load = Target(url), Load(concurrency=clients)
    asked = Asked("/v1/completions", extra={"ignore_eos": True, "temperature": 0.0})
    try:
        found = []
        for seed in range(RUNS + 1):  # the first warms up
            ids = prompts(_count(clients), args.input_len, vocab, 1000 * clients + seed)
            given = [Session(Prompt(args.output_len, ids=tuple(each))) for each in ids]
            report = (await measure(target, asked, given, load)).report
            assert report["failed"] == 0, report
            found.append(report)
        status, body = await target.get("/server_info")
        assert status == 200, body
        info = json.loads(body)
    finally:
        await target.close()
    rates = [report["request_throughput"] for report in found[1:]]
    kept = {name: found[-1][name] for name in ("ttft_ms", "tpot_ms", "itl_ms") if name in found[-1]}
    return {
        "requests_per_s": statistics.median(rates),
        "runs": rates,
        "kv_tokens": info["kv_tokens"],
        **kept,
    }


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def main() -> int:
    """Measure, record and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="a checkpoint or a config alone")
    parser.add_argument("--clients", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--input-len", type=int, default=1650)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--offline", type=int, metavar="N", help="this half alone, as JSON")
    parser.add_argument("--out", type=Path, metavar="FILE", help="add a line of JSON to it")
    args = parser.parse_args()
    if args.offline is not None:
        print(json.dumps(offline(args, args.offline)))
        return 0
    row: dict[str, Any] = {
        "bench": "serve-share",
        "model": args.folder.name,
        "device": _device(),
        "input_len": args.input_len,
        "output_len": args.output_len,
        "command": " ".join(sys.argv),
        "clients": {},
    }
    lengths = ["--input-len", str(args.input_len), "--output-len", str(args.output_len)]
    alone: dict[int, dict[str, Any]] = {}
    for clients in args.clients:
        command = [sys.executable, __file__, str(args.folder), *lengths, "--offline", str(clients)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        alone[clients] = json.loads(done.stdout.splitlines()[-1])
    flags = ("--model", str(args.folder), "--load-format", load_format(args.folder))
    with served(*flags, seconds=START) as (url, _):
        for clients in args.clients:
            online = uvloop.run(_online(args, url, clients))
            share = online["requests_per_s"] / alone[clients]["requests_per_s"]
            row["clients"][clients] = {"generate": alone[clients], "serve": online, "share": share}
            print(json.dumps({clients: row["clients"][clients]}), flush=True)
    row |= environment()
    if flags[-1] == "dummy":
        row["weights"] = "DUMMY"
    if args.out is not None:
        append(args.out, row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
