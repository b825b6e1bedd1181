"""FP8 linears of few rows: the CUDA plugin's own kernel beside cuBLAS, at V3's widths by tp.

python benchmarks/fp8_few.py [--tp 1 2 4 8] [--rows 1 8] [--search] [--out FILE]

Microseconds per call, all of its launches, medians of ten replays of a capture over copies of the
weight that no cache holds together. With --search, also every group of tiles and number of pieces
that the own kernel can be compiled for.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

import torch
from device_kernels import Bench

from ds_runtime.ops.weight import Packed
from ds_runtime_bench.record import append, environment
from ds_runtime_cuda import fp8_few, nvrtc
from ds_runtime_cuda.torch_ops import LinearScaledMm

_COPIES_BYTES = 300 << 20  # more than the chip's cache


def widths(tp: int) -> list[tuple[int, int]]:
    """(out, in) of V3's FP8 linears on one of so many ranks."""
    found = [
        (2112, 7168),
        (24576 // tp, 1536),
        (7168, 16384 // tp),
        (36864 // tp, 7168),
        (7168, 18432 // tp),
        (4096 // tp, 7168),
        (7168, 2048 // tp),
    ]
    return [(n, k) for n, k in found if k % 512 == 0]


def main() -> None:
    """Measure, print, and record if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--search", action="store_true", help="every form of the own kernel")
    parser.add_argument("--out", type=Path, metavar="FILE", help="add a line of JSON to it")
    args = parser.parse_args()
    bench, found = Bench(), []
    library = LinearScaledMm(bench.facts)
    clusters = nvrtc.cores(bench.device) // 2
    for n, k in dict.fromkeys(pair for tp in args.tp for pair in widths(tp)):
        copies = max(2, min(16, _COPIES_BYTES // (n * k)))
        packed = [library.pack(bench.weight(n, k, "fp8_block"), bench.facts) for _ in range(copies)]
        for rows in args.rows:
            x = bench.tokens(rows, k)
            out = torch.empty(rows, n, dtype=x.dtype, device=x.device)

            def own(group: int, ahead: int) -> float:
                def call(p: Packed) -> None:
                    held = p.tensors["weight"], p.tensors["scale"]
                    fp8_few.multiply(x, *held, out, group, ahead)  # noqa: B023

                return bench.time([lambda p=p: call(p) for p in packed])  # type: ignore[misc]  # noqa: B023

            chosen = fp8_few.group_of(n, k, clusters)
            forms = [(chosen, fp8_few.AHEAD)]
            if args.search:
                forms = [*product(fp8_few.groups_for(k), (2, 3, 4))]
            times = {form: own(*form) for form in forms}
            theirs = bench.time([lambda p=p: library.apply(x, p) for p in packed])  # type: ignore[misc]  # noqa: B023
            best = min(times, key=lambda form: times[form])
            ours = times[chosen, fp8_few.AHEAD]
            print(
                f"{n}x{k}, {rows} rows: own {ours:.1f} us ({n * k / ours / 1e6:.2f} TB/s, group "
                f"{chosen}), LinearScaledMm {theirs:.1f} us"
                + (
                    f"; best {times[best]:.1f} us by group {best[0]}, {best[1]} ahead" * args.search
                ),
                flush=True,
            )
            row = {"n": n, "k": k, "rows": rows, "own": ours, "scaled_mm": theirs}
            found.append({**row, "forms": [[*form, us] for form, us in times.items()]})
    if args.out:
        about = {"bench": "fp8_few", "device": torch.cuda.get_device_name(), "rows": found}
        append(args.out, {**about, "command": " ".join(sys.argv), **environment()})


if __name__ == "__main__":
    with torch.inference_mode():
        main()
