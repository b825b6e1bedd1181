"""The fused routed experts of the CPU plugin alone, in every format, and zentorch's beside them.

python benchmarks/cpu_experts.py [--shape v3] [--tokens 1 32] [--threads 2] [--isa NAME] [--peer]
[--json FILE]. Each figure comes with its prediction, the slower of bytes over the rate at which
this machine reads memory and operations over that of its matmuls. Reading and all kernels take
turns, round by round, over enough copies of the layer that no cache holds them; figures are
medians. --peer needs zentorch, built for this torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_runtime.ops.contract import Dims, Facts
from ds_runtime.ops.reference.matrices.rounding import quantise_part
from ds_runtime.ops.weight import Weight, WeightPart
from ds_runtime_bench.record import environment
from ds_runtime_cpu import native
from ds_runtime_cpu.ceilings import STREAMS
from ds_runtime_cpu.experts import ExpertsNative
from ds_runtime_cpu.platform import CpuPlatform

SHAPES = {
    "v3": (8, 7168, 2048, 8),
    "lite": (64, 2048, 1408, 6),
    "v4-flash": (16, 4096, 2048, 6),
}  # experts, hidden, inter, top-k
FORMATS = ("bf16", "fp8", "fp4", "int8", "int4")
APART = 1 << 30  # bytes between two uses of the same weights


@dataclass
class Contender:
    """A kernel with several copies of one layer. apply(x, weights, ids, copy)."""

    name: str
    copies: list[Any]
    nbytes: float  # of one copy
    apply: Callable[..., Tensor]
    integer: bool


def clock(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


class Reading:
    """A contender that only reads: 1 GiB, with all threads, in the best number of streams."""

    def __init__(self) -> None:
        self.memory = torch.empty(1 << 30, dtype=torch.uint8)
        self.total = torch.empty(1, dtype=torch.int64)
        native.calls().large_pages(self.memory.data_ptr(), self.memory.nbytes)
        self.memory.zero_()

    def __call__(self) -> float:
        """Bytes/s."""
        return self.memory.nbytes / min(map(self._seconds, STREAMS))

    def _seconds(self, streams: int) -> float:
        where = self.memory.data_ptr(), self.memory.nbytes, streams, self.total.data_ptr()
        return clock(lambda: native.calls().read(*where))


def matmuls() -> dict[str, float]:
    """Operations/s of the matmuls that torch brings."""
    a, b = torch.randn(2048, 7168).bfloat16(), torch.randn(7168, 4096).bfloat16()
    bf16 = min(clock(lambda: a @ b) for _ in range(3))
    c, d = (t.to(torch.int8) for t in (a, b))
    int8 = min(clock(lambda: torch._int_mm(c, d)) for _ in range(3))
    work = 2.0 * 2048 * 7168 * 4096
    return {"bf16": work / bf16, "int8": work / int8}


class Source:
    """Experts that share one set of values: only their places in memory matter."""

    def __init__(self, shape: tuple[int, int, int, int], fmt: str) -> None:
        self.num_experts, self.hidden, self.intermediate, _ = shape
        named = {"bf16": "dense", "fp8": "fp8_block", "fp4": "mxfp4", "int8": "int8_channel"}
        self.format = named.get(fmt, "int4_group")
        inter, hidden = self.intermediate, self.hidden
        self.weights = tuple(
            self._weight(torch.randn(s) * 0.02)
            for s in ((inter, hidden), (inter, hidden), (hidden, inter))
        )

    def _weight(self, values: Tensor) -> Weight:
        shape = (values.shape[0], values.shape[1])
        part = WeightPart("w", "dense", shape, {"weight": values.bfloat16()})
        if self.format == "fp8_block":
            scale = torch.full((-(-shape[0] // 128), -(-shape[1] // 128)), 2.0**-12)
            codes = (values * 2.0**12).to(torch.float8_e4m3fn)
            tensors = {"weight": codes, "scale": scale}
            part = WeightPart("w", self.format, shape, tensors, (128, 128))
        elif self.format == "mxfp4":
            part = quantise_part(part, self.format, 32)
        elif self.format != "dense":
            part = quantise_part(part, self.format, 128)
        return Weight((part,))

    def expert(self, index: int) -> tuple[Weight, Weight, Weight]:
        gate, up, down = self.weights
        return gate, up, down


def ours(shape: tuple[int, int, int, int], fmt: str) -> Contender:
    facts = Facts(CpuPlatform().info(), Dims({}), dtype="bfloat16")
    kernel, source = ExpertsNative(facts), Source(shape, fmt)
    copies = [kernel.pack(source, facts)]
    copies += [kernel.pack(source, facts) for _ in range(APART // copies[0].nbytes)]
    return Contender(fmt, copies, copies[0].nbytes, kernel.apply, fmt.startswith("int"))


def zentorch(shape: tuple[int, int, int, int], fmt: str) -> Contender:
    import zentorch  # noqa: F401

    count, hidden, inter, _ = shape
    size = 2 if fmt == "bf16" else 1

    def weights() -> tuple[Any, ...]:
        shapes = (count, 2 * inter, hidden), (count, hidden, inter)
        if fmt == "bf16":
            return (*((torch.randn(s) * 0.02).bfloat16() for s in shapes), None, None)
        codes = (torch.randint(-127, 128, s, dtype=torch.int8) for s in shapes)
        return (*codes, *(torch.full(s[:2], 2e-4) for s in shapes))

    def apply(x: Tensor, chosen: Tensor, ids: Tensor, w: tuple[Any, ...]) -> Tensor:
        out = torch.zeros_like(x)
        torch.ops.zentorch.zentorch_fused_moe(
            out, x, w[0], w[1], None, None, chosen, ids, False, "silu", w[2], w[3]
        )
        return out

    nbytes = count * 3 * hidden * inter * size
    copies = [weights() for _ in range(APART // nbytes + 1)]
    return Contender(f"zentorch {fmt}", copies, nbytes, apply, fmt == "int8")


def chosen(tokens: int, shape: tuple[int, int, int, int]) -> Tensor:
    return torch.stack([torch.randperm(shape[0])[: shape[3]] for _ in range(tokens)]).int()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="v3")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--threads", type=int, default=CpuPlatform().info().cores)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--isa", choices=native.runnable())
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--json", help="append the record to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    native.choose(args.isa)
    shape = SHAPES[args.shape]
    rates, reading = matmuls(), Reading()
    contenders = [ours(shape, fmt) for fmt in args.formats]
    if args.peer:
        contenders += [zentorch(shape, f) for f in ("bf16", "int8") if f in args.formats]
    results = []
    for tokens in args.tokens:
        results += measure(contenders, shape, tokens, args.rounds, rates, reading)
    record = environment() | {
        "bench": "cpu_experts",
        "command": " ".join(sys.argv),
        "isa": native.isa_in_use(),
        "threads": args.threads,
        "shape": dict(zip(("experts", "hidden", "inter", "top_k"), shape, strict=True)),
        "matmul_ops_per_s": rates,
        "results": results,
    }
    if args.json:
        with open(args.json, "a") as file:
            file.write(json.dumps(record) + "\n")
    return 0


def measure(
    contenders: list[Contender],
    shape: tuple[int, int, int, int],
    tokens: int,
    rounds: int,
    rates: dict[str, float],
    reading: Reading,
) -> list[dict[str, Any]]:
    experts, hidden, inter, top_k = shape
    x, weights = torch.randn(tokens, hidden).bfloat16(), torch.rand(tokens, top_k)
    choices = [chosen(tokens, shape) for _ in range(rounds + 1)]
    spent: dict[str, list[float]] = {c.name: [] for c in contenders}
    turn = {c.name: 0 for c in contenders}
    read_rates = []
    for i, ids in enumerate(choices):
        read_rates.append(reading())
        for c in contenders:
            for _ in range(1 if i else len(c.copies)):  # the first round touches every copy
                turn[c.name] += 1
                copy = c.copies[turn[c.name] % len(c.copies)]
                seconds = clock(lambda: c.apply(x, weights, ids, copy))  # noqa: B023
            if i:
                spent[c.name].append(seconds)
    results = []
    rate = statistics.median(read_rates)
    for c in contenders:
        read = statistics.mean(len(ids.unique()) for ids in choices[1:]) / experts * c.nbytes
        work = 2.0 * tokens * top_k * 3 * hidden * inter
        streaming = read / rate
        working = work / rates["int8" if c.integer else "bf16"]
        seconds = statistics.median(spent[c.name])
        results.append(
            {
                "kernel": c.name,
                "tokens": tokens,
                "ms": seconds * 1e3,
                "predicted_ms": max(streaming, working) * 1e3,
                "bytes": read,
                "read_bytes_per_s": rate,
                "of_bandwidth": streaming / seconds,
                "of_matmul": working / seconds,
                "all_ms": [s * 1e3 for s in spent[c.name]],
            }
        )
        print(
            f"{tokens:4} tokens  {c.name:14} {seconds * 1e3:8.2f} ms, predicted "
            f"{max(streaming, working) * 1e3:7.2f}; {streaming / seconds:4.0%} of reading, "
            f"{working / seconds:4.0%} of matmul",
            flush=True,
        )
    return results


if __name__ == "__main__":
    sys.exit(main())
