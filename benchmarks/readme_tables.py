"""The tables of README.md with figures, from the records.

python benchmarks/readme_tables.py
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marked import Rows, put, read

PAGE = Path(__file__).parents[1] / "README.md"
SHAPES = {
    "lite-8": "lite-8 (V2-Lite shape, 8 layers, 9.2 GB)",
    "tiny-v3": "tiny-v3 (6 MB)",
}
DECODE = "benchmarks/device_decode.py v3-slice --prompts 512 --batch 1 8 32 64 128"


def beside_transformers(rows: Rows) -> str:
    """The last record of each shape and batch."""
    last = {(r["model"], r["batch_size"]): r for r in rows}
    lines = [
        "| checkpoint, BF16 | batch | decode, tokens/s | transformers | ratio | prefill ratio |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for model, name in SHAPES.items():
        for batch in sorted(b for m, b in last if m == model):
            r = last[model, batch]
            own, other = (r["decode_tokens_per_s"][e] for e in ("ds-runtime", "transformers"))
            ratios = f"{r['decode_ratio']:.1f} | {r['prefill_ratio']:.1f}"
            lines.append(f"| {name} | {batch} | {_rate(own)} | {_rate(other)} | {ratios} |")
            name = ""
    return "\n".join(lines).replace("|  |", "| |") + "\n"


def _rate(rate: float) -> str:
    return f"{rate:.1f}" if rate < 100 else f"{rate:,.0f}"


def on_a_device(rows: Rows) -> str:
    """The last record of the command that stands below the table, and what it ran with."""
    r = [r for r in rows if r.get("command") == DECODE][-1]
    steps = {s["batch"]: s for s in r["steps"] if "batch" in s}
    versions = {"torch": "torch", "triton": "Triton"}
    ran = [f"{name} {r['versions'][key]}" for key, name in versions.items() if key in r["versions"]]
    times = " | ".join(f"{step['step_ms']:.3f}" for step in steps.values())
    device = r["device"].removeprefix("NVIDIA ")
    return "\n".join(
        [
            f"One {device}, {', '.join(ran)}, commit {r['commit'][:7]}:",
            "",
            f"| checkpoint, FP8 | {' | '.join(map(str, steps))} requests "
            "| prompts of 32, tokens/s |",
            f"|---|{'---:|' * len(steps)}---:|",
            f"| {r['model']} | {times} | {steps[32]['prefill_tokens_per_s']:,.0f} |",
            "",
        ]
    )


LLAMA = ("AMD EPYC", "x86-64-avx512bf16", "0c1e570")  # processor, instruction set, build
LLAMA_AMX = ("Intel(R) Xeon(R) Processor", "x86-64-amx", "0c1e570")
WEIGHTS = {"BF16": ("lite-8", None), "FP8 and Q8_0": ("lite-8-fp8", None)}
WEIGHTS |= {"int8 and Q8_0": ("lite-8", "int8"), "int4 and Q4_0": ("lite-8", "int4")}


def _beside_llama(
    rows: Rows, machine: tuple[str, str, str] = LLAMA
) -> dict[str, dict[str, Mapping[str, Any]]]:
    """By weights: the cases by name of a machine's last record."""
    found: dict[tuple[str, str | None], dict[str, Mapping[str, Any]]] = {}
    for r in rows:
        peer = r["engines"].get("llama.cpp", {})
        own = r["engines"]["ds-runtime"]["arch"]
        if (r["machine"]["processor"], own, peer.get("build_commit")) == machine:
            key = (r["model"], r["settings"].get("quantize"))
            found[key] = {c["case"]: c for c in r["results"]}
    return {name: found[key] for name, key in WEIGHTS.items()}


def beside_llama(rows: Rows) -> str:
    """The ratios of rates to llama.cpp's."""
    cases = ["batch 1", "batch 4", "batch 16", "prefill 512"]
    lines = ["| weights | 1 | 4 | 16 requests | prompt of 512 |", "|---|---:|---:|---:|---:|"]
    for name, held in _beside_llama(rows).items():
        ratios = [f"{held[c]['ratio']:.2f}" for c in cases]
        lines.append(f"| {name} | {' | '.join(ratios)} |")
    return "\n".join(lines) + f"\n\nTwo cores of an {LLAMA[0]}, llama.cpp {LLAMA[2]}.\n"


def front(device: Rows, transformers: Rows, llama: Rows) -> str:
    """A row for each comparison, of the records that the tables below have."""
    r = [r for r in device if r.get("command") == DECODE][-1]
    steps = {s["batch"]: s["step_ms"] for s in r["steps"] if "batch" in s}
    t = [t for t in transformers if (t["model"], t["batch_size"]) == ("lite-8", 8)][-1]
    rate = t["decode_tokens_per_s"]
    c = _beside_llama(llama)["BF16"]["batch 16"]["tokens_per_s"]
    amx = _beside_llama(llama, LLAMA_AMX)["FP8 and Q8_0"]["batch 16"]["tokens_per_s"]
    name = r["device"].removeprefix("NVIDIA ")
    return "\n".join(
        [
            "| on | decode of | ds-runtime | other engine |",
            "|---|---|---:|---:|",
            f"| one {name} | four layers of V3, FP8, 1 and 64 requests "
            f"| {steps[1]:.2f} and {steps[64]:.2f} ms a step | none measured |",
            f"| 2 cores of an {t['machine']['processor']} | lite-8, BF16, 8 requests "
            f"| {rate['ds-runtime']:.1f} tokens/s "
            f"| transformers {t['versions']['transformers']}: {rate['transformers']:.1f} |",
            f"| 2 cores of an {LLAMA[0]} | lite-8, BF16, 16 requests "
            f"| {c['ds-runtime']:.1f} tokens/s | llama.cpp {LLAMA[2]}: {c['llama.cpp']:.1f} |",
            "| 2 cores of an Intel Xeon with AMX | lite-8, FP8, 16 requests "
            f"| {amx['ds-runtime']:.1f} tokens/s "
            f"| llama.cpp {LLAMA_AMX[2]}, Q8_0: {amx['llama.cpp']:.1f} |",
            "",
        ]
    )


def page(text: str) -> str:
    """The page with its tables made anew."""
    tables = {
        "transformers": beside_transformers(read("compare_transformers.jsonl")),
        "device": on_a_device(read("device_decode.jsonl")),
        "llama": beside_llama(read("compare.jsonl")),
        "front": front(
            read("device_decode.jsonl"), read("compare_transformers.jsonl"), read("compare.jsonl")
        ),
    }
    return put(text, tables)


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
