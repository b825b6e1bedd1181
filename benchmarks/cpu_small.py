"""The CPU plugin's small ops, and what a decode step spends outside kernels.

    python benchmarks/cpu_small.py [--model demo] [--pin OP=KERNEL] [--no-ops] [--no-record]

One thread. Times are CPU microseconds of the calling thread, so that they hold on a shared machine
too: the best of a fifth of a second per op, the median of 300 steps. `outside` is the same call or
step with kernels that return at once: Python, ctypes and torch's allocations. Rows go to
benchmarks/results/cpu_small.jsonl with machine, versions and commit.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_runtime.config import EngineConfig
from ds_runtime.engine.messages import Submit
from ds_runtime.engine.process.rankspec import RankSpec
from ds_runtime.engine.process.start import start_engine
from ds_runtime.ops.contract import Routing
from ds_runtime.ops.reference import norm as ref_norm
from ds_runtime.ops.reference import sampling as ref_sampling
from ds_runtime.ops.reference.activation import silu_mul as ref_silu_mul
from ds_runtime.ops.reference.attention import dense as ref_attention
from ds_runtime.ops.reference.matrices import linear as ref_linear
from ds_runtime.ops.reference.matrices import moe as ref_moe
from ds_runtime.sampling_params import SamplingParams
from ds_runtime_bench.record import append, environment
from ds_runtime_cpu import native, prologue, routing, sampling, small

RESULTS = Path(__file__).parent / "results" / "cpu_small.jsonl"
# hidden, heads, experts, vocabulary, and how tokens choose: of V2-Lite and of V3
GEOMETRY = {
    "lite": (2048, 16, 64, 102_400, Routing(6, 64)),
    "v3": (7168, 128, 256, 129_280, Routing(8, 256, 8, 4, "sigmoid", "noaux_tc", True, 2.5)),
}
LORA, ROPE, NOPE = 512, 64, 128


class Switch:
    """The native functions, each counted, and with `idle` returning at once.

    To be made before the objects that take functions for good. Costs each call a tenth of a
    microsecond.
    """

    def __init__(self) -> None:
        self.idle, self.count = False, 0
        table = vars(native.calls())
        table["_bound"] = {n: self._guard(f, n) for n, f in table["_bound"].items()}
        table.update({n: self._guard(table[n], n) for n in native.SIGNATURES})
        vars(native.active).clear()

    def _guard(self, function: Callable[..., None], name: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            self.count += 1
            if not self.idle or name.endswith("_memory"):  # those give sizes
                function(*arguments)

        return call

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        self.idle = True
        yield
        self.idle = False


def best(call: Callable[[], Any], seconds: float = 0.2) -> float:
    """Microseconds of one call."""
    call()
    begin = time.thread_time()
    call()
    count = max(1, int(2e-4 / max(time.thread_time() - begin, 1e-7)))
    end, found = time.perf_counter() + seconds, float("inf")
    while time.perf_counter() < end:
        begin = time.thread_time()
        for _ in range(count):
            call()
        found = min(found, (time.thread_time() - begin) / count)
    return found * 1e6


Case = tuple[str, Callable[..., Any], Callable[..., Any], tuple[Any, ...]]


def cases(shape: str, tokens: int) -> Iterator[Case]:
    """(op, native, reference, arguments)."""
    hidden, heads, experts, vocab, choice = GEOMETRY[shape]
    b16 = torch.bfloat16
    x, residual = (torch.randn(tokens, hidden).to(b16) for _ in range(2))
    weight = torch.rand(hidden).to(b16)
    yield "rms_norm", small.rms_norm, ref_norm.rms_norm, (x, weight, 1e-6)
    yield (
        "add_rms_norm",
        small.add_rms_norm,
        ref_norm.add_rms_norm,
        (x, residual, weight, 1e-6),
    )
    gate_up = torch.randn(tokens, 2 * hidden).to(b16)
    yield "silu_mul", small.silu_mul, ref_silu_mul, (gate_up,)
    yield "quantize_group", small.quantize_group, ref_linear.quantize_group, (x, 128, False)
    q = torch.randn(tokens, heads, NOPE + ROPE).to(b16)
    kv, norm = torch.randn(tokens, LORA + ROPE).to(b16), torch.rand(LORA).to(b16)
    table, at = torch.randn(4096, ROPE), torch.randint(4096, (tokens,))
    slots = torch.arange(tokens)
    for name, dtype in (("mla_prologue", b16), ("mla_prologue fp8", torch.float8_e4m3fn)):
        cache = torch.zeros(tokens // 16 + 1, 16, LORA + ROPE, dtype=dtype)
        arguments = (q, kv, norm, 1e-6, at, table, cache, slots)
        yield name, prologue.mla_prologue, ref_attention.mla_prologue, arguments
    router, logits = torch.randn(experts, hidden), torch.randn(tokens, experts)
    bias = torch.randn(experts) if choice.method == "noaux_tc" else None
    yield "router_logits", routing.router_logits, ref_moe.router_logits, (x, router)
    yield "route", routing.route, ref_moe.route, (logits, bias, choice)
    words = torch.randn(1000, hidden).to(b16)
    yield "embed", small.embed, ref_linear.embed, (torch.randint(1000, (tokens,)), words, 0)
    if tokens <= 8:
        yield from draws(torch.randn(tokens, vocab) * 2.5)


def draws(logits: Tensor) -> Iterator[Case]:
    rows = logits.shape[0]
    one, none = torch.ones(rows), torch.zeros(rows, dtype=torch.int32)
    kinds = {
        "greedy": (one * 0, none, one, one * 0),
        "temperature": (one * 0.8, none, one, one * 0),
        "top-k 50": (one * 0.8, none + 50, one, one * 0),
        "top-p 0.9": (one * 0.8, none, one * 0.9, one * 0),
    }
    for kind, settings in kinds.items():
        arguments = (logits, *settings, torch.rand(rows, dtype=torch.float64))
        yield f"sample, {kind}", sampling.sample, ref_sampling.sample, arguments
    for count in (0, 20):
        arguments = (logits, torch.zeros(rows, dtype=torch.int64), count)
        yield f"logprobs, best {count}", sampling.logprobs, ref_sampling.logprobs, arguments


def ops(switch: Switch) -> list[dict[str, Any]]:
    found = []
    for shape in GEOMETRY:
        for tokens in (1, 8, 512):
            for op, kernel, reference, arguments in cases(shape, tokens):
                row = {
                    "op": op,
                    "shape": shape,
                    "tokens": tokens,
                    "us": best(lambda: kernel(*arguments)),  # noqa: B023
                    "reference_us": best(lambda: reference(*arguments)),  # noqa: B023
                }
                with switch.off():
                    row["outside_us"] = best(lambda: kernel(*arguments), 0.05)  # noqa: B023
                found.append(row)
                print(
                    f"{shape:5} {tokens:4} {op:22} {row['us']:9.1f} us, of which outside "
                    f"{row['outside_us']:4.1f}; reference {row['reference_us']:9.1f}",
                    flush=True,
                )
    return found


def step(model: str, pins: tuple[str, ...], switch: Switch) -> dict[str, Any]:
    """A decode step of one request."""
    config = EngineConfig(model=model, platform="cpu", threads=1, kv_memory=100_000_000, pin=pins)
    engine = start_engine(RankSpec(config, (), (), Path(), 0))
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    engine.submit(Submit(rid="0", prompt=list(range(3, 67)), params=params, seed=0))

    def median(steps: int = 300) -> float:
        times = []
        for _ in range(steps):
            begin = time.thread_time()
            engine.step()
            times.append(time.thread_time() - begin)
        return statistics.median(times) * 1e6

    median(20)
    whole = median()
    switch.count = 0
    engine.step()
    calls = switch.count
    with switch.off():
        median(5)
        outside = median()
    engine.close()
    row = {
        "model": model,
        "pins": pins,
        "layers": engine.assembly.model.layers,
        "step_us": whole,
        "native_calls": calls,
        "outside_us": outside,
    }
    print(
        f"{model}: {whole:.0f} us a step; {outside:.0f} with native kernels that return at once, "
        f"{outside / calls:.1f} for each of {calls} calls"
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--pin", action="append", default=[], help="as of ds-runtime serve")
    parser.add_argument("--no-ops", action="store_true", help="only the step")
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    switch = Switch()
    report = {"bench": "cpu-small", "isa": native.isa_in_use()}
    report["step"] = step(args.model, tuple(args.pin), switch)
    if not args.no_ops:
        report["ops"] = ops(switch)
    report |= environment()
    if not args.no_record:
        append(RESULTS, report)


if __name__ == "__main__":
    main()
