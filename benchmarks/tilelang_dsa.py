"""Times the ROCm plugin's TileLang kernels on the GPU that is here, beside a copy.

    python benchmarks/tilelang_dsa.py --rows 64 8 --heads 16 128 --tokens 65536
    python benchmarks/tilelang_dsa.py --candidates

Every row attends 2,048 slots of its own sequence of --tokens, and scores all of them. --candidates
tries tilings of attention with 128 heads: each is compared with torch in float32 and timed in a
process of its own, so that one that fails or hangs costs its line alone; 512 rows share a sequence.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from ds_runtime_rocm import tilelang_dsa
from ds_runtime_rocm.tilelang_dsa import Attention

PAGE, TOPK, WIDTH, LATENT, INDEX_HEADS, INDEX = 64, 2048, 576, 512, 64, 128
DEVICE = "cuda"
MANY = 128
CANDIDATES = {  # heads that a program takes, tiles
    "shares 16: 64, 2, 128": (16, Attention(64, 2, 128)),
    "shares 64: 64, 1, 256": (64, Attention(64, 1, 256)),
    "shares 64: 64, 2, 256": (64, Attention(64, 2, 256)),
    "shares 64: 32, 3, 256": (64, Attention(32, 3, 256)),
    "wide 64: 64, 2": (64, Attention(64, 2, 384, "wide")),
    "wide 64: 32, 4": (64, Attention(32, 4, 384, "wide")),
}
TIMED = ((64, 64), (512, 1), (8, 8))  # rows, sequences
CHECKED = ((3, 2048), (200, 192), (1, 100))  # rows, slots: shares, one share, a part of a tile


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


def captured(run: Callable[[], object], calls: int = 10) -> float:
    """Seconds of one call in replays of a capture of several."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return seconds(graph.replay, 5) / calls


def copy_rate() -> float:
    """Bytes per second of a copy of 2 GB, both directions counted."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), 5)


def inputs(
    rows: int, heads: int, tokens: int, sequences: int, count: int = TOPK
) -> tuple[Tensor, Tensor, Tensor]:
    """(queries, cache, slots) of rows over so many sequences of `tokens`."""
    cache = torch.randn(sequences * tokens // PAGE, PAGE, WIDTH, device=DEVICE).bfloat16()
    drawn = [
        torch.randperm(tokens, device=DEVICE)[:count] + r % sequences * tokens for r in range(rows)
    ]
    q = torch.randn(rows, heads, WIDTH, device=DEVICE).bfloat16()
    return q, cache, torch.stack(drawn).to(torch.int32)


def attention(rows: int, heads: int, tokens: int) -> tuple[float, int]:
    """(seconds, bytes of the chosen rows) of attention over chosen slots."""
    given = inputs(rows, heads, tokens, rows)
    attend = partial(tilelang_dsa.sparse_mla, *given, LATENT, WIDTH**-0.5)
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


def error(found: Tensor, q: Tensor, cache: Tensor, slots: Tensor, scale: float) -> float:
    """Of attention to torch in float32, relative to the largest norm of a row's head."""
    wanted = torch.zeros_like(found, dtype=torch.float32)
    flat = cache.flatten(0, 1)
    for row in range(len(q)):
        if len(chosen := slots[row][slots[row] >= 0].long()):
            keys = flat[chosen].float()
            weights = (q[row].float() @ keys.T * scale).softmax(-1)
            wanted[row] = weights @ keys[:, :LATENT]
    off = (found.float() - wanted).norm(dim=-1).max()
    return float(off / wanted.norm(dim=-1).max())  # NaN compares as wrong


def check(name: str) -> float:
    """The worst error of a candidate, over rows with holes, an empty one and short ones."""
    worst = 0.0
    torch.backends.cuda.matmul.allow_tf32 = False
    for rows, count in CHECKED:
        q, cache, slots = inputs(rows, MANY, 4096, min(rows, 4), count)
        q *= torch.linspace(0.1, 4, rows, device=DEVICE).bfloat16()[:, None, None]
        slots[torch.rand(slots.shape, device=DEVICE) < 0.1] = -1
        slots[rows // 2, :70] = -1  # a tile without tokens comes first
        if rows > 1:
            slots[-1] = -1
        scale = WIDTH**-0.5
        taken, tiles = CANDIDATES[name]
        found = tilelang_dsa.attend(q, cache, slots, LATENT, scale, taken, tiles)
        off = error(found, q, cache, slots, scale)
        if not off < 1e-2:
            raise ValueError(f"{rows} rows of {count} slots are off by {off:.1e}")
        worst = max(worst, off)
    return worst


def timed(name: str, tokens: int) -> list[float]:
    """Seconds of a call of a candidate with each of TIMED."""
    taken, tiles = CANDIDATES[name]
    found = []
    for rows, sequences in TIMED:
        given = inputs(rows, MANY, tokens, sequences)
        attend = partial(tilelang_dsa.attend, *given, LATENT, WIDTH**-0.5, taken, tiles)
        found.append(seconds(attend, 50))
        with suppress(RuntimeError):  # where a capture fails, calls from Python are the figure
            found[-1] = captured(attend)
        del given, attend
        torch.cuda.empty_cache()
    return found


def candidates(tokens: int, limit: int) -> None:
    """Compiles and checks all at once, times one after the other, prints a table."""

    def start(step: str, name: str) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, "--tokens", str(tokens), "--one", step, name]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def result(process: subprocess.Popen[str], wait: float) -> object:
        try:
            out, err = process.communicate(timeout=wait)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"no end within {wait:.0f} s"
        if process.returncode:
            return (err.strip().splitlines() or ["failed"])[-1][:160]
        return json.loads(out.strip().splitlines()[-1])

    began = {name: start("check", name) for name in CANDIDATES}
    checks = {name: result(process, limit) for name, process in began.items()}
    lines = []
    for name, off in checks.items():
        spent = off if isinstance(off, str) else result(start("time", name), limit)
        if isinstance(spent, list) and isinstance(off, float):
            work = [rows * TOPK * MANY * 2 * (WIDTH + LATENT) for rows, _ in TIMED]
            cells = (
                f"{1e6 * s:6.0f} us {w / s / 1e12:4.0f} TFLOP/s"
                for s, w in zip(spent, work, strict=True)
            )
            lines.append(f"{name:22} {off:.1e}  " + "  ".join(cells))
        else:
            lines.append(f"{name:22} {spent}")
    head = "  ".join(f"{f'{rows} rows':>22}" for rows, _ in TIMED)
    print(f"{torch.cuda.get_device_name()}\n{'128 heads':22} {'error':7}  {head}")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 8])
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--candidates", action="store_true")
    parser.add_argument("--limit", type=int, default=180, help="seconds of a candidate's step")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        step, name = given.one
        print(json.dumps(check(name) if step == "check" else timed(name, given.tokens)))
        return
    if given.candidates:
        candidates(given.tokens, given.limit)
        return
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
