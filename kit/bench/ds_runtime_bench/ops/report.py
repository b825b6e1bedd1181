"""The figures of `bench ops` for people, and as JSON. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ds_runtime.assembly.result import Assembly
from ds_runtime.ops.declare import OpWork
from ds_runtime.platform.contract import Ceilings
from ds_runtime_bench.ops.measure import Figure, Measurement
from ds_runtime_bench.record import environment

DISTURBED = 0.05  # share of processor time from which others are worth a word


def render_ceilings(c: Ceilings) -> str:
    """The head of the report."""
    rates = ", ".join(f"{name} {rate / 1e12:.2f}" for name, rate in c.compute.items())
    cache = f"{c.cache / 2**20:,.0f} MiB" if c.cache else "unknown"
    return (
        f"ceilings measured: read {c.bandwidth / 1e9:.1f} GB/s, matmul in Top/s: {rates}; "
        f"last-level cache {cache} ({c.note})"
    )


def render(f: Figure) -> str:
    """One figure for people."""
    name = f"{f.op}.{f.method}" if f.method else f.op
    head = (
        f"{name:<18} {f.what:<26} {f.tokens:>5} tokens  {f.kernel + ('*' if f.bound else ''):<30}"
    )
    if f.error:
        return f"{head} {f.error}"
    share = f"{_percent(f.of_bandwidth)} of read, {_percent(f.of_compute)} of compute"
    warm = "" if f.cold else f"  [{f.copies} copies: partly in the cache]"
    note = f"  [{f.note}]" if f.note else ""
    return (
        f"{head} {f.us:>11,.1f} µs {f.gb_per_s:>8.1f} GB/s {f.gflop_per_s:>9.1f} GFLOP/s  "
        f"{share}{warm}{note}"
    )


def _percent(share: float | None) -> str:
    return "   -" if share is None else f"{share:>4.0%}"


def render_neighbours(share: float | None) -> str:
    """A warning if others were busy meanwhile, else nothing."""
    if share is None or share < DISTURBED:
        return ""
    return f"other processes used {share:.0%} of the processors meanwhile: the machine is faster"


def report(measurement: Measurement, figures: Sequence[Figure]) -> dict[str, Any]:
    """The JSON form."""
    assembly, ceilings = measurement.assembly, measurement.ceilings
    return {
        "bench": "ops",
        "model": assembly.plan.model,
        "platform": assembly.plan.platform,
        "arch": assembly.plan.arch,
        "dtype": assembly.plan.dtype,
        "threads": assembly.config.threads,
        "ceilings": asdict(ceilings),
        "figures": [asdict(f) for f in figures],
        "neighbours": measurement.neighbours.share(),
        **environment(),
    }


def bytes_report(assembly: Assembly, steps: Mapping[int, Mapping[str, OpWork]]) -> dict[str, Any]:
    """The JSON form: bytes by batch and op."""
    found = {n: {name: work.nbytes for name, work in step.items()} for n, step in steps.items()}
    sums = {n: sum(step.values()) for n, step in found.items()}
    return {"bench": "ops", "model": assembly.plan.model, "step_bytes": found, "all": sums}


def render_bytes(steps: Mapping[int, Mapping[str, OpWork]]) -> str:
    """Megabytes per step by op, and the sum."""
    names = list(dict.fromkeys(name for step in steps.values() for name in step))
    head = f"{'MB a step':<16}" + "".join(f"{f'batch {n}':>14}" for n in steps)
    lines = [head]
    for name in names:
        cells = (step.get(name, OpWork()).nbytes / 1e6 for step in steps.values())
        lines.append(f"{name:<16}" + "".join(f"{c:>14,.1f}" for c in cells))
    sums = (sum(w.nbytes for w in step.values()) / 1e6 for step in steps.values())
    lines.append(f"{'all':<16}" + "".join(f"{c:>14,.1f}" for c in sums))
    return "\n".join(lines)
