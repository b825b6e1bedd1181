"""Decode steps of two trees on one CPU, in turns: the parent's and this one's, say.

    python benchmarks/cpu_turns.py CHECKPOINT --tree PYTHON ROOT --tree PYTHON ROOT
        [--set quantize=int4] [--batch-size 1 4 16] [--rounds 60] [--no-record]

Each tree has an environment of its own, and its own cpu_steps.py makes the steps. A round is 16
steps of the one and 16 of the other, in random order, so that a machine that slows down slows both.
`ratio` is the median over rounds of the second tree's time divided by the first's. `processor` is
the same of the seconds that cores worked. Rows go to benchmarks/results/cpu_turns.jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
from pathlib import Path
from typing import Any

from cpu_steps import settings_of

from ds_runtime_bench.record import append, environment

RESULTS = Path(__file__).parent / "results" / "cpu_turns.jsonl"
STEPS, ANEW = 16, 20  # of a turn; rounds after which requests begin anew
_SIDE = """
import json, sys, time
sys.path.insert(0, sys.argv[1] + "/benchmarks")
from cpu_steps import Steps
steps = Steps(sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]))
for line in sys.stdin:
    word, number = line.split()
    if word == "begin":
        steps.begin(int(number))
    began = time.process_time()
    times = [steps.step() for _ in range(int(sys.argv[5]))]
    print("turn", json.dumps([times, time.process_time() - began]), flush=True)
"""


class Side:
    """One tree, in a process that waits for its turn."""

    def __init__(self, python: str, root: str, *given: str) -> None:
        words = [python, "-c", _SIDE, root, *given]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
        )

    def turn(self, word: str = "go", number: int = 0) -> tuple[list[float], float]:
        """Seconds of each step, and those that cores worked."""
        process = self._process
        assert process.stdin and process.stdout
        print(word, number, file=process.stdin, flush=True)
        for line in process.stdout:
            if line.startswith("turn "):
                times, worked = json.loads(line[5:])
                return times, worked
        raise SystemExit(f"a tree's process ended with {process.wait()}")


def compared(sides: list[Side], count: int, rounds: int) -> dict[str, Any]:
    """Steps of `count` requests."""
    times: list[list[float]] = [[], []]
    ratios, worked = [], []
    for turn in range(rounds):
        if turn % ANEW == 0:
            for side in sides:
                side.turn("begin", count)
        found = {i: sides[i].turn() for i in random.sample((0, 1), 2)}
        for i, (seconds, _) in found.items():
            times[i] += seconds
        first, second = (statistics.median(found[i][0]) for i in (0, 1))
        ratios.append(second / first)
        worked.append(found[1][1] / found[0][1])
    low, ratio, high = statistics.quantiles(ratios, n=4)
    return {
        "batch": count,
        "rounds": rounds,
        "ms": [1e3 * statistics.median(one) for one in times],
        "ratio": ratio,
        "quartiles": [low, high],
        "processor": statistics.median(worked),
    }


def main() -> None:
    """Print a line per batch size; record all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--tree", nargs=2, action="append", required=True)
    parser.add_argument("--commits", nargs=2, default=[], help="of the trees, for the record")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    if len(args.tree) != 2:
        parser.error("--tree is given twice: PYTHON ROOT of the first tree, then of the second")
    settings = {"threads": 1, **settings_of(args.set)}
    given = (args.checkpoint, json.dumps(settings), str(max(args.batch_size)), str(STEPS))
    sides = [Side(python, root, *given) for python, root in args.tree]
    rows = []
    for count in args.batch_size:
        rows.append(compared(sides, count, args.rounds))
        print(json.dumps(rows[-1]), flush=True)
    if not args.no_record:
        about = {"bench": "cpu-turns", "checkpoint": Path(args.checkpoint).name}
        found = {"commits": args.commits, "settings": settings, "results": rows}
        append(RESULTS, {**about, **found, **environment()})


if __name__ == "__main__":
    main()
