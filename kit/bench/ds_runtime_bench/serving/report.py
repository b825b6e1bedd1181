"""Answers → figures. Names and definitions are those that serving benchmarks share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ds_runtime_bench.serving.answer import Answer

PERCENTILES = (50, 90, 99)
TITLES = {
    "ttft": "time to first token",
    "tpot": "time per token after it",
    "itl": "inter-token latency",
    "e2el": "whole request",
}
_EXAMPLES = 5  # kinds of errors that are told


@dataclass(frozen=True, slots=True)
class Felt:
    """What one client felt, in seconds. None or empty where the answer has no such figure."""

    ttft: float | None
    tpot: float | None
    itl: list[float]
    e2el: float


def felt(answer: Answer) -> Felt:
    """The latencies of one complete answer.

    An event may bring several tokens. Its gap is then shared among them: exactly where the server
    counts tokens event by event, else by the mean number of tokens per event.
    """
    events, tokens = answer.events, answer.output_tokens
    e2el = answer.end - answer.begin
    if not events:
        return Felt(None, None, [], e2el)
    ttft = events[0][0] - answer.begin
    tpot = (events[-1][0] - events[0][0]) / (tokens - 1) if tokens and tokens > 1 else None
    return Felt(ttft, tpot, _gaps(events, tokens), e2el)


def _gaps(events: Sequence[tuple[float, int | None]], tokens: int | None) -> list[float]:
    if len(events) < 2:
        return []
    counts = [count for _, count in events]
    if None not in counts:
        out: list[float] = []
        for (then, before), (now, after) in pairwise(events):
            new = (after or 0) - (before or 0)
            # Text that was held back comes without a token of its own: it is no gap.
            out += [(now - then) / new] * new if new > 0 else []
        return out
    share = max(1.0, (tokens or 0) / len(events))
    return [(now - then) / share for (then, _), (now, _) in pairwise(events)]


def figures(
    answers: Sequence[Answer], duration: float, goodput: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """The report. Times in ms; `goodput` are limits in ms that a good request keeps, all of them.

    A token that was not counted by the server is not counted here: `total_output_tokens` is null
    if an answer came without usage.
    """
    done = [a for a in answers if a.error is None]
    all_felt = [felt(a) for a in done]
    prompt, output = _sum(a.prompt_tokens for a in done), _sum(a.output_tokens for a in done)
    events = sum(len(a.events) for a in done)
    report: dict[str, Any] = {
        "completed": len(done),
        "failed": len(answers) - len(done),
        "errors": dict(Counter(a.error for a in answers if a.error).most_common(_EXAMPLES)),
        "duration": duration,
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(done) / duration,
        "output_throughput": None if output is None else output / duration,
        "total_token_throughput": None
        if None in (prompt, output)
        else (prompt + output) / duration,  # type: ignore[operator]
        "max_concurrent_requests": most_at_once(answers),
        "tokens_per_event": output / events if output and events else None,
        "itl_from": _source(done),
        "late_ms_p99": _percentile([a.late for a in answers], 99),
    }
    for name in TITLES:
        report |= _summary(name, _values(all_felt, name))
    if goodput:
        good = sum(_keeps(one, goodput) for one in all_felt)
        report |= {"request_goodput": good / duration, "good_completed": good}
        report["goodput_limits_ms"] = dict(goodput)
    return report


def _values(all_felt: Iterable[Felt], name: str) -> list[float]:
    values = [getattr(one, name) for one in all_felt]
    if name == "itl":
        return [gap for gaps in values for gap in gaps]
    return [v for v in values if v is not None]


def _summary(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    out = {f"mean_{name}_ms": float(np.mean(seconds)) * 1e3 if seconds else None}
    return out | {f"p{p}_{name}_ms": _percentile(seconds, p) for p in PERCENTILES}


def _percentile(seconds: Sequence[float], percent: int) -> float | None:
    return float(np.percentile(seconds, percent)) * 1e3 if seconds else None


def _keeps(one: Felt, limits: Mapping[str, float]) -> bool:
    """A figure that an answer does not have (one token has no time between tokens) is kept. Of its
    inter-token latencies the 99th percentile counts, of which tpot is the mean."""
    for name, limit in limits.items():
        value = getattr(one, name)
        found = _percentile(value, 99) if name == "itl" else None if value is None else value * 1e3
        if found is not None and found > limit:
            return False
    return True


def _sum(counts: Iterable[int | None]) -> int | None:
    known = list(counts)
    return None if None in known else sum(c for c in known if c is not None)


def _source(done: Sequence[Answer]) -> str | None:
    """How tokens were shared among events."""
    streamed = [a for a in done if a.events]
    if not streamed:
        return None
    if all(count is not None for a in streamed for _, count in a.events):
        return "tokens of each event"
    return "mean tokens per event" if all(a.output_tokens for a in streamed) else "events"


def most_at_once(answers: Sequence[Answer]) -> int:
    """The largest number of requests that ran at one time."""
    steps = sorted([(a.begin, 1) for a in answers] + [(a.end, -1) for a in answers])
    running = most = 0
    for _, step in steps:
        running += step
        most = max(most, running)
    return most


def render(report: dict[str, Any], hit_lines: Sequence[str] = ()) -> str:
    """For people."""
    lines = [
        f"{report['completed']} of {report['completed'] + report['failed']} requests complete in "
        f"{report['duration']:.2f} s, at most {report['max_concurrent_requests']} at once",
        f"requests      {report['request_throughput']:10.2f} /s",
    ]
    for name, unit in (
        ("output_throughput", "output tokens"),
        ("total_token_throughput", "tokens"),
    ):
        if report[name] is not None:
            lines.append(f"{unit:<13} {report[name]:10.2f} /s")
    if "request_goodput" in report:
        limits = ", ".join(f"{k} {v:g} ms" for k, v in report["goodput_limits_ms"].items())
        lines.append(f"goodput       {report['request_goodput']:10.2f} /s within {limits}")
    lines += hit_lines
    lines.append(f"{'ms':<24}" + "".join(f"{h:>10}" for h in ("mean", "p50", "p90", "p99")))
    for name, title in TITLES.items():
        keys = [f"mean_{name}_ms", *(f"p{p}_{name}_ms" for p in PERCENTILES)]
        if report[keys[0]] is not None:
            lines.append(f"{title:<24}" + "".join(f"{report[k]:10.2f}" for k in keys))
    per_event = report["tokens_per_event"]
    if per_event is not None and per_event > 1.1 and report["itl_from"] != "tokens of each event":
        lines.append(
            f"events bring {per_event:.1f} tokens each; their gaps were divided by that number"
        )
    if report["client_cpu"] > 0.9:
        lines.append(
            f"this client used {report['client_cpu']:.0%} of a core: it may be what limits; run "
            "several"
        )
    if report["unsent"]:
        lines.append(f"{report['unsent']} turns were not sent: one before them failed")
    lines += [f"{count} failed: {error}" for error, count in report["errors"].items()]
    return "\n".join(lines)
