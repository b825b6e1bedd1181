"""What a server took from its prefix cache, and what the trace allows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ds_runtime_bench.serving.answer import Answer
from ds_runtime_bench.serving.report import felt
from ds_runtime_bench.serving.trace_bound import bounds


def hits(warm: Sequence[Answer], answers: Sequence[Answer]) -> dict[str, Any]:
    """Figures of the prefix cache; `warm` were sent before and count as earlier prompts alone.

    `cached_tokens` and what is made of it are None where the server does not say them for every
    complete answer, `bound_tokens` where it did not return all ids. Sessions have `turns`, each
    with the sums and the first token's time (median and p99, ms) of all sessions.
    """
    most, held = _bounds([*warm, *answers])
    done = [a for a in answers if a.error is None]
    report: dict[str, Any] = dict(_sums(done, most))
    report |= {
        "prefix_hit_rate": _ratio(report["cached_tokens"], report["prompt_tokens"]),
        "bound_hit_rate": _ratio(report["bound_tokens"], report["prompt_tokens"]),
        "share_of_bound": _ratio(report["cached_tokens"], report["bound_tokens"]),
        "held_tokens": held,
    }
    del report["prompt_tokens"]  # known as total_input_tokens
    last = max((a.turn for a in done), default=0)
    turns = [[a for a in done if a.turn == turn] for turn in range(last + 1)] if last else []
    report["turns"] = [
        {"turn": n, "completed": len(some), **_first_token(some), **_sums(some, most)}
        for n, some in enumerate(turns, start=1)
    ]
    return report


def save(path: Path, warm: Sequence[Answer], answers: Sequence[Answer]) -> None:
    """The ids of all requests in the order of sending, as trace_bound.py reads them."""
    early = {id(a) for a in warm}
    with path.open("w") as out:
        for a in sorted([*warm, *answers], key=lambda a: a.begin):
            row = {
                "session": a.session,
                "turn": a.turn,
                "warmup": id(a) in early,
                "cached": a.cached_tokens,
                "prompt": a.prompt_ids,
                "answer": a.output_ids,
            }
            if a.error is None:
                out.write(json.dumps(row) + "\n")


def _bounds(answers: Sequence[Answer]) -> tuple[dict[int, int], int | None]:
    """By identity of each complete answer; nothing unless all ids are known."""
    sent = sorted((a for a in answers if a.error is None), key=lambda a: a.begin)
    if not sent or not all(a.has_ids for a in sent):
        return {}, None
    found, held = bounds((a.prompt_ids, a.output_ids) for a in sent)
    return {id(a): most for a, most in zip(sent, found, strict=True)}, held


def _sums(done: Sequence[Answer], most: dict[int, int]) -> dict[str, int | None]:
    return {
        "prompt_tokens": _sum(a.prompt_tokens for a in done),
        "cached_tokens": _sum(a.cached_tokens for a in done),
        "bound_tokens": _sum(most.get(id(a)) for a in done),
    }


def _sum(counts: Iterable[int | None]) -> int | None:
    known = list(counts)
    return None if None in known or not known else sum(c for c in known if c is not None)


def _ratio(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None


def _first_token(done: Sequence[Answer]) -> dict[str, float | None]:
    times = [one.ttft * 1e3 for a in done if (one := felt(a)).ttft is not None]
    names = {"p50_ttft_ms": 50, "p99_ttft_ms": 99}
    return {n: float(np.percentile(times, p)) if times else None for n, p in names.items()}


def render(report: dict[str, Any]) -> list[str]:
    """Lines for people; none where the server says nothing of its cache."""
    lines = []
    if report["prefix_hit_rate"] is not None:
        line = f"prefix cache  {report['prefix_hit_rate']:10.2%} of prompt tokens"
        if report["share_of_bound"] is not None:
            line += (
                f"; the trace allows {report['bound_hit_rate']:.2%}, of which that is "
                f"{report['share_of_bound']:.2%}"
            )
        lines.append(line)
    if turns := report["turns"]:
        lines.append(f"{'turn':>4}{'p50 ttft':>10}{'p99':>10}{'hits':>9}{'allowed':>9}")
    for turn in turns:
        prompt = turn["prompt_tokens"]
        rates = [_ratio(turn[f"{name}_tokens"], prompt) for name in ("cached", "bound")]
        times = (turn["p50_ttft_ms"], turn["p99_ttft_ms"])
        lines.append(
            f"{turn['turn']:>4}"
            + "".join(f"{'' if t is None else format(t, '.2f'):>10}" for t in times)
            + "".join(f"{'' if r is None else format(r, '.1%'):>9}" for r in rates)
        )
    return lines
