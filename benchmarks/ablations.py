"""Decode rates with a switch on and off: torch.compile, and MLA.

    python benchmarks/ablations.py demo --batch-size 1 8
    ds-runtime bench make-checkpoint --shape v2-lite --config-only DIR
    python benchmarks/ablations.py DIR --batch-size 1 8 32 --input-len 256 2048

Two engines in processes of their own take turns. Rates are of the least times, of a prompt and of
a prompt with its answer: what else runs on the machine only adds to them, and the ratios of single
rounds say how much. A folder without weights gets random ones. Rows go to
benchmarks/results/ablations.jsonl with machine, versions and commit.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from ds_runtime_bench.engine.compare import Case, Child
from ds_runtime_bench.record import append, environment, load_format

RESULTS = Path(__file__).parent / "results" / "ablations.jsonl"
# By name: what is measured, and against what.
PAIRS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "torch.compile": ({"enable_torch_compile": True}, {}),
    "torch.compile, op by op": (
        {"enable_torch_compile": True, "disable_graph": True},
        {"disable_graph": True},
    ),
    "MLA off": ({"disable_mla": True}, {}),
    "MLA off, op by op": ({"disable_mla": True, "disable_graph": True}, {"disable_graph": True}),
}


def measured(
    model: str, settings: dict[str, Any], pair: str, cases: list[Case], rounds: int
) -> dict[str, Any]:
    """Tokens per second of every case, with and without, and their ratios."""
    engines = [Child("ds-runtime", {"model": model, **settings, **s}, cases) for s in PAIRS[pair]]
    try:
        about = [engine.about() for engine in engines]
        spent: list[list[list[tuple[float, float]]]] = [[], []]  # by engine, round and case
        for turn in range(rounds):
            for i in (0, 1) if turn % 2 else (1, 0):
                asked = [engines[i].ask({"do": "seconds", **asdict(case)}) for case in cases]
                spent[i].append([(found["first"], found["whole"]) for found in asked])
    finally:
        for engine in engines:
            engine.close()
    found = []
    for i, case in enumerate(cases):
        tokens, each = case.batch * case.output_len, [[turn[i] for turn in s] for s in spent]
        best = [min(whole for _, whole in s) - min(first for first, _ in s) for s in each]
        on, off = (tokens / seconds for seconds in best)
        rest = [[whole - first for first, whole in s] for s in each]
        ratios = sorted(b / a for a, b in zip(*rest, strict=True) if min(a, b) > 0)
        found.append(
            {
                "batch": case.batch,
                "input_len": case.input_len,
                "output_len": case.output_len,
                "on": on,
                "off": off,
                "ratio": on / off,
                "ratios": [ratios[0], statistics.median(ratios), ratios[-1]],
            }
        )
    return {
        "bench": "ablations",
        "model": Path(model).name,
        "pair": pair,
        "settings": settings,
        "rounds": rounds,
        "load_s": [a["load_s"] for a in about],
        "threads": about[0]["threads"],
        "arch": about[0]["arch"],
        "dtype": about[0]["dtype"],
        "results": found,
        **environment(),
    }


def render(row: Mapping[str, Any]) -> str:
    """For people."""
    on, off = row["load_s"]
    lines = [f"{row['pair']} on {row['model']} ({row['arch']}): ready in {on:.1f} s, {off:.1f} off"]
    for r in row["results"]:
        low, middle, high = r["ratios"]
        lines.append(
            f"  batch {r['batch']:>3}, {r['input_len']} in: {r['on']:,.1f} tokens/s, "
            f"{r['off']:,.1f} off: {r['ratio']:.3f} (rounds {low:.3f}, {middle:.3f}, {high:.3f})"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", help="folder, or demo")
    parser.add_argument("--pairs", nargs="*", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument("--batch-size", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--input-len", nargs="*", type=int, default=[256])
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=JSON")
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    settings = {n: json.loads(v) for n, _, v in (given.partition("=") for given in args.set)}
    if Path(args.model).is_dir():
        settings.setdefault("load_format", load_format(Path(args.model)))
    cases = [Case(b, n, args.output_len) for n, b in product(args.input_len, args.batch_size)]
    for pair in args.pairs:
        row = measured(args.model, settings, pair, cases, args.rounds)
        print(render(row), flush=True)
        if not args.no_record:
            append(RESULTS, row)


if __name__ == "__main__":
    main()
