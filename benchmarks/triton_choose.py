"""Configuration files from what triton_tune.py found.

python benchmarks/triton_choose.py FOLDER MEASURED FOUND.jsonl …: writes FOLDER/<op>.json, the
fastest candidate of every shape and size, and under "*" that which loses least over all
shapes. MEASURED says where the figures come from.
"""

from __future__ import annotations

import json
import sys
from math import log
from pathlib import Path
from typing import Any

Config = dict[str, int]
# Measured size → the largest size that its winner serves.
BOUNDS = {
    "linear_fp8": {1: 2, 8: 16, 32: 32, 64: 64, 128: 256, 512: 1024, 4096: 4096},
    "linear_dense": {1: 2, 8: 16, 32: 32, 64: 64, 128: 128},
    "absorb": {1: 4, 8: 16, 32: 32, 64: 64, 128: 128},
    "mla_decode": {1: 2, 8: 16, 32: 48, 64: 96, 128: 128},
    "mha_prefill": {512: 1024, 4096: 4096},
    "experts_dense": {6: 12, 24: 36, 48: 96, 192: 384, 768: 4096},
    "experts_fp8": {8: 16, 32: 48, 64: 128, 256: 512, 1024: 8192},
}
KNOWN = {"linear_dense": {"129": {"TORCH": 1}}}  # many tokens: torch's own matmul


def split(config: Config) -> tuple[str, str, str]:
    """(what both matmuls share, gate and up's part, down's part) of a configuration of experts."""
    up = {k: v for k, v in config.items() if k.startswith("UP_")}
    down = {k: v for k, v in config.items() if k.startswith("DN_")}
    both = {k: v for k, v in config.items() if k not in up and k not in down}
    return json.dumps(both), json.dumps(up), json.dumps(down)


def combined(found: list[tuple[float, Config]]) -> list[tuple[float, Config]]:
    """Measured candidates vary one matmul at a time: the best of both, at their summed gain."""
    by_base: dict[str, list[tuple[float, str, str]]] = {}
    for us, config in found:
        base, up, down = split(config)
        by_base.setdefault(base, []).append((us, up, down))
    made = []
    for base, rows in by_base.items():
        up_best, down_best = min(rows), min(rows)
        for us, up, down in rows:
            middle = [r for r in rows if r[1] == up], [r for r in rows if r[2] == down]
            if len(middle[0]) > 1 and len(middle[1]) > 1:  # varied both ways: the common point
                up_best = min(middle[1])
                down_best = min(middle[0])
                total = up_best[0] + down_best[0] - us
                config = {**json.loads(base), **json.loads(up_best[1]), **json.loads(down_best[2])}
                made.append((min(total, up_best[0], down_best[0]), config))
                break
        else:
            us, up, down = min(rows)
            made.append((us, {**json.loads(base), **json.loads(up), **json.loads(down)}))
    return sorted(made, key=lambda pair: pair[0])


def usual(tables: list[list[tuple[float, Config]]]) -> Config:
    """The candidate that loses least over all shapes where it was measured, as most were."""
    losses: dict[str, list[float]] = {}
    for found in tables:
        for us, config in found:
            losses.setdefault(json.dumps(config), []).append(log(us / found[0][0]))
    most = max(len(v) for v in losses.values())
    wide = {k: sum(v) / len(v) for k, v in losses.items() if len(v) >= most * 0.6}
    best: Config = json.loads(min(wide, key=lambda k: wide[k]))
    return best


def main() -> None:
    folder, measured = Path(sys.argv[1]), sys.argv[2]
    latest: dict[tuple[str, str, int], list[tuple[float, Config]]] = {}
    for name in sys.argv[3:]:
        for line in Path(name).read_text().splitlines():
            row = json.loads(line)
            found = sorted(((us, c) for us, c in row["found"]), key=lambda pair: pair[0])
            if row["op"].startswith("experts"):
                found = combined(found)
            latest[row["op"], row["shape"], row["size"]] = found
    folder.mkdir(parents=True, exist_ok=True)
    for op in sorted({op for op, _, _ in latest}):
        bounds = BOUNDS.get(op, {})
        shapes: dict[str, dict[str, Any]] = {}
        sizes: dict[int, list[list[tuple[float, Config]]]] = {}
        for (one, shape, size), found in latest.items():
            if one != op or " long" in shape:
                continue
            bound = bounds.get(size, size)
            shapes.setdefault(shape.split()[0], {})[str(bound)] = found[0][1]
            sizes.setdefault(bound, []).append(found)
        if op != "mha_prefill":
            shapes["*"] = {str(bound): usual(tables) for bound, tables in sorted(sizes.items())}
        for shape in shapes.values():
            shape.update(KNOWN.get(op, {}))
        lines = ",\n".join(
            f"    {json.dumps(shape)}: {{\n"
            + ",\n".join(f"      {json.dumps(b)}: {json.dumps(c)}" for b, c in table.items())
            + "\n    }"
            for shape, table in sorted(shapes.items())
        )
        text = f'{{\n  "measured": {json.dumps(measured)},\n  "shapes": {{\n{lines}\n  }}\n}}\n'
        (folder / f"{op}.json").write_text(text)
        print(op, sorted(shapes))


if __name__ == "__main__":
    main()
