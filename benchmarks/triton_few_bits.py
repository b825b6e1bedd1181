"""Experts and linears with weights of few bits, against FP8: times on the accelerator that is here.

python benchmarks/triton_few_bits.py OUT [SECONDS] [KIND[:TOKENS] …]. V3's experts (256 of
7168 × 2048, 8 per token) and its output projection, random codes. Every configuration is compiled
by all cores first (the environment's WORKERS, if it says how many), compared with the product in
float32 of the numbers that the codes mean, and timed in a capture: the median of replays, all
launches of a call counted. One JSON line per configuration goes to OUT; the best are printed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton_problems import OneConfig, facts
from triton_tune import NoDevice, measure

from ds_runtime.ops.weight import Packed
from ds_runtime_triton import coded_experts, expert_launches, experts
from ds_runtime_triton.blocks import Blocks
from ds_runtime_triton.coded import E2M1, E4M3, INT4, Coded, Form, wide_values
from ds_runtime_triton.config import Sizes, tuned
from ds_runtime_triton.launch import counters
from ds_runtime_triton.linear import LinearFp8
from ds_runtime_triton.quant import quantise_by_group
from ds_runtime_triton.stack import Stack
from ds_runtime_triton.weight_only import LinearWeightOnly

E, I, H, TOP_K = 256, 2048, 7168, 8  # noqa: E741
LINEAR = (7168, 16384)
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
_COPIES = 4  # of the linear's weight: more than any chip's cache
Config = dict[str, int]
Run = Callable[[Config], Tensor]

FORMS: dict[str, Callable[[int], Form]] = {
    "w4afp8": lambda cols: Form(INT4, 2, 64, 1, 128, 0, False, cols, 0),
    "int4": lambda cols: Form(INT4, 4, 32, 1, 128, 0, False, cols, 0),
    "mxfp4": lambda cols: Form(E2M1, 4, 32, 4, 32, 7, False, cols, 0),
    "nvfp4": lambda cols: Form(E2M1, 4, 16, 4, 16, 4, False, cols, 0),
    "mxfp8": lambda cols: Form(E4M3, 2, 32, 2, 32, 7, False, cols, 0),
}
TILES = ((64, 4, 4), (64, 4, 6), (128, 4, 3), (128, 4, 4), (128, 4, 6), (128, 8, 4), (256, 8, 3))
FEW = ((64, 4, 4), (128, 4, 3), (128, 4, 4))  # for kinds that are not searched thoroughly


@dataclass(frozen=True)
class Problem:
    """`op` over weights of a kind for so many tokens, and the configurations to try."""

    op: str
    kind: str
    tokens: int
    candidates: tuple[Config, ...]


def config(block_m: int, tile: tuple[int, int, int], **more: int) -> Config:
    """tile: (BLOCK_N, num_warps, num_stages)."""
    names = ("BLOCK_N", "num_warps", "num_stages")
    sides = {"BLOCK_M": block_m, "SWAP": 1, "GROUP": 1, "PTX": 1}
    return {**sides, **dict(zip(names, tile, strict=True)), **more}


def expert_candidates(kind: str, tokens: int) -> Iterator[Config]:
    if tokens > 64:
        for block_m in (32, 64):
            for tile in ((128, 4, 3), (128, 8, 3), (256, 8, 3)):
                yield config(block_m, tile)
        return
    for step in (1, 2):
        for tile in TILES if kind == "w4afp8" and tokens == 32 else FEW:
            yield config(16, tile, STEP=step)


def problems(asked: Sequence[str] = ()) -> Iterator[Problem]:
    """asked: KIND or KIND:TOKENS; none: all."""

    def wanted(kind: str, tokens: int) -> bool:
        return not asked or kind in asked or f"{kind}:{tokens}" in asked

    for kind in FORMS:
        for tokens in (32, 512, 1):
            if wanted(kind, tokens):
                some = tuple(expert_candidates(kind, tokens))
                for op in ("gate_up", "down"):
                    yield Problem(op, kind, tokens, some)
    split = tuple(config(16, t, GROUP=8, SPLIT=s) for t in TILES[:5] for s in (2, 4))
    for kind in ("int4", "nvfp4", "mxfp8"):
        if wanted(kind, 16):
            yield Problem("linear", kind, 16, split)


def random_codes(form: Form, shape: tuple[int, ...], device: str) -> Tensor:
    if device == "cpu":  # kernels are only compiled
        return torch.empty(shape, dtype=form.word)
    if form.word == torch.uint8:
        return torch.empty(shape, dtype=form.word, device=device).random_(0, 256)
    words = torch.empty(shape, dtype=form.word, device=device).random_(-(1 << 15), 1 << 15)
    return words.bitwise_and_(~0x0808) if form.codes == E4M3 else words  # no NaN


def stack(kind: str, rows: int, cols: int, count: int, device: str) -> coded_experts.CodedStack:
    """One matrix of every expert."""
    form = FORMS[kind](cols)
    row = torch.ones(count, rows if form.by_row else 1, device=device)
    if form.shift:
        low, high = (115, 128) if form.shift == 7 else (176, 220)
        byte = torch.randint(low, high, (count, form.spans, rows), device=device)
        word = torch.int32 if form.planes == 4 else torch.int16
        scale = (byte * (0x01010101 if form.planes == 4 else 0x0101)).to(word)
    else:
        scale = torch.rand(count, form.groups, rows, device=device) * 1e-2
    words = random_codes(form, (count, form.spans, rows, form.width), device)
    zero = torch.zeros(count, 1, dtype=torch.int8, device=device)
    return coded_experts.CodedStack(form, rows, words, scale, zero, row)


def routing(tokens: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """(x, weights, ids) of tokens that choose at random."""
    torch.manual_seed(tokens)
    ids = torch.rand(tokens, E).argsort(1)[:, :TOP_K].int().contiguous()
    x = torch.randn(tokens, H).to(BF16)
    return x.to(device), torch.rand(tokens, TOP_K).to(device), ids.to(device)


Made = tuple[Run, int, Callable[[], Tensor]]  # what runs, bytes that it reads, what it should give


def expert_run(problem: Problem, device: str) -> Made:
    """One of the two matmuls, its sort and quantisation included."""
    x, weights, ids = routing(problem.tokens, device)
    pairs, up = ids.numel(), problem.op == "gate_up"
    count = E if device != "cpu" else 2
    held = stack(problem.kind, *((2 * I, H) if up else (H, I)), count, device)
    x = x if up else torch.randn(pairs, I, device=device).to(BF16)
    out = torch.empty(pairs, I if up else H, dtype=BF16, device=device)

    def run(chosen: Config) -> Tensor:
        tiles = experts.Tiles(ids, ids, ids, pairs)
        if problem.tokens > 1:
            tiles = experts.sorted_pairs(ids, E, chosen["BLOCK_M"])
        coded_experts.multiply(x, held, weights, out, tiles, ids, dict(chosen), up)
        return out

    def want() -> Tensor:
        numbers = x.float()
        if problem.kind == "w4afp8":
            q, scale = quantise_by_group(x, 128, False)
            numbers = (q.float().unflatten(1, (-1, 128)) * scale.T[:, :, None]).flatten(1)
        owner, found = ids.flatten(), torch.empty(pairs, out.shape[1], device=device)
        for expert in owner.unique().tolist():
            own = (owner == expert).nonzero()[:, 0]
            y = numbers[own // TOP_K if up else own] @ wide_values(held.one(expert)).T
            gated = F.silu(y[:, ::2]) * y[:, 1::2] if up else y * weights.flatten()[own, None]
            found[own] = gated
        return found

    return run, held.nbytes * int(ids.unique().numel()) // count, want


def linear_run(problem: Problem, device: str) -> Made:
    """All copies of the weight, one after the other; and the bytes of all."""
    count, (n, k) = _COPIES if device != "cpu" else 1, LINEAR
    held = stack(problem.kind, n, k, count, device)
    kernel, x = LinearWeightOnly(facts()), torch.randn(problem.tokens, k, device=device).to(BF16)
    arrived, at = counters(held.words), OneConfig()
    parts: list[Coded] = [held.one(i) for i in range(count)]
    common = {"dense": None, "arrived": arrived, "tuned": at}
    packed = [Packed(kernel.tag, (n, k), {**common, "coded": p}, 0) for p in parts]

    def run(chosen: Config) -> Tensor:
        at.config = chosen
        return [kernel.apply(x, p) for p in packed][-1]

    return run, held.nbytes, lambda: x.float() @ wide_values(parts[-1]).T


def made(problem: Problem, device: str) -> Made:
    return (linear_run if problem.op == "linear" else expert_run)(problem, device)


def _compile(task: tuple[Problem, Config]) -> None:
    """In a process of its own: into Triton's cache, without the device."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(NoDevice(GPUTarget("cuda", 90, 32)))
    JITFunction.__getitem__ = lambda self, grid: (  # type: ignore[method-assign]
        lambda *args, **kwargs: self.run(*args, grid=grid, warmup=True, **kwargs)
    )
    try:
        made(task[0], "cpu")[0](task[1])
    except Exception as e:
        print("compile", task, str(e)[-200:], flush=True)


