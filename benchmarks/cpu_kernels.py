"""The CPU plugin's competing kernels, one against the other and against the reference.

python benchmarks/cpu_kernels.py [--threads N] [--isa NAME] [--only linears ...]. Times are the best
of half a second, in CPU microseconds of the calling thread, so that one thread's figures hold on a
busy machine too; with more threads read them on an idle one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from ds_runtime.ops.batch import Batch, DecodePart, Limits, Segments
from ds_runtime.ops.contract import Dims, Facts
from ds_runtime.ops.reference import norm as ref_norm
from ds_runtime.ops.reference.attention import dense as ref_attention
from ds_runtime.ops.reference.matrices import moe as ref_moe
from ds_runtime.ops.weight import Weight, WeightPart
from ds_runtime_cpu import attention, experts, linear, native, small
from ds_runtime_cpu.platform import CpuPlatform

DIMS = Dims({"heads": 16, "qk_nope": 128, "qk_rope": 64, "v": 128, "kv_lora": 512})


def best(call: Callable[[], Any], seconds: float = 0.5) -> float:
    call()
    end, found = time.perf_counter() + seconds, float("inf")
    while time.perf_counter() < end:
        begin = time.thread_time()
        call()
        found = min(found, time.thread_time() - begin)
    return found * 1e6


def dense(values: torch.Tensor) -> Weight:
    shape = (values.shape[0], values.shape[1])
    return Weight((WeightPart("w", "dense", shape, {"weight": values}),))


def show(what: str, times: dict[str, float], nbytes: float = 0) -> None:
    rate = {k: f" ({nbytes / t / 1e3:.1f} GB/s)" if nbytes else "" for k, t in times.items()}
    print(what + ": " + ", ".join(f"{k} {t:.0f} us{rate[k]}" for k, t in times.items()), flush=True)


def linears(facts: Facts, dtype: torch.dtype) -> None:
    rows, k = 4096, 2048
    copies = [dense(torch.randn(rows, k).to(dtype)) for _ in range(8)]  # more than the caches hold
    kernels = [linear.LinearPrepacked, linear.LinearNative, linear.LinearPlain]
    bound = {c.tag: (c(facts), [c(facts).pack(w, facts) for w in copies]) for c in kernels}
    for tokens in (1, 4, 8, 16, 64, 512):
        x, times = torch.randn(tokens, k).to(dtype), {}
        for tag, (kernel, packed) in bound.items():
            turn = iter(range(1 << 30))
            times[tag] = best(lambda: kernel.apply(x, packed[next(turn) % 8]))  # noqa: B023
        show(f"linear {rows}x{k} {facts.dtype} tokens={tokens}", times, rows * k * dtype.itemsize)


class Source:
    """Random experts of the V2-Lite shape."""

    format, num_experts, hidden, intermediate = "dense", 64, 2048, 1408

    def __init__(self, dtype: torch.dtype) -> None:
        self.up = dense(torch.randn(self.intermediate, self.hidden).to(dtype) * 0.02)
        self.down = dense(torch.randn(self.hidden, self.intermediate).to(dtype) * 0.02)

    def expert(self, index: int) -> tuple[Weight, Weight, Weight]:
        return self.up, self.up, self.down


def routed(facts: Facts, dtype: torch.dtype) -> None:
    source, top_k = Source(dtype), 6
    choices = {
        t: [torch.stack([torch.randperm(64)[:top_k] for _ in range(t)]).int() for _ in range(8)]
        for t in (1, 4, 8, 16, 64, 512)
    }
    for kernel_type in (
        experts.ExpertsNative,
        experts.ExpertsPrepacked,
        ref_moe.ReferenceExperts,
    ):
        kernel = kernel_type(facts)
        packed = kernel.pack(source, facts)
        for tokens, ids in choices.items():
            x, weights = torch.randn(tokens, 2048).to(dtype), torch.rand(tokens, top_k)
            turn = iter(range(1 << 30))
            spent = best(lambda: kernel.apply(x, weights, ids[next(turn) % 8], packed))  # noqa: B023
            read = sum(len(i.unique()) for i in ids) / 8 * 3 * 2048 * 1408 * dtype.itemsize
            show(f"experts {facts.dtype} tokens={tokens}", {kernel.tag: spent}, read)


def attentions(facts: Facts, dtype: torch.dtype) -> None:
    for rows, length in ((1, 128), (1, 1024), (4, 1024)):
        pages = -(-length // 16)
        cache = torch.randn(rows * pages, 16, 576).to(dtype)
        table = torch.randperm(rows * pages).int().view(rows, pages)
        q = torch.randn(rows, 16, 576).to(dtype)
        lens = (length,) * rows
        part = DecodePart(table, torch.tensor(lens, dtype=torch.int32), lens)
        none = torch.empty(0, dtype=torch.int64)
        times = {}
        for kernel_type in (
            attention.MlaDecodeNative,
            attention.MlaDecodeMatmul,
            ref_attention.ReferenceMlaDecode,
        ):
            kernel: Any = kernel_type(facts)
            state = kernel.state(Limits(rows, rows, pages, 16, 16, "cpu"))
            kernel.prepare(state, Batch(none, none, none, none, decode=part))
            times[kernel_type.__name__] = best(lambda: kernel.run(state, q, cache, 0.07))  # noqa: B023
        show(f"mla_decode {facts.dtype} rows={rows} length={length}", times)
    for tokens in (128, 512, 1024):
        q, k, v = (torch.randn(tokens, 16, 128).to(dtype) for _ in "qkv")
        parts = (q, torch.randn(tokens, 16, 64).to(dtype), k, torch.randn(tokens, 64).to(dtype), v)
        segs = Segments((tokens,), torch.tensor([0, tokens], dtype=torch.int32))
        kernels = {
            "native": attention.mha_prefill_native,
            "matmul": attention.mha_prefill_matmul,
            "reference": ref_attention.mha_prefill,
        }
        times = {n: best(lambda: f(*parts, segs, segs, True, 0.07)) for n, f in kernels.items()}  # noqa: B023
        show(f"mha_prefill {facts.dtype} tokens={tokens}", times)


def norms(facts: Facts, dtype: torch.dtype) -> None:
    for rows in (1, 8, 64):
        x, y = (torch.randn(rows, 2048).to(dtype) for _ in range(2))
        weight = torch.rand(2048).to(dtype)
        kernels = {"native": small.add_rms_norm, "reference": ref_norm.add_rms_norm}
        times = {n: best(lambda: f(x, y, weight, 1e-6)) for n, f in kernels.items()}  # noqa: B023
        show(f"add_rms_norm {facts.dtype} {rows}x2048", times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = {part.__name__: part for part in (linears, routed, attentions, norms)}
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", choices=native.runnable())
    parser.add_argument("--only", nargs="+", choices=list(parts), default=list(parts))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    native.choose(args.isa)
    info = CpuPlatform().info()
    print(f"{info.name}, {info.arch}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name in ("bfloat16", "float32"):
        facts = Facts(info, DIMS, dtype=name, kv_dtype=name)
        for part in args.only:
            parts[part](facts, getattr(torch, name))


if __name__ == "__main__":
    main()
