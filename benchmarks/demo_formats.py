"""Scores of the demo model in every format that `ds-runtime convert` writes.

    python benchmarks/demo_formats.py [--limit N] [--threads N] [FORMAT ...]

Rows go to benchmarks/results/accuracy.jsonl; the table of docs/demo.md is made from the last whole
row of each format, also with --table, which measures nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marked import put

from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime_bench.engine import accuracy
from ds_runtime_bench.record import append
from ds_runtime_convert.run import convert
from ds_runtime_convert.targets import TARGETS

RESULTS = Path(__file__).parent / "results" / "accuracy.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "demo.md"
KINDS = ("sums", "tools", "schemas")


def measure(name: str, limit: int | None, threads: int | None) -> dict[str, Any]:
    """Convert the demo and score it on the CPU's kernels."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / f"demo-{name}"
        report = convert(resolve_model("demo"), name, out)
        settings = {"platform": "cpu"} | ({} if threads is None else {"threads": threads})
        row = accuracy.run({"model": str(out)} | settings, limit, mtp=False)
    row |= {"model": out.name, "format": name, "limit": limit, "bytes": report.after}
    row["errors"] = report.errors
    row["command"] = " ".join(["python", "benchmarks/demo_formats.py", *sys.argv[1:]])
    return row


def rows_of(lines: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """The last row of each format over the whole held-out set, in the order of TARGETS."""
    rows = [json.loads(line) for line in lines]
    whole = [r for r in rows if "format" in r and r["limit"] is None and "schemas" in r["scores"]]
    found = {r["format"]: r for r in whole}
    return {name: found[name] for name in TARGETS if name in found}


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The rows as Markdown. points: all answers together, against bf16."""
    lines = [
        "| format | size | error of weights | perplexity | sums | tool calls | schemas | points |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in rows.items():
        error = ", ".join(f"{e:.1%}" for e in row["errors"].values())
        scores = [row["scores"][kind] for kind in KINDS]
        right = [f"{s['right']} of {s['of']}" for s in scores]
        points = 100 * (share(row) - share(rows["bf16"]))
        lines.append(
            f"| `{name}` | {row['bytes'] / 1e6:.1f} MB | {error} "
            f"| {row['scores']['prose']['perplexity']:.2f} | {' | '.join(right)} | {points:+.1f} |"
        )
    return "\n".join(lines) + "\n"


def share(row: Mapping[str, Any]) -> float:
    """Of all answers together, how many are right."""
    scores = [row["scores"][kind] for kind in KINDS]
    return float(sum(s["right"] for s in scores) / sum(s["of"] for s in scores))


def page(text: str, lines: Sequence[str]) -> str:
    """The page with its table made anew."""
    return put(text, {"formats": table(rows_of(lines))})


def main() -> int:
    """Score, record and write the table."""
    parser = argparse.ArgumentParser(description="Scores of the demo model by weight format.")
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help="(default: all)")
    parser.add_argument("--limit", type=int, metavar="N", help="only N entries of each kind")
    parser.add_argument("--threads", type=int, metavar="N", help="of the CPU's kernels")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    args = parser.parse_args()
    for name in () if args.table else args.formats or TARGETS:
        row = measure(name, args.limit, args.threads)
        append(RESULTS, row)
        print(name, json.dumps(row["scores"]), flush=True)
    PAGE.write_text(page(PAGE.read_text(), RESULTS.read_text().splitlines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