def compile_all(asked: Sequence[str]) -> None:
    begin, tasks = time.time(), [(p, c) for p in problems(asked) for c in p.candidates]
    workers = int(os.environ.get("WORKERS", os.cpu_count() or 1))
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        list(pool.map(_compile, tasks))
    print(f"{len(tasks)} configurations compiled in {time.time() - begin:.0f} s", flush=True)


def fp8_microseconds() -> Iterator[tuple[str, int, float]]:
    """(op, tokens, microseconds) of the FP8 kernels as they are configured."""

    def codes(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device="cuda").random_(0, 0x70).view(FP8)

    def scales(*shape: int) -> Tensor:
        return torch.rand(shape, device="cuda") * 1e-4

    up = Stack(codes(E, 2, I, H), scales(E, 2, I // 128, H // 128), 128, 128)
    down = Stack(codes(E, H, I), scales(E, H // 128, I // 128), 128, 128)
    sizes = tuned("sm90", "experts_fp8", f"E={E},N={I},K={H}")
    layer = expert_launches.Layer(up, down, sizes, counters(up.values))
    kernel = experts.ExpertsFp8(facts())
    packed = Packed(kernel.tag, (E, H, I), {"layer": layer}, 0)
    for tokens in (1, 32, 512):
        call = partial(kernel.apply, *routing(tokens, "cuda"), packed)
        yield "experts", tokens, measure([lambda _, call=call: call()], {})
    del up, down, layer, packed, call
    n, k = LINEAR
    linear, x = LinearFp8(facts()), torch.randn(16, k, device="cuda").to(BF16)
    at = tuned("sm90", "linear_fp8", f"N={n},K={k}")
    calls: list[Any] = []
    for _ in range(_COPIES):
        blocks = Blocks(codes(n, k), scales(n // 128, k // 128), 128, 128, False)
        tensors = {"dense": None, "blocks": blocks, "arrived": counters(x), "tuned": at}
        held = Packed(linear.tag, (n, k), tensors, 0)
        calls.append(lambda _, held=held: linear.apply(x, held))
    yield "linear", 16, measure(calls, {})


def search(problem: Problem) -> Iterator[dict[str, Any]]:
    """A row per configuration, the fastest first."""
    run, nbytes, reference = made(problem, "cuda")
    want, found = reference(), []
    copies = _COPIES if problem.op == "linear" else 1
    for candidate in problem.candidates:
        try:
            error = float((run(candidate).float() - want).norm() / want.norm())
            found.append((measure([run], candidate) / copies, error, candidate))
        except (OutOfResources, RuntimeError) as e:
            if "CUDA error" in str(e):
                raise
            print("failed", problem.op, candidate, str(e)[-150:].replace("\n", " "), flush=True)
    for us, error, candidate in sorted(found, key=lambda row: row[0]):
        yield {
            "op": problem.op, "weights": problem.kind, "tokens": problem.tokens,
            "microseconds": round(us, 1), "tb_per_s": round(nbytes / copies / us / 1e6, 2),
            "differs": round(error, 5), "config": candidate,
        }  # fmt: skip


def whole(kind: str, tokens: int, up: Config, down: Config) -> float:
    """Microseconds of the experts with the best configuration of each matmul."""
    both = {"DIRECT": int(tokens == 1), "BLOCK_M": up["BLOCK_M"]}
    for prefix, own in (("UP_", up), ("DN_", down)):
        both |= {prefix + name: v for name, v in own.items() if name != "BLOCK_M"}
    stacks = (stack(kind, 2 * I, H, E, "cuda"), stack(kind, H, I, E, "cuda"))
    layer = coded_experts.CodedLayer(*stacks, Sizes((1,), (both,)))
    bound = routing(tokens, "cuda")
    return measure([lambda chosen: coded_experts.run(*bound, layer, chosen)], both)


def main() -> None:
    begin, seconds, asked = time.time(), float((*sys.argv, "600")[2]), sys.argv[3:]
    compile_all(asked)
    device = torch.cuda.get_device_name()
    with open(sys.argv[1], "a") as lines:

        def say(**row: Any) -> None:
            row = {"bench": "triton-few-bits", "device": device, "torch": torch.__version__, **row}
            lines.write(json.dumps(row) + "\n")
            lines.flush()

        fp8 = {}
        for op, tokens, us in fp8_microseconds():
            fp8[op, tokens] = us
            say(op=op, weights="fp8", tokens=tokens, microseconds=round(us, 1))
            print(f"{op} fp8, {tokens} tokens: {us:.1f} us")
        best: dict[str, Config] = {}
        for problem in problems(asked):
            if time.time() - begin > seconds:
                print("out of time at", problem.op, problem.kind, problem.tokens)
                return
            torch.cuda.empty_cache()
            rows = list(search(problem))
            for row in rows:
                say(**row)
            print(json.dumps({k: v for k, v in rows[0].items() if k != "bench"}), flush=True)
            best[problem.op] = rows[0]["config"]
            if problem.op == "down" and best["gate_up"]["BLOCK_M"] == best["down"]["BLOCK_M"]:
                kind, tokens = problem.kind, problem.tokens
                us = whole(kind, tokens, best["gate_up"], best["down"])
                ratio = fp8["experts", tokens] / us
                say(op="experts", weights=kind, tokens=tokens, microseconds=round(us, 1),
                    times_fp8=round(ratio, 2))  # fmt: skip
                print(
                    f"experts {kind}, {tokens} tokens: {us:.1f} us, {ratio:.2f} x FP8", flush=True
                )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
