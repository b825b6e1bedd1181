"""What triton_tune.py searches: ops at shapes and sizes, and the configurations to try for each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ds_runtime.ops.batch import Batch, DecodePart, Limits, Segments
from ds_runtime.ops.contract import DeviceInfo, Dims, Facts
from ds_runtime.ops.weight import Packed

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
Config = dict[str, int]
Call = Callable[[Config], Any]
TOKENS = [int(n) for n in os.environ.get("TOKENS", "").split(",") if n]  # of experts; none: all
_TURN_BYTES = 300 << 20  # copies of a weight, together more than any chip's cache
V3_LINEARS = ((2112, 7168), (24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048))
V3_LINEARS += ((36864, 7168), (7168, 18432))
LITE_LINEARS = ((3648, 2048), (2048, 2048), (5632, 2048), (2048, 2816), (21888, 2048))
LITE_LINEARS += ((2048, 10944), (102400, 2048), (129280, 7168))
EXPERTS = {"experts_fp8": ((256, 2048, 7168, 8), (256, 1024, 7168, 8),
                           (256, 512, 7168, 8), (256, 256, 7168, 8)),
           "experts_dense": ((64, 1408, 2048, 6),)}  # fmt: skip


def options(**choices: Any) -> list[Config]:
    """Every combination; a choice is a number or a tuple of them."""
    lists = [v if isinstance(v, tuple) else (v,) for v in choices.values()]
    return [dict(zip(choices, values, strict=True)) for values in product(*lists)]


@dataclass
class Problem:
    """One op at one shape and size. `make(device)` gives a call per copy of the weights."""

    op: str
    shape: str
    size: int
    nbytes: float
    flops: float
    candidates: list[Config]
    make: Callable[[str], list[Call]]
    found: list[tuple[float, Config]] = field(default_factory=list)


def values(device: str, *shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    """Random numbers on the device; nothing at all where kernels are only compiled."""
    if device == "cpu":
        return torch.empty(shape, dtype=dtype)
    if dtype == FP8:
        made = torch.empty(shape, dtype=torch.uint8, device=device)
        return made.random_(0, 0x70).view(FP8)
    return (torch.randn(shape, device=device, dtype=BF16) * scale).to(dtype)


def facts(heads: int = 128, cores: int = 132) -> Facts:
    fast = frozenset({"float32", "bfloat16", "float16", "float8_e4m3fn"})
    device = DeviceInfo("cuda", "tuned", "none", frozenset({"triton"}), fast, cores=cores)
    dims = Dims({"heads": heads, "qk_nope": 128, "qk_rope": 64, "v": 128, "kv_lora": 512})
    return Facts(device, dims, dtype="bfloat16", kv_dtype="bfloat16", page_size=64)


class OneConfig:
    """Stands for Sizes: one configuration, set from outside."""

    def __init__(self) -> None:
        self.config: Config = {}

    def at(self, size: int) -> Config:
        return self.config


def turns(nbytes: float) -> int:
    return max(1, min(16, int(_TURN_BYTES // nbytes)))


def linear_fp8(n: int, k: int, m: int) -> Callable[[str], list[Call]]:
    def make(device: str) -> list[Call]:
        from ds_runtime_triton.blocks import Blocks
        from ds_runtime_triton.linear import LinearFp8, counters

        kernel, x = LinearFp8(facts()), values(device, m, k)

        def one() -> Call:
            at, w = OneConfig(), values(device, n, k, dtype=FP8)
            scale = values(device, -(-n // 128), k // 128, dtype=torch.float32, scale=1e-4)
            blocks = Blocks(w, scale, 128, 128, False)
            tensors = {"dense": None, "blocks": blocks, "arrived": counters(w), "tuned": at}
            packed = Packed(kernel.tag, (n, k), tensors, 0)

            def call(config: Config) -> Tensor:
                at.config = config
                return kernel.apply(x, packed)

            return call

        return [one() for _ in range(turns(n * k))]

    return make


def linear_dense(n: int, k: int, m: int) -> Callable[[str], list[Call]]:
    def make(device: str) -> list[Call]:
        from ds_runtime_triton.linear import LinearDense

        kernel, x = LinearDense(facts()), values(device, m, k)

        def one() -> Call:
            at, packed = OneConfig(), kernel.packed(values(device, n, k, scale=0.02))
            packed.tensors["tuned"] = at

            def call(config: Config) -> Tensor:
                at.config = config
                return kernel.apply(x, packed)

            return call

        return [one() for _ in range(turns(2 * n * k))]

    return make


_held: dict[tuple[Any, ...], Any] = {}  # experts of the last shape: they are large


def experts(fp8: bool, count: int, inter: int, hidden: int, top_k: int, m: int) -> Any:
    def make(device: str) -> list[Call]:
        from ds_runtime_triton.expert_launches import Layer
        from ds_runtime_triton.experts import ExpertsDense, ExpertsFp8
        from ds_runtime_triton.launch import counters
        from ds_runtime_triton.stack import Stack

        key, at = (fp8, count, inter, hidden, device), OneConfig()
        if key not in _held:
            _held.clear()
            wide, low = (count, 2, inter, hidden), (count, hidden, inter)
            if fp8:
                f32, scale = torch.float32, 1e-4
                grids = (
                    (count, 2, inter // 128, hidden // 128),
                    (count, hidden // 128, inter // 128),
                )
                up, down = (values(device, *g, dtype=f32, scale=scale).abs() for g in grids)
                stacks = (
                    Stack(values(device, *wide, dtype=FP8), up, 128, 128),
                    Stack(values(device, *low, dtype=FP8), down, 128, 128),
                )
            else:
                none = torch.empty(1, device=device)
                stacks = tuple(Stack(values(device, *s, scale=0.02), none) for s in (wide, low))
            _held[key] = stacks
        stacks = _held[key]
        layer = Layer(*stacks, at, counters(stacks[0].values))  # type: ignore[arg-type]
        kernel = (ExpertsFp8 if fp8 else ExpertsDense)(facts())
        packed = Packed(kernel.tag, (count, hidden, inter), {"layer": layer}, 0)
        calls = []
        for turn in range(4 if m <= 8 else 1):
            torch.manual_seed(turn)
            order = torch.rand(m, count).argsort(1)[:, :top_k].int().contiguous()
            x, weights, ids = values(device, m, hidden), torch.rand(m, top_k), order
            bound = (x, weights.to(device), ids.to(device))

            def call(config: Config, bound: tuple[Tensor, ...] = bound) -> Tensor:
                at.config = config
                return kernel.apply(*bound, packed)

            calls.append(call)
        return calls

    return make


def decode(heads: int, rows: int, length: int, kv: torch.dtype) -> Callable[[str], list[Call]]:
    def make(device: str) -> list[Call]:
        from ds_runtime_triton.mla import MlaDecode

        kernel, at, pages = MlaDecode(facts(heads)), OneConfig(), length // 64 + 1
        kernel.sizes = at  # type: ignore[assignment]
        state = kernel.state(Limits(rows, rows, 160, 64, heads, torch.device(device)))
        q = values(device, rows, heads, 576)
        if device != "cpu":
            table = torch.randperm(rows * pages).view(rows, pages).int().to(device)
            lens = torch.full((rows,), length, dtype=torch.int32, device=device)
            none = torch.zeros(rows, dtype=torch.int64, device=device)
            part = DecodePart(table, lens, (length,) * rows)
            kernel.prepare(state, Batch(none, none, none, none, part))
        calls = []
        for _ in range(turns(rows * length * 576 * kv.itemsize) if device != "cpu" else 1):
            cache = values(device, rows * pages, 64, 576, dtype=kv)

            def call(config: Config, cache: Tensor = cache) -> Tensor:
                at.config = config
                return kernel.run(state, q, cache, 0.07)

            calls.append(call)
        return calls

    return make


def prefill(heads: int, count: int, length: int, causal: bool) -> Callable[[str], list[Call]]:
    def make(device: str) -> list[Call]:
        from ds_runtime_triton import mha

        total = count * length
        q, both = values(device, total, heads, 192), values(device, total, heads, 256)
        parts = (
            *(q[..., :128], values(device, total, heads, 64)),
            *(both[..., :128], values(device, total, 64), both[..., 128:]),
        )
        cu = torch.arange(count + 1, dtype=torch.int32, device=device) * length
        segs, at = Segments((length,) * count, cu), OneConfig()

        def call(config: Config) -> Tensor:
            at.config = config
            mha.tuned = lambda *_: at  # type: ignore[assignment,return-value]
            return mha.mha_prefill(*parts, segs, segs, causal, 0.07)[0]

        return [call]

    return make


def absorb(heads: int, m: int, fp8: bool) -> Callable[[str], list[Call]]:
    def make(device: str) -> list[Call]:
        from ds_runtime_triton.absorb import MlaAbsorb
        from ds_runtime_triton.blocks import Blocks

        kernel, calls = MlaAbsorb(facts(heads)), []
        q, q_rope = values(device, m, heads, 192).split((128, 64), 2)
        x = values(device, m, heads, 512)
        for _ in range(turns(heads * 256 * 512)):
            w = values(device, heads * 256, 512, dtype=FP8 if fp8 else BF16)
            scale = values(device, heads * 2, 4, dtype=torch.float32, scale=1e-3)
            blocks = Blocks(w, scale, 128 if fp8 else 1, 128 if fp8 else 0, False)
            packed, at = Packed(kernel.tag, (heads * 256, 512), {"blocks": blocks}, 0), OneConfig()

            def call(config: Config, packed: Packed = packed, at: OneConfig = at) -> Tensor:
                at.config = config
                kernel.sizes = at  # type: ignore[assignment]
                up = kernel.apply_q(q, q_rope, packed)
                return torch.cat((up.flatten(), kernel.apply_v(x, packed).flatten()))

            calls.append(call)
        return calls

    return make


def _linear_candidates(m: int, fp8: bool, n: int) -> list[Config]:
    common = {"GROUP": 8} if m <= 128 else {"GROUP": (8, 32)}
    depth: dict[str, Any] = {} if fp8 else {"BLOCK_K": (64, 128)}
    split: Any = 1 if n > 20000 else (1, 2, 4, 8) if n < 8000 else (1, 2)
    narrow = {"SWAP": 1, "SPLIT": split, **common, **depth}
    found: list[Config] = []
    if m <= 16:
        early = {"QUANTISED": (0, 1)} if fp8 else {}
        found = options(BLOCK_M=16, BLOCK_N=(64, 128), **early, **narrow, num_warps=4,
                        num_stages=(4, 6))  # fmt: skip
    elif m <= 32:
        early = {"QUANTISED": 1} if fp8 else {}
        found = options(BLOCK_M=32, BLOCK_N=(64, 128), **early, **narrow, num_warps=4,
                        num_stages=(3, 5))  # fmt: skip
    elif m <= 128:
        early = {"QUANTISED": 1} if fp8 else {}
        size = 64 if m <= 64 else 128
        narrow["SWAP"] = (0, 1)
        found = options(BLOCK_M=size, BLOCK_N=64, **early, **narrow, num_warps=4, num_stages=(3, 4))
        found += options(BLOCK_M=size, BLOCK_N=128, **early, **narrow, num_warps=8,
                         num_stages=(3, 4))  # fmt: skip
    else:
        early = {"QUANTISED": 1} if fp8 else {}
        wide = {"SWAP": 0, "SPLIT": 1, **common, **depth, **early}
        found = options(BLOCK_M=128, BLOCK_N=128, **wide, num_warps=8, num_stages=3)
        found += options(BLOCK_M=64, BLOCK_N=128, **wide, num_warps=4, num_stages=(3, 4))
        found += options(BLOCK_M=64, BLOCK_N=128, **wide, num_warps=4, num_stages=3, maxnreg=168)
        wide["WIDE"] = 1
        found += options(BLOCK_M=128, BLOCK_N=128, **wide, num_warps=8, num_stages=3, maxnreg=128)
        found += options(BLOCK_M=128, BLOCK_N=256, **wide, num_warps=8, num_stages=(3, 4))
        found += options(BLOCK_M=64, BLOCK_N=256, **wide, num_warps=4, num_stages=3)
    return found + ([] if fp8 else [{"TORCH": 1}])


def _expert_candidates(m: int, pairs: int, count: int, fp8: bool, inter: int) -> list[Config]:
    """The two matmuls are varied one after the other: their times add up."""
    depth: dict[str, Any] = {} if fp8 else {"BLOCK_K": (64, 128)}
    each, found = pairs / count, []
    bases = options(DIRECT=1, BLOCK_M=16, SWAP=1, GROUP=1, **depth) if m <= 8 else []
    if m >= 4:
        sizes = (
            (16,) if each <= 4 else (16, 32) if each <= 16 else (32, 64) if each < 64 else (64, 128)
        )
        for size in sizes:
            swap = 1 if size < 64 else (0, 1) if size == 64 else 0
            group = (1, 4) if fp8 else 4
            bases += options(DIRECT=0, BLOCK_M=size, SWAP=swap, GROUP=group, **depth)
    for base in bases:
        many = base["BLOCK_M"] >= 64
        up, down = {"UP_BLOCK_N": 128, "UP_num_stages": 3, "UP_num_warps": 8 if many else 4}, {
            "DN_BLOCK_N": 128, "DN_num_stages": 3, "DN_num_warps": 8 if many else 4
        }  # fmt: skip
        ups = options(UP_BLOCK_N=128 if fp8 else (64, 128), UP_num_stages=(2, 3, 4, 5),
                      UP_num_warps=8 if many else (4, 8))  # fmt: skip
        downs = options(DN_BLOCK_N=(64, 128, 256), DN_num_stages=(3, 4, 5),
                        DN_num_warps=(4, 8) if many else 4)  # fmt: skip
        if m == 1 and fp8:
            small = {"VECTOR": 1, "UP_GROUPS": 8, "UP_BLOCK_N": 4, "UP_num_warps": 1}
            whole = inter // 128  # groups of columns: all of a row at once, or half
            small |= {"DN_GROUPS": whole, "DN_BLOCK_N": 8, "DN_num_warps": 4}
            found += [{**small, **u} for u in options(UP_BLOCK_N=(2, 4, 8), UP_GROUPS=(4, 8, 16),
                                                      UP_num_warps=(1, 2, 4))]  # fmt: skip
            halves = whole // 2, whole
            found += [{**small, **d} for d in options(DN_BLOCK_N=(4, 8, 16), DN_GROUPS=halves,
                                                      DN_num_warps=(1, 2, 4, 8))]  # fmt: skip
        if m == 1:  # narrow tiles: there are few programs otherwise
            downs += options(DN_BLOCK_N=(16, 32), DN_num_stages=(4, 6, 8), DN_num_warps=(1, 2, 4))
            if not fp8:
                ups += options(UP_BLOCK_N=(16, 32), UP_num_stages=(4, 6, 8), UP_num_warps=(1, 2, 4))
        found += [{**base, **u, **down} for u in ups] + [{**base, **up, **d} for d in downs]
    return found


def problems(wanted: set[str]) -> Iterator[Problem]:
    for n, k in V3_LINEARS if "linear_fp8" in wanted else ():
        for m in (1, 8, 32, 64, 128, 512, 4096):
            flops = 2.0 * n * k * m
            some = _linear_candidates(m, True, n)
            yield Problem("linear_fp8", f"N={n},K={k}", m, n * k, flops, some, linear_fp8(n, k, m))
    for n, k in LITE_LINEARS if "linear_dense" in wanted else ():
        for m in (1, 8, 32, 64, 128):
            flops, some = 2.0 * n * k * m, _linear_candidates(m, False, n)
            made = linear_dense(n, k, m)
            yield Problem("linear_dense", f"N={n},K={k}", m, 2 * n * k, flops, some, made)
    for op, shapes in EXPERTS.items():
        for count, inter, hidden, top_k in shapes if op in wanted else ():
            fp8 = op == "experts_fp8"
            for m in (512,) if inter == 256 else (1, 4, 8, 32, 128, 512, 1024, 4096, 16384):
                if TOKENS and m not in TOKENS:
                    continue
                distinct = count * (1 - (1 - top_k / count) ** m)
                nbytes = distinct * 3 * inter * hidden * (1 if fp8 else 2)
                flops = 6.0 * m * top_k * inter * hidden
                shape, some = (
                    f"E={count},N={inter},K={hidden}",
                    _expert_candidates(m, m * top_k, count, fp8, inter),
                )
                made = experts(fp8, count, inter, hidden, top_k, m)
                yield Problem(op, shape, m * top_k, nbytes, flops, some, made)
    if "mla_decode" in wanted:
        apart = {"APART": (0, 1), "num_stages": 2, "WAVES": (1, 2)}
        wide = options(BLOCK_H=64, BLOCK_N=64, SWAP=0, num_warps=8, **apart)
        wide += options(BLOCK_H=64, BLOCK_N=64, SWAP=1, num_warps=8, **apart)
        wide += options(BLOCK_H=32, BLOCK_N=64, SWAP=1, num_warps=(4, 8), **apart)
        wide += options(BLOCK_H=16, BLOCK_N=64, SWAP=1, num_warps=4, **apart)
        few = options(BLOCK_H=16, BLOCK_N=64, SWAP=1, num_warps=(4, 8), **apart)
        few += options(BLOCK_H=16, BLOCK_N=32, SWAP=1, num_warps=4, APART=0, num_stages=(3, 4),
                       WAVES=(1, 2))  # fmt: skip
        few += options(BLOCK_H=16, BLOCK_N=(32, 64), SWAP=0, num_warps=4, APART=0,
                       num_stages=(2, 3), WAVES=(1, 2, 4))  # fmt: skip
        for heads, some in ((128, wide), (16, few)):
            for rows, length in ((1, 600), (8, 600), (32, 600), (64, 600), (128, 600), (32, 8192)):
                nbytes, flops = rows * length * 1152, 2.0 * rows * length * heads * 1088
                made = decode(heads, rows, length, BF16)
                shape = f"H={heads}" + ("" if length < 8192 else " long")
                yield Problem("mla_decode", shape, rows, nbytes, flops, some, made)
    if "mha_prefill" in wanted:
        some = options(BLOCK_M=128, BLOCK_N=(64, 128), SPLIT=(0, 1), num_warps=8, num_stages=(2, 3))
        some += options(BLOCK_M=128, BLOCK_N=32, SPLIT=(0, 1), num_warps=(4, 8), num_stages=3)
        some += options(BLOCK_M=64, BLOCK_N=(32, 64), SPLIT=(0, 1), num_warps=4, num_stages=(2, 3))
        for heads, count, length in ((128, 8, 512), (16, 8, 512), (128, 1, 4096)):
            flops = 2.0 * count * heads * length * length / 2 * 320
            made = prefill(heads, count, length, True)
            nbytes = count * length * heads * 640 * 2
            yield Problem(
                "mha_prefill", f"QK=192,V=128 H={heads}", length, nbytes, flops, some, made
            )
    if "absorb" in wanted:
        for heads, fp8 in ((128, True), (128, False), (16, False)):
            for m in (1, 8, 32, 64, 128, 256):
                size = (16,) if m <= 16 else (32,) if m <= 32 else (64,) if m <= 64 else (64, 128)
                warps = 4 if m <= 64 else (4, 8)
                some = options(BLOCK_M=size, BLOCK_N=(64, 128), BLOCK_K=(64, 128), SWAP=(0, 1),
                               num_warps=warps, num_stages=(1, 2, 3))  # fmt: skip
                nbytes = heads * 256 * 512 * (1 if fp8 else 2)
                flops, made = 4.0 * m * heads * 128 * 512, absorb(heads, m, fp8)
                shape = f"H={heads}" + (" fp8" if fp8 else "")
                yield Problem("absorb", shape, m, nbytes, flops, some, made)
