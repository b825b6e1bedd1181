"""benchmarks/results/compare.md from compare.jsonl: the last record of each model, format and peer.

python benchmarks/tables.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ds_runtime_bench.engine.compare import by_speed

RESULTS = Path(__file__).parent / "results"
HEAD = """\
# Beside other engines

Made by `python benchmarks/tables.py` from [compare.jsonl](compare.jsonl), which holds every round,
command, version and commit. Each row is one run of `ds-runtime bench compare`: both engines on the
same machine, in turns, medians over rounds. Decode rates are tokens per second over the whole batch
after prompts of 16 tokens; "limit" is what the weights and cache that a step must read allow at the
speed of memory right before and behind the turn, and the share of it a median over rounds. Both
engines time a case right after each other; up to `afe09c6` all cases of one engine were followed by
all of the other's. Records up to `51855d2` took the fastest reading, the oldest ones that of a
round's beginning, and counted bfloat16 in 16 bits where it is held in 12; later ones take the
median reading and count what is read. Where memory is shared with other machines, a turn may meet
another speed than its readings.
"At most" is the limit over the peer's rate: the ratio of an engine that does nothing but read.
Medians leave out rounds in which other processes took a tenth or more of the processors' time, and
"rounds" says how many are left; rows with none are left out. Rounds whose readings agree have rows
of their own where they are three or more, and name that speed of memory; the others are of all.
"""
DISTURBED = 0.1
FEWEST = 3  # rounds at one speed of memory that are worth rows of their own


def rows_of(lines: Sequence[str]) -> list[Mapping[str, Any]]:
    """The last record of each (machine, model, settings, peer, its file), the first first."""
    found: dict[str, Mapping[str, Any]] = {}
    for line in lines:
        row = json.loads(line)
        found[_key(row)] = row
    return list(found.values())


def _key(row: Mapping[str, Any]) -> str:
    peer = row["engines"][row["engine"]].get("model", "")
    settings = {k: v for k, v in row["settings"].items() if k != "threads"}  # as many as cores
    return json.dumps([machine(row), row["model"], settings, row["engine"], peer], sort_keys=True)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One machine's rows as Markdown."""
    lines = [
        "| model | beside | case | tokens/s | peer | ratio | at most | of the limit | rounds |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        peer = row["engine"]
        quantised = row["settings"].get("quantize")
        model = row["model"] + (f" as {quantised}" if quantised else "")
        beside = row["engines"][peer].get("model", peer)
        for r in row["results"]:
            for speed, some in _rounds(row, r):
                mine, theirs = (
                    median(r["rounds"][e][i] for i in some) for e in ("ds-runtime", peer)
                )
                limits = [r["limits"][i] for i in some]
                limit = most = ""
                if all(limits):
                    own, other = r["rounds"]["ds-runtime"], r["rounds"][peer]
                    share = median(own[i] / r["limits"][i] for i in some)
                    limit = f"{share:.0%} of {median(limits):.1f}"
                    most = f"{median(r['limits'][i] / other[i] for i in some):.2f}"
                rounds = f"{len(some)} of {len(row['neighbours'])}"
                lines.append(
                    f"| {model} | {beside} | {r['case']}{speed} | {mine:.1f} | {theirs:.1f} "
                    f"| {mine / theirs:.2f} | {most} | {limit} | {rounds} |"
                )
                model = beside = ""
    return "\n".join(lines)


def _rounds(row: Mapping[str, Any], result: Mapping[str, Any]) -> list[tuple[str, list[int]]]:
    """(what to say of memory, rounds) of all of a case's rounds, and of those at one speed."""
    quiet = [i for i, share in enumerate(row["neighbours"]) if (share or 0.0) < DISTURBED]
    reads = result.get("reads") or row.get("reads")  # of this case, or of a round of all
    if not quiet:
        return []
    found = [("", quiet)]
    for group in by_speed([reads[i] for i in quiet]) if reads else ():
        some = [quiet[i] for i in group]
        read = median(x for i in some for x in reads[i]) / 1e9
        if len(some) >= FEWEST:
            found.append((f", memory at {read:.0f} GB/s", some))
    return found


def machine(row: Mapping[str, Any]) -> str:
    """The heading of a machine's table."""
    m, versions = row["machine"], row["versions"]
    arch = row["engines"]["ds-runtime"]["arch"]
    return f"## {m['processor']}, {m['cores']} cores, {arch}, torch {versions['torch']}"


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The whole file, a table per machine."""
    machines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        machines.setdefault(machine(row), []).append(row)
    parts = [HEAD]
    for head, own in machines.items():
        read = [c["bandwidth"] / 1e9 for row in own for c in row["ceilings"]]
        said = f"Memory read {min(read):.1f} to {max(read):.1f} GB/s."
        notes = dict.fromkeys(
            e["note"] for row in own for e in row["engines"].values() if "note" in e
        )
        parts += [head, "", " ".join([said, *notes]), "", table(own), ""]
    return "\n".join(parts)


def main() -> int:
    """Write the page."""
    lines = (RESULTS / "compare.jsonl").read_text().splitlines()
    (RESULTS / "compare.md").write_text(page(rows_of(lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
