"""The tables of docs/operating.md with figures of host memory and disk, from the records.

python benchmarks/operating_tables.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from marked import Rows, put, read

PAGE = Path(__file__).parents[1] / "docs" / "operating.md"


def last(rows: Rows, *names: str) -> Rows:
    """The last record of each of these values, the first seen first."""
    found: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        found[json.dumps([row[name] for name in names])] = row
    return list(found.values())


def _where(row: Mapping[str, Any]) -> str:
    return f"commit {(row['commit'] or 'unknown')[:7]}"


def of_host(rows: Rows) -> list[str]:
    """Sessions that return, from host memory and without it."""
    lines = [
        "| on | sessions, held by the device | new, out | first token: computed | from host memory "
        "| ratio | tokens/s without host memory | with | ratio |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in last(rows, "device", "checkpoint", "sessions", "held", "tokens", "more", "out"):
        device = r["device"].removeprefix("NVIDIA ")
        lines.append(
            f"| {device}, {r['checkpoint']}, {_where(r)} "
            f"| {r['sessions']} of {r['tokens']:,} tokens, {r['held']} | {r['more']}, {r['out']} "
            f"| {r['new_ms']:.0f} ms | {r['back_ms']:.0f} ms | {r['share']:.2f} "
            f"| {r['plain_rate']:,.0f} | {r['host_rate']:,.0f} | {r['gain']:.2f} |"
        )
    return [*lines, ""] if rows else []


def of_disk(rows: Rows) -> list[str]:
    """A prompt that returns after a restart. A page that is read costs what reading and loading it
    take."""
    lines = [
        "| on | cached on disk, new tokens | first token after a restart | processors taken by "
        "others | page: computed | read and loaded |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for r in last(rows, "machine", "checkpoint", "settings", "tokens", "more", "pages"):
        us, machine = r["page_us"], r["machine"]
        others = [one["others"] for one in r["returned"] if one["others"] is not None]
        share = f"{median(others):.0%}" if others else "unknown"
        lines.append(
            f"| {machine['cores']} cores of an {machine['processor']}, {r['checkpoint']}, "
            f"{_where(r)} | {r['tokens']:,}, {r['more']} | {r['median_seconds']:.1f} s | {share} "
            f"| {us['computed'] / 1e3:.1f} ms | {(us['read'] + us['loaded']) / 1e3:.1f} ms |"
        )
    return [*lines, ""] if rows else []


def tiers(host: Rows, disk: Rows) -> str:
    """Both tables, each where there are records of it."""
    return "\n".join(["", *of_host(host), *of_disk(disk)]) if host or disk else ""


def page(text: str) -> str:
    """The page with its tables made anew."""
    return put(text, {"tiers": tiers(read("device_tiers.jsonl"), read("cpu_tiers.jsonl"))})


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
