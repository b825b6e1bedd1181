"""Whether calls of which `Compiles.variant` says the same launch the same compilations, for rows up
to a step's most; a program of its own: see launches.py. Shapes are those of V2-Lite, and of V3
whole and divided by 8; weights are memory that nobody reads.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from functools import partial

import launches
import torch

from ds_runtime.api import Dims, Facts, Packed, Segments
from ds_runtime.engine.device.first_steps import representatives
from ds_runtime.ops.contract import load_attr
from ds_runtime_triton import (
    absorb,
    expert_launches,
    experts,
    index,
    linear,
    mha,
    mla,
    quant,
    router,
    sparse,
)
from ds_runtime_triton.blocks import Blocks
from ds_runtime_triton.config import folder, tuned
from ds_runtime_triton.kernels import ALL
from ds_runtime_triton.launch import counters
from ds_runtime_triton.stack import Stack

MOST, PAGE, BF16, FP8 = 8192, 64, torch.bfloat16, torch.float8_e4m3fn
DEVICE = launches.Described().info()
SIZES = {"v2-lite": (2048, 16, 0, 64, 6, 1408, 2), "v3": (7168, 128, 1536, 256, 8, 2048, 1)}
SIZES["v3 of 8"] = (7168, 16, 1536, 256, 8, 256, 1)


def facts_of(name: str) -> Facts:
    hidden, heads, q_lora, count, top_k, inter, _ = SIZES[name]
    dims = {"hidden": hidden, "heads": heads, "q_lora": q_lora, "kv_lora": 512, "qk_nope": 128}
    dims |= {"qk_rope": 64, "v": 128, "experts": count, "top_k": top_k, "moe_intermediate": inter}
    dims |= {"index_heads": 64, "index_dim": 128, "index_topk": 2048}
    kinds = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "index_dtype": "bfloat16"}
    return Facts(DEVICE, Dims(dims), page_size=PAGE, **kinds)


def dense(facts: Facts):
    n, k = facts.shape
    kernel = linear.LinearDense(facts)
    packed = kernel.packed(torch.empty(n, k, dtype=BF16))
    x = torch.empty(MOST, k, dtype=BF16)
    out = partial(torch.empty, dtype=torch.float32)

    def call(rows):
        if not packed.tensors["tuned"].at(rows).get("TORCH"):  # which launches nothing of Triton's
            kernel.apply(x[:rows], packed)
            kernel.apply_float32(x[:rows], packed, out(rows, n))

    return call


def fp8(facts: Facts):
    n, k = facts.shape
    scale = torch.empty(-(-n // 128), -(-k // 128), dtype=torch.float32)
    blocks = Blocks(torch.empty(n, k, dtype=FP8), scale, 128, 128, False)
    sizes = tuned(folder("sm90", "bfloat16"), "linear_fp8", f"N={n},K={k}")
    held = {"dense": None, "blocks": blocks, "arrived": counters(scale), "tuned": sizes}
    kernel, packed = linear.LinearFp8(facts), Packed("triton.linear_fp8", (n, k), held, 0)
    x = torch.empty(MOST, k, dtype=BF16)

    def call(rows):
        kernel.apply(x[:rows], packed)
        if (groups := kernel.quantizes(rows, packed)) is not None:
            q, scales = quant.codes(rows, k, groups.size, x.device)
            kernel.apply_quantized(q, scales, packed)

    return call


def layer(facts: Facts, scaled: bool):
    count, inter, hidden = facts.shape
    tag, dtype, group = ("experts_fp8", FP8, 128) if scaled else ("experts_dense", BF16, 0)
    shapes = (count, 2, inter, hidden), (count, hidden, inter)
    stacks = [
        Stack(
            torch.empty(shape, dtype=dtype),
            torch.empty(*shape[:-2], shape[-2] // 128, shape[-1] // 128),
            group or 1,
            group,
        )
        for shape in shapes
    ]
    sizes = tuned(folder("sm90", "bfloat16"), tag, f"E={count},N={inter},K={hidden}")
    held = {"layer": expert_launches.Layer(*stacks, sizes, counters(stacks[0].scale))}
    kernel = (experts.ExpertsFp8 if scaled else experts.ExpertsDense)(facts)
    packed = Packed(kernel.tag, (count, hidden, inter), held, 0)
    width = experts.pairs_of(facts, 1)
    x, weights = torch.empty(MOST, hidden, dtype=BF16), torch.empty(MOST, width)
    ids = torch.empty(MOST, width, dtype=torch.int32)
    wide = torch.empty(MOST, hidden + 128, dtype=torch.uint8).view(FP8)

    def call(rows):
        kernel.apply(x[:rows], weights[:rows], ids[:rows], packed)
        own = x[: -(-rows // 2)]  # of one of two ranks, which quantise for a call of all rows
        if scaled and (codes := kernel.quantize(rows, own, packed)) is not None:
            scale = torch.empty(rows, codes[1].shape[1] + 16)[:, :-16]
            kernel.apply_quantized(wide[:rows, :hidden], scale, weights[:rows], ids[:rows], packed)

    return call


def absorbed(facts: Facts):
    heads = facts.dims["heads"]
    blocks = Blocks(torch.empty(heads * 256, 512, dtype=BF16), torch.empty(1), 1, 0, False)
    kernel = absorb.MlaAbsorb(facts)
    packed = Packed(kernel.tag, (heads * 256, 512), {"blocks": blocks}, 0)
    q, rope = torch.empty(MOST, heads, 128, dtype=BF16), torch.empty(MOST, heads, 64, dtype=BF16)
    x = torch.empty(MOST, heads, 512, dtype=BF16)

    def call(rows):
        kernel.apply_q(q[:rows], rope[:rows], packed)
        kernel.apply_v(x[:rows], packed)

    return call


def prefill(facts: Facts):
    heads = facts.dims["heads"]
    q, q_rope = torch.empty(MOST, heads, 192, dtype=BF16).split((128, 64), 2)
    kv, k_rope = torch.empty(MOST, heads, 256, dtype=BF16), torch.empty(MOST, 64, dtype=BF16)

    def call(rows):
        cu = torch.empty(2, dtype=torch.int32)
        segments = Segments((rows,), cu)
        k, v = kv[:rows].split((128, 128), 2)
        given = q[:rows], q_rope[:rows], k, k_rope[:rows], v, segments, segments
        for causal in (False, True):
            mha.mha_prefill(*given, causal, 0.1)

    return call


def decode(facts: Facts):
    kernel, heads = mla.MlaDecode(facts), facts.dims["heads"]
    cache = torch.empty(4, PAGE, 576, dtype=BF16)
    q = torch.empty(MOST, heads, 576, dtype=BF16)
    ints = torch.empty(MOST, dtype=torch.int32)

    def call(rows):
        for pages in (1, 16, 17, 2048):  # tables as wide as a step needs
            table = torch.empty(rows, pages, dtype=torch.int32)
            bits = torch.empty(rows, dtype=torch.int64)
            state = mla.DecodeState(table, ints, ints, ints, bits, None, 2048 * PAGE, PAGE)
            kernel.run(state, q[:rows], cache, 0.1)

    return call


def scores(facts: Facts):
    q, cache = torch.empty(MOST, 64, 128, dtype=BF16), torch.empty(4, PAGE, 128, dtype=BF16)
    weights, ints = torch.empty(MOST, 64), torch.empty(MOST, dtype=torch.int32)

    def call(rows):
        for pages in (1, 16, 17):
            table = torch.empty(1, pages, dtype=torch.int32)
            index.index_scores(q[:rows], weights[:rows], cache, table, ints[:rows], ints[:rows])

    return call


def topk(facts: Facts):
    ints = torch.empty(MOST, dtype=torch.int32)

    def call(rows):
        # a table of few pages asks for the first launch alone
        for pages in (1, 17, 65, 130, 400, 2048):
            found = torch.empty(rows, pages * PAGE, dtype=torch.float32)
            table = torch.empty(1, pages, dtype=torch.int32)
            index.index_topk(found, ints[:rows], ints[:rows], table, PAGE, 2048)

    return call


def chosen(facts: Facts):
    q = torch.empty(MOST, facts.dims["heads"], 576, dtype=BF16)
    cache = torch.empty(4, PAGE, 576, dtype=BF16)
    slots = torch.empty(MOST, 2048, dtype=torch.int32)
    return lambda rows: sparse.sparse_mla(q[:rows], cache, slots[:rows], 512, 0.1)


def routed(facts: Facts):
    hidden, count = facts.dims["hidden"], facts.dims["experts"]
    x = torch.empty(MOST, hidden, dtype=BF16)
    weights = [torch.empty(n, hidden, dtype=torch.float32) for n in (count, 64)]
    return lambda rows: [router.router_logits(x[:rows], w) for w in weights]


def quantised(facts: Facts):
    x = torch.empty(MOST, facts.dims["hidden"], dtype=BF16)
    return lambda rows: quant.quantize_group(x[:rows], 128, False)


def places(name: str):
    """(kernel's function, facts, what makes a call)."""
    hidden, heads, q_lora, count, _, inter, shared = SIZES[name]
    facts = facts_of(name)
    shapes = [(hidden, heads * 128), (2 * inter, hidden), (102400, hidden)]
    shapes += [(24576 * heads // 128, q_lora)] if q_lora else [(heads * 192, hidden)]
    for shape in shapes:
        yield "linear:linear_dense", replace(facts, shape=shape), dense
        yield "linear:linear_fp8", replace(facts, shape=shape), fp8
    for slots in (count, count + shared):
        own = replace(facts, shape=(slots, inter, hidden))
        yield "experts:experts_dense", own, partial(layer, scaled=False)
        yield "experts:experts_fp8", own, partial(layer, scaled=True)
    yield "absorb:mla_absorb", facts, absorbed
    yield "mha:mha_prefill", facts, prefill
    yield "mla:mla_decode", facts, decode
    yield "index:index_scores", facts, scores
    yield "index:index_topk", facts, topk
    yield "sparse:sparse_mla", facts, chosen
    yield "router:router_logits", facts, routed
    yield "quant:quantize_group", facts, quantised


def missed(fn: str, facts: Facts, make, rows) -> tuple[list[str], int, int]:
    """(what calls of these numbers of rows compile beyond those of one number per variant; how many
    variants there are; what these compiled)."""
    kernel = next(k for k in ALL if k.fn == f"ds_runtime_triton.{fn}")
    call = make(facts)
    firsts = representatives(
        [(partial(load_attr(kernel.compiles.variant), facts), range(1, MOST + 1))]
    )
    launches.forget()
    for count in firsts:
        call(count)
    known = set(launches.COMPILED)
    near = {count + step for count in firsts for step in (-1, 1)}
    for count in sorted({*rows, *near} - {0, MOST + 1}):
        call(count)
    new = [launches.COMPILED[key] for key in set(launches.COMPILED) - known]
    return sorted(new), len(firsts), len(known)


def main() -> None:
    seed = sys.argv[1]
    rows = range(1, MOST + 1)
    if seed != "all":
        draw = random.Random(int(seed))
        rows = [*range(1, 70), *(draw.randint(70, MOST) for _ in range(60))]
    failed = False
    with launches.recording(zeroed=False), torch.inference_mode():
        for name in SIZES:
            for fn, facts, make in places(name):
                new, variants, known = missed(fn, facts, make, rows)
                print(f"{name} {fn} {facts.shape}: {variants} variants, {known} compilations")
                failed |= bool(new) or variants > 40
                print("".join(f"  not among them: {one}\n" for one in new), end="")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
