"""Prefix hits of agents' sessions, as a share of what their trace allows.

    python benchmarks/agent_hits.py [--sessions N] [--concurrency N ...]

The demo model on the CPU: once with memory for all that the trace holds, once with half of that.
Rows go to benchmarks/results/agent_hits.jsonl; the table of benchmarks/serving.md is made from the
last row of each case, also with --table, which measures nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_server import served
from marked import put

from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime.description.hf import load_config
from ds_runtime_bench.record import append

RESULTS = Path(__file__).parent / "results" / "agent_hits.jsonl"
PAGE = Path(__file__).with_name("serving.md")
_LENGTHS = {
    "--num-turns": ["20"],
    "--prefix-len": ["1500"],
    "--input-len": ["32"],
    "--output-len": ["24"],
    "--tool-result-len": ["20", "150"],
    "--think-time": ["0.1"],
}


def measure(sessions: int, concurrency: int, kv_tokens: int | None) -> dict[str, Any]:
    """One load on a server of its own; None: as much memory as it likes."""
    flags = ["--model", "demo", "--platform", "cpu"]
    if kv_tokens is not None:
        flags += ["--kv-memory", str(kv_tokens * _bytes())]
    load = ["--dataset-name", "agent", "--tokenizer", "demo", "--goodput", "ttft:500", "itl:50"]
    load += [word for name, values in _LENGTHS.items() for word in (name, *values)]
    load += ["--num-prompts", str(sessions), "--max-concurrency", str(concurrency), "--json"]
    with served(*flags) as (url, _):
        command = [sys.executable, "-m", "ds_runtime", "bench", "serving", "--base-url", url]
        done = subprocess.run([*command, *load], check=True, capture_output=True, text=True)
        with urllib.request.urlopen(f"{url}/server_info") as reply:
            room = json.load(reply)["kv_tokens"]
    row: dict[str, Any] = json.loads(done.stdout)
    return {"bench": "agent-hits", "sessions": sessions, "serve": flags, "kv_tokens": room, **row}


def _bytes() -> int:
    """Of one token's KV in the demo: latents of all its layers in bfloat16."""
    config = load_config(resolve_model("demo"))
    return config.layers * config.latent * 2


def rows_of(lines: Sequence[str]) -> dict[tuple[int, bool], Mapping[str, Any]]:
    """The last row of each (concurrency, whether memory was halved)."""
    rows = [json.loads(line) for line in lines]
    found = {(r["load"]["concurrency"], "--kv-memory" in r["serve"]): r for r in rows}
    return dict(sorted(found.items()))


def table(rows: Mapping[tuple[int, bool], Mapping[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| sessions at once | memory | hits | the trace allows | share |",
        "|---:|---|---:|---:|---:|",
    ]
    for (concurrency, halved), row in rows.items():
        memory = "half of the trace" if halved else "all of the trace"
        rates = (f"{row[n]:.2%}" for n in ("prefix_hit_rate", "bound_hit_rate", "share_of_bound"))
        lines.append(f"| {concurrency} | {memory} | {' | '.join(rates)} |")
    return "\n".join(lines) + "\n"


def page(text: str, lines: Sequence[str]) -> str:
    """The page with its table made anew."""
    return put(text, {"agents": table(rows_of(lines))})


def main() -> int:
    """Measure, record and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=16, metavar="N")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8], metavar="N")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    args = parser.parse_args()
    for concurrency in () if args.table else args.concurrency:
        memory: int | None = None
        for _ in range(2):
            row = measure(args.sessions, concurrency, memory)
            append(RESULTS, row)
            said = ("kv_tokens", "held_tokens", "share_of_bound")
            print(json.dumps({name: row[name] for name in said}), flush=True)
            memory = row["held_tokens"] // 2
    PAGE.write_text(page(PAGE.read_text(), RESULTS.read_text().splitlines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
