"""Two servers under the same load, round by round in turns.

What a machine or a network does for a while then meets both. In a round both get the same prompts
from the same seed; which of them is first alternates.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ds_runtime.errors import ConfigError

SIDES = ("base_url", "compare")
FIGURES = (
    *("request_throughput", "output_throughput", "total_token_throughput", "request_goodput"),
    *(f"p{p}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for p in (50, 99)),
    *("prefix_hit_rate", "share_of_bound"),
)
Report = dict[str, Any]
Measure = Callable[[str, int], Awaitable[Report]]


async def compare(urls: Sequence[str], rounds: int, measure: Measure) -> Report:
    """`measure(side, round)` is called for both sides of every round.

    A side's round in which a request failed, or that could not be measured, has no figures, and
    its reasons are in `errors`. Medians are over the rounds that have figures of both sides, or of
    one side's own where the other has none at all; `counted` says of how many.
    """
    found: dict[str, list[Report | None]] = {side: [] for side in SIDES}
    errors: dict[str, list[str]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            report: Report | None = None
            try:
                report = await measure(side, number)
                reasons = [f"{count} failed: {why}" for why, count in report["errors"].items()]
            except ConfigError as e:
                reasons = [str(e)]
            errors[side] += [f"round {number + 1}: {why}" for why in reasons]
            found[side].append(None if reasons else report)
    whole = {side: {i for i, r in enumerate(found[side]) if r is not None} for side in SIDES}
    both = whole["base_url"] & whole["compare"]
    used = {side: sorted(both or whole[side]) for side in SIDES}
    medians = {side: _medians([found[side][i] for i in used[side]]) for side in SIDES}
    mine, theirs = (medians[side] for side in SIDES)
    return {
        "bench": "serving-compare",
        **dict(zip(SIDES, urls, strict=True)),
        "rounds": rounds,
        "counted": {side: len(used[side]) for side in SIDES},
        "failed": sum(map(len, errors.values())),
        "errors": errors,
        "medians": medians,
        "ratios": {n: mine[n] / theirs[n] for n in mine if both and theirs.get(n)},
        "each": found,
    }


def _medians(reports: Sequence[Report | None]) -> dict[str, float]:
    """Of the figures that every report has."""
    out = {}
    for name in FIGURES:
        values = [r.get(name) for r in reports if r is not None]
        known = [v for v in values if v is not None]
        if known and len(known) == len(values):
            out[name] = statistics.median(known)
    return out


def render(report: Report) -> str:
    """For people."""
    mine, theirs = (report["medians"][side] for side in SIDES)
    counted = report["counted"]
    of = report["rounds"]
    lines = [
        f"{side:<9} {report[side]}: medians of {counted[side]} of {of} rounds" for side in SIDES
    ]
    lines.append(f"{'':<24}" + "".join(f"{head:>12}" for head in (*SIDES, "ratio")))
    for name in FIGURES:
        cells = [mine.get(name), theirs.get(name), report["ratios"].get(name)]
        if cells[0] is not None or cells[1] is not None:
            shown = ("" if c is None else f"{c:.3f}" for c in cells)
            lines.append(f"{name:<24}" + "".join(f"{c:>12}" for c in shown))
    lines += [f"{side}, {why}" for side in SIDES for why in report["errors"][side]]
    return "\n".join(lines)
