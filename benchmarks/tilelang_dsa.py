"""Times the ROCm plugin's TileLang kernels on the GPU that is here, beside a copy.

    python benchmarks/tilelang_dsa.py --rows 64 8 --heads 16 128 --tokens 65536

Every row attends 2,048 slots of its own sequence of --tokens, and scores all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch

from ds_runtime_rocm import tilelang_dsa

PAGE, TOPK, WIDTH, LATENT, INDEX_HEADS, INDEX = 64, 2048, 576, 512, 64, 128
DEVICE = "cuda"


def seconds(run: Callable[[], object], calls: int = 20) -> float:
    """Of one call: the best of three rounds."""
    for _ in range(3):
        run()
    best = float("inf")
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / calls * 1e-3)
    return best


def copy_rate() -> float:
    """Bytes per second of a copy of 2 GB, both directions counted."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), 5)


def attention(rows: int, heads: int, tokens: int) -> tuple[float, int]:
    """(seconds, bytes of the chosen rows) of attention over chosen slots."""
    cache = torch.randn(rows * tokens // PAGE, PAGE, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    drawn = [torch.randperm(tokens, device=DEVICE)[:TOPK] + r * tokens for r in range(rows)]
    slots = torch.stack(drawn).to(torch.int32)
    q = torch.randn(rows, heads, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    attend = partial(tilelang_dsa.sparse_mla, q, cache, slots, LATENT, WIDTH**-0.5)
    return seconds(attend), rows * TOPK * WIDTH * 2


def scores(rows: int, tokens: int) -> tuple[float, int]:
    """(seconds, bytes of keys and scores) of index scores, a sequence per row."""
    pages = rows * tokens // PAGE
    keys = torch.randn(pages, PAGE, INDEX, device=DEVICE, dtype=torch.bfloat16)
    table = torch.arange(pages, device=DEVICE, dtype=torch.int32).view(rows, -1)
    q = torch.randn(rows, INDEX_HEADS, INDEX, device=DEVICE, dtype=torch.bfloat16)
    weights = torch.randn(rows, INDEX_HEADS, device=DEVICE)
    owners = torch.arange(rows, device=DEVICE, dtype=torch.int32)
    lens = torch.full((rows,), tokens, device=DEVICE, dtype=torch.int32)
    score = partial(tilelang_dsa.index_scores, q, weights, keys, table, owners, lens)
    return seconds(score), rows * tokens * (INDEX * 2 + 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 8])
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--tokens", type=int, default=65536)
    given = parser.parse_args()
    copy = copy_rate()
    print(f"{torch.cuda.get_device_name()}, copy {copy / 1e12:.2f} TB/s")
    for rows in given.rows:
        found = {f"sparse_mla {h} heads": attention(rows, h, given.tokens) for h in given.heads}
        found["index_scores"] = scores(rows, given.tokens)
        for name, (spent, moved) in found.items():
            share = moved / spent / copy
            print(f"{name}, {rows} rows: {spent * 1e6:.0f} us, {share:.0%} of copy")


if __name__ == "__main__":
    main()
