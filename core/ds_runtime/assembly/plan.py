"""A plan: what was bound where and why, as data that people and ranks can compare. Torch-free."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ds_runtime.errors import ConfigError, unreadable
from ds_runtime.ops.binding.notes import Decision
from ds_runtime.ops.table import OPS

FORMAT = 1
_FLAGS = {  # that set what a plan says, so that a difference names what to change
    "model": "--model",
    "platform": "--platform",
    "dtype": "--dtype",
    "kv_dtype": "--kv-cache-dtype",
    "index_dtype": "--index-cache-dtype",
    "page_size": "--page-size",
    "tp": "--tp",
    "attn_dp": "--enable-dp-attention, groups",
    "ep": "--ep",
    "halves": "--enable-two-batch-overlap",
}


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One op at all sites that got the same answer."""

    op: str
    kernel: str
    provider: str
    rank: int
    sites: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    lost: tuple[tuple[str, int], ...]
    note: str
    layout: str
    contract: int
    converts: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that was decided at start-up."""

    model: str
    platform: str
    arch: str
    dtype: str
    kv_layout: str
    kv_dtype: str
    index_dtype: str  # of index keys, "" where attention is dense
    page_size: int
    tp: int
    attn_dp: int  # groups of ranks that divide the sequences
    rows: tuple[PlanRow, ...]
    changes: tuple[tuple[str, str, str, str], ...]  # field, old → new, plugin, because
    versions: tuple[tuple[str, str], ...]
    given_up: tuple[str, ...] = ()  # for --batch-invariant, a sentence each
    sums: str = ""  # which kinds of all-reduce serve which sizes, and why
    sum_sizes: str = ""  # the same without why, "" where the library's serve all
    gathered: int = 0  # bytes of logits up to which one kernel gathers them
    halves: str = ""  # which steps with prompts run as two halves
    undivided: str = ""  # why none does, where that was asked
    ep: int = 1  # parts of the routed experts by number

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict with the digest."""
        return {"format": FORMAT, "digest": self.digest(), **self._said()}

    def _said(self) -> dict[str, Any]:
        maybe = ("given_up", "sums", "sum_sizes", "gathered", "halves", "undivided")
        left = {name for name in maybe if not getattr(self, name)}
        left |= {"ep"} if self.ep == 1 else set()
        return {k: v for k, v in asdict(self).items() if k not in left}

    def digest(self) -> str:
        """Hash of all that must agree between ranks: which sizes each kind of sum serves and which
        steps are divided, not why."""
        compared = {k: v for k, v in self._said().items() if k not in ("sums", "undivided")}
        text = json.dumps(compared, sort_keys=True, default=list)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def heavy_references(self) -> list[PlanRow]:
        """Rows where a heavy op fell to the reference."""
        return [r for r in self.rows if OPS[r.op].heavy and r.provider == "reference"]

    def conversions(self) -> list[PlanRow]:
        """Rows whose weights are held in another format than they are stored in."""
        return [r for r in self.rows if r.converts]


def make_rows(decisions: Iterable[Decision]) -> tuple[PlanRow, ...]:
    """Group equal answers; sites are compressed to layer ranges."""
    groups: dict[tuple[Any, ...], list[Decision]] = {}
    for d in decisions:
        key = (d.op, d.kernel, d.rank, d.refused, d.lost, d.note, d.layout, d.converts)
        groups.setdefault(key, []).append(d)
    order = {name: i for i, name in enumerate(OPS)}
    alike = [f.name for f in fields(PlanRow) if f.name != "sites"]
    rows = [
        PlanRow(sites=compress_sites(d), **{name: getattr(d[0], name) for name in alike})
        for d in groups.values()
    ]
    return tuple(sorted(rows, key=lambda r: (order[r.op], r.sites)))


def compress_sites(decisions: Iterable[Decision]) -> tuple[str, ...]:
    """`layers.0-2,5.self_attn.o_proj` instead of four paths; the phase where it matters."""
    layers: dict[tuple[str, str], list[int]] = {}
    for d in decisions:
        layers.setdefault((d.site.module, d.site.phase), []).append(d.site.layer)
    out = []
    for (module, phase), numbers in layers.items():
        suffix = "" if phase == "any" else f" ({phase})"
        inside = sorted(n for n in set(numbers) if n >= 0)
        if inside:
            out.append(f"layers.{_ranges(inside)}.{module}{suffix}")
        if -1 in numbers:
            out.append(module + suffix)
    return tuple(out)


