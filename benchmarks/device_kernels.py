"""Heavy ops on the accelerator that is here: every kernel that serves, one against the other.

python benchmarks/device_kernels.py [linear] [experts] [decode] [sparse] [--out FILE]

Times are medians of ten replays of a capture, in microseconds per call; weights and caches take
turns, so that none stays in the chip's cache. A figure counts all launches of the call, such as the
quantisation of activations. Rates count what a call must read and compute.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ds_runtime.engine.process.entry import enter
from ds_runtime.ops.batch import Batch, DecodePart, Limits
from ds_runtime.ops.binding.bind import refusal
from ds_runtime.ops.contract import FP8_GROUPS, Dims, Facts, Kernel, load_attr
from ds_runtime.ops.reference.inputs import TrueInputs
from ds_runtime.ops.table import OPS
from ds_runtime.ops.weight import Weight, WeightPart
from ds_runtime.platform.contract import GraphBackend
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.plugins.select_platform import select_platform
from ds_runtime_bench.record import append, environment

DIMS = Dims({"heads": 128, "qk_nope": 128, "qk_rope": 64, "v": 128, "kv_lora": 512})
TOKENS = (1, 8, 64, 512, 4096)
LINEARS = (
    (2112, 7168, "fp8_block"),
    (4096, 7168, "fp8_block"),
    (7168, 16384, "fp8_block"),
    (36864, 7168, "fp8_block"),
    (3072, 2048, "dense"),
    (129280, 7168, "dense"),
)
EXPERTS = ((256, 7168, 256, 8, "fp8_block"), (64, 2048, 1408, 6, "dense"))
DECODES = (
    (128, 1, 512),
    (128, 32, 512),
    (128, 128, 512),
    (128, 32, 8192),
    (128, 32, 65536),
    (16, 32, 8192),
)
INDEX = {"index_heads": 64, "index_dim": 128, "index_topk": 2048}
SPARSE = ("index_prologue", "index_scores", "index_topk", "index_select")
SPARSE += ("sparse_prefill", "sparse_decode")
SPARSE_ROWS, SPARSE_CONTEXT = 32, 65536
_CACHE_BYTES = 200 << 20  # more than any chip's cache
_MOST_OUTPUT = 6e8  # elements


class Bench:
    """The platform that `auto` takes here, and what is offered on it."""

    def __init__(self) -> None:
        self.plugins = load_plugins()
        self.platform, _ = select_platform(self.plugins)
        enter(self.platform)
        self.device = self.platform.device()
        self.backend: GraphBackend = self.platform.graph_backend()
        self.facts = Facts(
            self.platform.info(), DIMS, "bfloat16", "bfloat16", page_size=64, graph_capture=True
        )
        offers = self.plugins.offers(self.facts)
        self.kernels, self.layouts = offers.kernels, offers.layouts
        self.rows: list[dict[str, Any]] = []

    def note(self, what: str, kernel: Kernel, us: float, nbytes: float, flops: float) -> None:
        """Print and keep one figure."""
        row = {"what": what, "kernel": kernel.name, "us": us}
        self.rows.append({**row, "bytes": nbytes, "flops": flops})
        rates = f"{nbytes / us / 1e6:.2f} TB/s, {flops / us / 1e6:.0f} TFLOP/s"
        print(f"{what}, {kernel.name}: {us:.1f} us ({rates})", flush=True)

    def serving(self, op: str, facts: Facts) -> Iterator[Kernel]:
        """Kernels of `op` that accept these facts, references left out."""
        for kernel in self.kernels:
            if kernel.op.name == op and kernel.rank > 0 and refusal(kernel, facts) is None:
                yield kernel

    def time(self, calls: list[Callable[[], object]]) -> float:
        """Microseconds per call."""

        def run() -> None:
            for call in calls:
                call()

        run()
        replay, times = self.backend.capture(run), []
        for _ in range(10):
            begin, end = (torch.Event(self.device, enable_timing=True) for _ in "ab")
            begin.record()
            replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / len(calls))
        return sorted(times)[len(times) // 2]

    def weight(self, rows: int, cols: int, fmt: str) -> Weight:
        values = torch.randn(rows, cols, device=self.device)
        if fmt == "dense":
            part = WeightPart("w", fmt, (rows, cols), {"weight": (values * 0.02).bfloat16()})
            return Weight((part,))
        scale = torch.rand(-(-rows // 128), -(-cols // 128), device=self.device) * 0.01 + 1e-3
        tensors = {"weight": values.clamp(-3, 3).to(torch.float8_e4m3fn), "scale": scale}
        return Weight((WeightPart("w", fmt, (rows, cols), tensors, (128, 128)),))

    def tokens(self, count: int, width: int) -> torch.Tensor:
        return torch.randn(count, width, device=self.device).bfloat16()

    def linear(self) -> None:
        for rows, cols, fmt in LINEARS:
            facts = replace(self.facts, weight_format=fmt, shape=(rows, cols))
            size = rows * cols * (1 if fmt == "fp8_block" else 2)
            for kernel in self.serving("linear", facts):
                made = load_attr(kernel.fn)(facts)
                copies = max(1, min(8, _CACHE_BYTES // size))
                packed = [made.pack(self.weight(rows, cols, fmt), facts) for _ in range(copies)]
                for tokens in TOKENS:
                    if tokens * rows > _MOST_OUTPUT:
                        continue
                    x = self.tokens(tokens, cols)
                    us = self.time([lambda p=p: made.apply(x, p) for p in packed])  # type: ignore[misc]  # noqa: B023
                    what = f"linear {rows}x{cols} {fmt}, {tokens} tokens"
                    self.note(what, kernel, us, size, 2 * tokens * rows * cols)

    def experts(self) -> None:
        for count, hidden, inter, top_k, fmt in EXPERTS:
            facts = replace(self.facts, weight_format=fmt, shape=(count, inter, hidden))
            for kernel in self.serving("experts", facts):
                made = load_attr(kernel.fn)(facts)
                packed = made.pack(_Experts(self, count, hidden, inter, fmt), facts)
                for tokens in TOKENS:
                    order = torch.rand(tokens, count, device=self.device).argsort(1)
                    ids, x = order[:, :top_k].int().contiguous(), self.tokens(tokens, hidden)
                    weights = torch.rand(tokens, top_k, device=self.device)
                    us = self.time([lambda: made.apply(x, weights, ids, packed)] * 4)  # noqa: B023
                    one, hit = 3 * hidden * inter, len(set(ids.flatten().tolist()))
                    nbytes = hit * one * (1 if fmt == "fp8_block" else 2)
                    what = f"experts {count} of {hidden}x{inter}, top {top_k}, {fmt}"
                    flops = 2 * tokens * top_k * one
                    self.note(f"{what}, {tokens} tokens", kernel, us, nbytes, flops)

    def decode(self) -> None:
        for heads, batch, length in DECODES:
            facts = replace(self.facts, phase="decode", dims=Dims({**DIMS, "heads": heads}))
            pages = length // 64 + 1
            nbytes, flops = batch * length * 1152, 2 * batch * length * heads * (576 + 512)
            for kernel in self.serving("mla_decode", facts):
                made = load_attr(kernel.fn)(facts)
                state = made.state(Limits(batch, batch, pages, 64, heads, self.device))
                made.prepare(state, self._step(batch, length, pages))
                copies = max(1, min(4, 2 * _CACHE_BYTES // nbytes))
                caches = [
                    self.tokens(batch * pages * 64, 576).view(-1, 64, 576) for _ in range(copies)
                ]
                q = torch.randn(batch, heads, 576, device=self.device).bfloat16()
                us = self.time([lambda c=c: made.run(state, q, c, 0.07) for c in caches])  # type: ignore[misc]  # noqa: B023
                self.note(f"decode {heads} heads, {batch} x {length}", kernel, us, nbytes, flops)

    def sparse(self) -> None:
        """A row per sequence; keys of the index in FP8, both kinds of latents."""
        for op, kv_dtype in product(SPARSE, ("bfloat16", FP8_GROUPS)):
            facts = replace(
                self.facts,
                dims=Dims({**DIMS, **INDEX}),
                kv_dtype=kv_dtype,
                index_dtype="float8_e4m3fn",
            )
            if kv_dtype == FP8_GROUPS and not op.startswith("sparse"):
                continue
            for kernel in self.serving(op, facts):
                tags = kernel.layouts or {self.layouts[0].tag}
                layout = next(x for x in self.layouts if x.tag in tags)
                place = TrueInputs(
                    facts=facts, layout=layout, context=SPARSE_CONTEXT, device=self.device
                )
                cost = OPS[op].cost
                assert cost is not None
                inputs, work = cost.calls[""]
                args, todo = inputs(place, SPARSE_ROWS), work(place, SPARSE_ROWS)
                made = load_attr(kernel.fn)
                us = self.time([lambda: made(*args)])  # noqa: B023
                what = f"{op} {SPARSE_ROWS} x {SPARSE_CONTEXT}, latents {kv_dtype}"
                self.note(what, kernel, us, todo.nbytes, todo.flops)

    def _step(self, batch: int, length: int, pages: int) -> Batch:
        table = torch.randperm(batch * pages).view(batch, pages).int().to(self.device)
        lens = torch.full((batch,), length, dtype=torch.int32, device=self.device)
        none = torch.zeros(batch, dtype=torch.int64, device=self.device)
        return Batch(none, none, none, none, DecodePart(table, lens, (length,) * batch))


class _Experts:
    """Random experts as a source for `pack`."""

    def __init__(self, bench: Bench, count: int, hidden: int, inter: int, fmt: str) -> None:
        self.num_experts, self.hidden, self.intermediate, self.format = count, hidden, inter, fmt
        self._bench = bench

    def expert(self, index: int) -> tuple[Weight, Weight, Weight]:
        make, wide, narrow = self._bench.weight, self.hidden, self.intermediate
        return (
            make(narrow, wide, self.format),
            make(narrow, wide, self.format),
            make(wide, narrow, self.format),
        )


def main() -> None:
    """Measure, print, and record if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    kinds = ("linear", "experts", "decode", "sparse")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="(default: all but sparse)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="add a line of JSON to it")
    args = parser.parse_args()
    if unknown := set(args.kinds) - set(kinds):
        parser.error(f"{', '.join(unknown)}: none of {', '.join(kinds)}")
    bench = Bench()
    info = bench.platform.info()
    print(f"{info.name}, {info.arch}, torch {torch.__version__}")
    for name in args.kinds or kinds[:-1]:
        getattr(bench, name)()
    if args.out:
        row = {"bench": "device_kernels", "command": " ".join(sys.argv), "device": info.name}
        append(args.out, {**row, "rows": bench.rows, **environment()})


if __name__ == "__main__":
    with torch.inference_mode():
        main()
