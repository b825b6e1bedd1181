"""Minutes of mixed load on the demo model; at the end memory must be flat and every page free.

Clients chat whole and streamed, share prefixes, ask for several choices, keep to ever new rules,
leave in the middle, and send what is refused. A known prompt must always get its text.

Memory is the resident size of the server's process and of the engine's. A first sixth of the time
fills caches; medians of the first and of the last quarter of the rest are compared.

Usage: python benchmarks/soak.py [--seconds 600] [--clients 8] [--record]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import uvloop
from bench_server import served

from ds_runtime_bench.record import append, environment
from ds_runtime_bench.serving.client import Target
from ds_runtime_bench.serving.measure import CHAT

RESULTS = Path(__file__).with_name("results") / "soak.jsonl"
LIMIT = 0.02
_KNOWN = "What is 23 + 45?"
_SAMPLE_SECONDS = 2.0


def body(text: str, **fields: Any) -> dict[str, Any]:
    """A chat request for the demo model."""
    return {"model": "demo", "messages": [{"role": "user", "content": text}], **fields}


class Soak:
    """Clients that run until `end`. `counts`: answers by kind and status."""

    def __init__(self, url: str, end: float) -> None:
        self._target, self._impatient = Target(url), Target(url, timeout=0.3)
        self._end = end
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()

    async def prepare(self) -> None:
        """The text of the known prompt."""
        answer = await self._target.post(CHAT, body(_KNOWN, temperature=0, max_tokens=100))
        assert answer.error is None, answer.error
        self._right = answer.text

    async def client(self, number: int) -> None:
        """One request after the other, of a kind that is drawn."""
        draw = random.Random(number)
        kinds = [self._known, self._stream, self._several, self._rule, self._leave, self._refused]
        while time.monotonic() < self._end:
            kind = draw.choice(kinds)
            fault = await kind(draw)
            self.counts[kind.__name__.strip("_")] += 1
            if fault is not None:
                self.faults[f"{kind.__name__.strip('_')}: {fault}"] += 1

    async def _known(self, draw: random.Random) -> str | None:
        stream = {"stream": True} if draw.random() < 0.5 else {}
        answer = await self._target.post(
            CHAT, body(_KNOWN, temperature=0, max_tokens=100, **stream)
        )
        return answer.error or (None if answer.text == self._right else "another text")

    async def _stream(self, draw: random.Random) -> str | None:
        text = f"Tell me about {draw.randrange(10**6)}. " * draw.randint(1, 20)
        tokens = draw.randint(1, 64)
        return (await self._target.post(CHAT, body(text, stream=True, max_tokens=tokens))).error

    async def _several(self, draw: random.Random) -> str | None:
        asked = body("Say something.", n=draw.randint(2, 6), max_tokens=16, logprobs=True)
        return (await self._target.post(CHAT, asked)).error

    async def _rule(self, draw: random.Random) -> str | None:
        asked = body("Give a number.", regex=rf"{draw.randrange(10**9)}[a-z]{{1,8}}", max_tokens=24)
        return (await self._target.post(CHAT, asked)).error

    async def _leave(self, draw: random.Random) -> str | None:
        asked = body("Count.", stream=True, ignore_eos=True, max_tokens=400)
        answer = await self._impatient.post(CHAT, asked)
        gone = answer.error is None or "--timeout" in answer.error
        return None if gone else answer.error

    async def _refused(self, draw: random.Random) -> str | None:
        answer = await self._target.post(CHAT, body("x" * draw.randint(1, 20_000), n=0))
        return None if answer.status == 400 else f"status {answer.status}: {answer.error}"

    async def close(self) -> None:
        """End the connections."""
        await self._target.close()
        await self._impatient.close()


def resident(server: psutil.Process) -> tuple[int, int]:
    """Bytes of the server's process, and of those that it started."""
    children = 0
    for child in server.children(recursive=True):
        try:
            children += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return server.memory_info().rss, children


async def _run(url: str, server: psutil.Process, seconds: float, clients: int) -> dict[str, Any]:
    begin = time.monotonic()
    soak, samples = Soak(url, begin + seconds), []
    await soak.prepare()

    async def sample() -> None:
        while time.monotonic() < begin + seconds:
            samples.append((time.monotonic() - begin, *resident(server)))
            await asyncio.sleep(_SAMPLE_SECONDS)

    async with asyncio.TaskGroup() as group:
        group.create_task(sample())
        for number in range(clients):
            group.create_task(soak.client(number))
    await soak.close()
    stats = await _idle(url)
    report = {
        "seconds": seconds,
        "clients": clients,
        "requests": dict(soak.counts),
        "faults": dict(soak.faults),
        "pages_total": stats["pages_total"],
        "pages_free": stats["pages_free"],
        "memory_mb": [[round(t), round(a / 1e6, 1), round(b / 1e6, 1)] for t, a, b in samples],
    }
    for index, name in ((1, "server"), (2, "engine")):
        first, last = quarters([s[index] for s in samples if s[0] > seconds / 6])
        report |= {f"{name}_mb": [first / 1e6, last / 1e6], f"{name}_growth": last / first - 1}
    return report


def quarters(values: list[int]) -> tuple[float, float]:
    """Medians of the first and of the last quarter."""
    count = max(1, len(values) // 4)
    return statistics.median(values[:count]), statistics.median(values[-count:])


async def _idle(url: str) -> dict[str, Any]:
    """The engine's counters once nothing runs and the prefix cache is empty."""
    target = Target(url, timeout=30)
    for _ in range(100):
        await asyncio.sleep(0.3)
        await target.post("/flush_cache", {})
        stats: dict[str, Any] = json.loads((await target.get("/server_info"))[1])["stats"]
        if stats["running"] == stats["waiting"] == stats["pages_cached"] == 0:
            break
    await target.close()
    return stats


def run(seconds: float, clients: int) -> dict[str, Any]:
    """The report."""
    with served("--max-queued-requests", "1024") as (url, server):
        return uvloop.run(_run(url, server, seconds, clients)) | environment()


def failures(report: dict[str, Any]) -> list[str]:
    """What must not be, as sentences."""
    said = [f"{count} × {fault}" for fault, count in report["faults"].items()]
    if report["pages_free"] != report["pages_total"]:
        said.append(f"{report['pages_free']} of {report['pages_total']} pages are free")
    for name in ("server", "engine"):
        if abs(growth := report[f"{name}_growth"]) > LIMIT:
            said.append(f"the {name}'s memory changed by {growth:+.1%}")
    return said


def main() -> int:
    """Soak, print, and record where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--record", action="store_true", help=f"append to {RESULTS.name}")
    args = parser.parse_args()
    report = run(args.seconds, args.clients)
    report["command"] = " ".join(["python", "benchmarks/soak.py", *sys.argv[1:]])
    if args.record:
        append(RESULTS, report)
    print(json.dumps({k: v for k, v in report.items() if k != "memory_mb"}, indent=1))
    print("\n".join(said := failures(report)) or "flat, and every page free")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