def _ranges(numbers: list[int]) -> str:
    spans: list[list[int]] = []
    for n in numbers:
        if spans and spans[-1][1] == n - 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def difference(mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Sentences about what differs between two plans as dicts; empty if nothing does."""
    said = [
        f"{_FLAGS.get(key, key)}: {_shown(key, here)} here, {_shown(key, there)} there"
        for key in (
            *("model", "platform", "arch", "dtype", "kv_layout", "kv_dtype", "index_dtype"),
            *("page_size", "tp", "attn_dp", "ep", "gathered", "halves"),
        )
        if (here := _told(mine, key)) != (there := _told(other, key))
    ]
    sums, others = mine.get("sums", ""), other.get("sums", "")
    # Plans of before `sum_sizes` have the sizes in that sentence alone.
    if _told(mine, "sum_sizes") != _told(other, "sum_sizes") and sums != others:
        said.append(f"sums: {sums!r} here, {others!r} there")
    here, there = _by_site(mine), _by_site(other)
    for key in sorted({*here, *there}):
        if here.get(key) != there.get(key):
            said.append(
                f"{key}: {here.get(key, 'nothing')} here, {there.get(key, 'nothing')} there"
            )
    if mine.get("versions") != other.get("versions"):
        said.append(f"versions: {mine.get('versions')} here, {other.get('versions')} there")
    return said


def _told(plan: Mapping[str, Any], key: str) -> Any:
    """What a plan says; it leaves out that experts and steps are not divided, and what the library
    alone serves."""
    return plan.get(key, {"ep": 1, "sum_sizes": "", "gathered": 0, "halves": ""}.get(key))


def _shown(key: str, value: Any) -> str:
    return "off" if key == "halves" and not value else repr(value)


def _by_site(plan: Mapping[str, Any]) -> dict[str, str]:
    return {f"{r['op']} at {s}": r["kernel"] for r in plan.get("rows", ()) for s in r["sites"]}


def check_against(plan: Plan, path: str) -> None:
    """Raise ConfigError with the differences if `path` holds another plan."""
    mine = json.loads(json.dumps(plan.to_dict(), default=list))
    if said := difference(mine, read_plan(path)):
        raise ConfigError(
            f"--plan {path}: the plan differs: " + "; ".join(said) + "; if that is meant, lock "
            f"again: ds-runtime plan lock {path}, with the flags of this command"
        )


def read_plan(path: str | Path) -> dict[str, Any]:
    """Returns the locked plan in the file `path` as a dict. Raises ConfigError if it is none."""
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as e:
        made = "a plan, as ds-runtime plan lock FILE writes it"
        raise unreadable(f"plan {path}", e, made) from e
    rows = found.get("rows") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not all(_is_row(r) for r in rows):
        raise ConfigError(f"plan {path}: is no plan; write one with ds-runtime plan lock FILE")
    if found.get("format") != FORMAT:
        raise ConfigError(
            f"plan {path}: format {found.get('format')!r}, this runtime reads {FORMAT}; "
            "lock it again with ds-runtime plan lock FILE"
        )
    return dict(found)


def _is_row(row: object) -> bool:
    return (
        isinstance(row, dict)
        and {"op", "kernel", "sites"} <= row.keys()
        and isinstance(row["sites"], list)
    )


def render(plan: Plan, verbose: bool = False) -> str:
    """The plan for people: a line per op, with its kernels, their sites and what is to be known.

    verbose: a line per kernel instead, then who lost and who refused, with the reason.
    """
    head = (
        f"model {plan.model} · platform {plan.platform} ({plan.arch}) · dtype {plan.dtype} · "
        f"KV {plan.kv_layout} of {plan.kv_dtype}, page {plan.page_size}"
        f"{f', index keys of {plan.index_dtype}' if plan.index_dtype else ''} · tp {plan.tp}"
        f"{f', attention by sequences in {plan.attn_dp} groups' if plan.attn_dp > 1 else ''}"
        f"{f', experts by number in {plan.ep} parts' if plan.ep > 1 else ''}"
        f" · plan {plan.digest()}"
    )
    lines = [head]
    for name, old_new, plugin, because in plan.changes:
        lines.append(f"config {name}: {old_new} ({plugin}: {because})")
    lines += [said for said in (plan.sums, plan.halves, plan.undivided) if said]
    lines += [f"gives up for --batch-invariant: {said}" for said in plan.given_up]
    if not verbose:
        for op, kernels in _by_op(plan.rows).items():
            lines.append(f"{op:<14} {'; '.join(kernels)}")
        return "\n".join(lines)
    for row in plan.rows:
        lines.append(f"{row.op:<14} {_bound(row)}")
        lines += [f"{'':<16}lost: {name} (rank {rank})" for name, rank in row.lost]
        lines += [f"{'':<16}refused: {name}: {why}" for name, why in row.refused]
    return "\n".join(lines)


def _by_op(rows: Iterable[PlanRow]) -> dict[str, list[str]]:
    """Op → its kernels as `_bound` says them, one with all its sites whoever else refused there."""
    joined: dict[tuple[str, ...], PlanRow] = {}
    for row in rows:
        key = (row.op, row.kernel, row.note, row.converts)
        before = joined.get(key)
        joined[key] = row if before is None else replace(row, sites=before.sites + row.sites)
    said: dict[str, list[str]] = {}
    for row in joined.values():
        said.setdefault(row.op, []).append(_bound(row))
    return said


def _bound(row: PlanRow) -> str:
    """A kernel, its sites, and what is to be known."""
    note = f"  [{row.note}]" if row.note else ""
    note += f"  [converts {row.converts}]" if row.converts else ""
    return f"{row.kernel:<28} {', '.join(row.sites)}{note}"
