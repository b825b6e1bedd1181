"""Many requests at once on the demo model: every text right and complete, and /health meanwhile.

Each prompt is first answered alone, greedily; under load its text must be the same, byte for byte.
A thread asks /health all the time, on a connection of its own.

Usage: python benchmarks/under_load.py [--requests 2000] [--concurrency 256] [--record]
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import uvloop
from bench_server import served

from ds_runtime_bench.record import append
from ds_runtime_bench.serving.client import Target
from ds_runtime_bench.serving.load import Load
from ds_runtime_bench.serving.measure import CHAT, Asked, Measured, measure
from ds_runtime_bench.serving.prompts import Prompt
from ds_runtime_bench.serving.sessions import Session

RESULTS = Path(__file__).with_name("results") / "under_load.jsonl"


def prompts(count: int) -> list[Prompt]:
    """Sums, which the demo model can do: 40 of them, again and again."""
    texts = [f"What is {17 * i % 90 + 10} + {29 * i % 83 + 11}?" for i in range(40)]
    return [Prompt(200, text=texts[i % 40]) for i in range(count)]


class Health:
    """Asks /health in a thread, one question after the other. `seconds`: what each answer took."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url).netloc
        self._stop = threading.Event()
        self.seconds: list[float] = []
        self.failed = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=30)
        while not self._stop.wait(0.01):
            begin = time.perf_counter()
            connection.request("GET", "/health")
            reply = connection.getresponse()
            reply.read()
            self.seconds.append(time.perf_counter() - begin)
            self.failed += reply.status != 200
        connection.close()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()


async def _measure(url: str, asked: Asked, load: Load, count: int) -> Measured:
    target = Target(url)
    try:
        return await measure(target, asked, [Session(p) for p in prompts(count)], load)
    finally:
        await target.close()


def run(requests: int, concurrency: int) -> dict[str, Any]:
    """The report; `wrong` are the answers whose text is not that of the same prompt alone."""
    asked = Asked(CHAT, extra={"temperature": 0})
    with served() as (url, _):
        alone = uvloop.run(_measure(url, asked, Load(concurrency=1), 40))
        right = [a.text for a in alone.answers]
        health = Health(url)
        try:
            found = uvloop.run(_measure(url, asked, Load(concurrency=concurrency), requests))
        finally:
            health.stop()
    report = found.report
    wrong = [i for i, a in enumerate(found.answers) if a.error is None and a.text != right[i % 40]]
    report["wrong"] = len(wrong)
    report["incomplete"] = sum(a.finish_reason != "stop" for a in found.answers)
    report["health_failed"] = health.failed
    report["health_asked"] = len(health.seconds)
    for p in (50, 99, 100):
        report[f"p{p}_health_ms"] = float(np.percentile(health.seconds, p)) * 1e3
    return report


def main() -> int:
    """Measure, print, and record where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--record", action="store_true", help=f"append to {RESULTS.name}")
    args = parser.parse_args()
    report = run(args.requests, args.concurrency)
    report["command"] = " ".join(["python", "benchmarks/under_load.py", *sys.argv[1:]])
    if args.record:
        append(RESULTS, report)
    print(json.dumps(report, indent=1))
    bad = report["failed"] + report["wrong"] + report["incomplete"] + report["health_failed"]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
