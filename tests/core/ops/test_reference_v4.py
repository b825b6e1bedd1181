"""References of DeepSeek-V4's ops against transformers' modules and a plain model, and how they
are put together: attention in one pass, in chunks and in steps."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_v4 import Pool, attention, inv_freq, rms, rope
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

from ds_runtime.ops.contract import DeviceInfo, Dims, Facts, Routing
from ds_runtime.ops.dtypes import fp8_vectors
from ds_runtime.ops.reference.attention.cache import cache_write
from ds_runtime.ops.reference.attention.index import index_encode, index_select
from ds_runtime.ops.reference.attention.window import (
    compress_windows,
    norm_rope,
    rope_back,
    window_sparse,
)
from ds_runtime.ops.reference.cases import SampleExperts
from ds_runtime.ops.reference.matrices.limited import ReferenceLimitedExperts, route_softplus
from ds_runtime.ops.reference.matrices.linear import ReferenceGroupedLinear
from ds_runtime.ops.reference.streams import hc_head, hc_post, hc_pre
from ds_runtime.ops.weight import Weight, WeightPart
from examples import examples

HIDDEN, HEADS, HEAD, R, WINDOW, TOP_K = 64, 8, 32, 8, 16, 3
CONFIG = transformers.DeepseekV4Config(
    vocab_size=97, hidden_size=HIDDEN, moe_intermediate_size=24, num_hidden_layers=3,
    num_attention_heads=HEADS, head_dim=HEAD, q_lora_rank=32, num_experts_per_tok=2,
    n_routed_experts=8, compress_ratios=[0, 4, 128], qk_rope_head_dim=R, index_n_heads=16,
    index_head_dim=16, index_topk=TOP_K, o_groups=2, o_lora_rank=16, num_hash_layers=1,
    sliding_window=WINDOW, swiglu_limit=0.5, rope_theta=10000, compress_rope_theta=160000,
    rope_scaling={"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                  "original_max_position_embeddings": 64},
)  # fmt: skip
FACTS = Facts(DeviceInfo("cpu", "", ""), Dims({}), dtype="float64")


def filled(module, seed):
    """Random parameters and buffers, in float64."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in (*module.named_parameters(), *module.named_buffers()):
        if name.endswith("tid2eid"):
            ids = [torch.randperm(8, generator=generator)[:2] for _ in range(len(p))]
            p.data = torch.stack(ids)
        elif "inv_freq" not in name:
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.4
    return module.double().eval()


def normal(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("tokens", [1, 7])
def test_streams_equal_those_of_transformers(tokens):
    module, x = filled(theirs.DeepseekV4HyperConnection(CONFIG), 1), normal(2, 1, tokens, 4, HIDDEN)
    with torch.no_grad():
        post, mix, read = module(x)
    given = module.fn.detach(), module.base.detach(), module.scale.detach()
    got = hc_pre(x[0], *given, 1e-6, 1e-6, 20)
    # They compute in float32 inside.
    for mine, want in zip(got, (read, post, mix), strict=True):
        torch.testing.assert_close(mine, want[0].double().view_as(mine), rtol=2e-5, atol=2e-6)
    y = normal(3, tokens, HIDDEN)
    want = post[0].unsqueeze(-1) * y.unsqueeze(1) + mix[0].transpose(1, 2).double() @ x[0]
    torch.testing.assert_close(hc_post(y, x[0], *got[1:]), want, rtol=2e-5, atol=2e-6)
    head = filled(theirs.DeepseekV4HyperHead(CONFIG), 4)
    with torch.no_grad():
        want = head(x)[0]
    given = head.hc_fn.detach(), head.hc_base.detach(), head.hc_scale.detach()
    mine = hc_head(x[0], *given, 1e-6, 1e-6)
    torch.testing.assert_close(mine, want.double(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("layer", [0, 1], ids=["hashed", "scored"])
def test_experts_equal_the_moe_block_of_transformers(layer):
    CONFIG._experts_implementation = "eager"  # the others know no float64
    moe = filled(theirs.DeepseekV4SparseMoeBlock(CONFIG, layer), layer)
    x, ids = normal(5, 1, 13, HIDDEN), torch.arange(13).unsqueeze(0) % 97
    with torch.no_grad():
        want = (moe(x, input_ids=ids) - moe.shared_experts(x))[0]
    gate = moe.gate
    bias = None if layer == 0 else gate.e_score_correction_bias
    chosen = gate.tid2eid[ids[0]] if layer == 0 else None
    routing = Routing(2, 8, 1, 1, "sqrtsoftplus", "noaux_tc", True, 1.5)
    weights, experts = route_softplus(x[0] @ gate.weight.detach().T, bias, chosen, routing)

    def dense(values):
        values = values.detach()
        return Weight((WeightPart("w", "dense", tuple(values.shape), {"weight": values}),))

    both = zip(moe.experts.gate_up_proj, moe.experts.down_proj, strict=True)
    source = SampleExperts([(dense(b[:24]), dense(b[24:]), dense(down)) for b, down in both])
    made = ReferenceLimitedExperts(FACTS)
    packed = made.pack(source, FACTS)
    got = made.apply(x[0], weights, experts, 0.5, packed)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    silent = made.apply(x[0], weights, experts, 1e9, packed)
    assert (silent - want).abs().max() > 0.1, "the limit is reached"


@pytest.mark.parametrize("tokens", [1, 9])
def test_a_grouped_product_equals_that_of_transformers(tokens):
    module, x = theirs.DeepseekV4GroupedLinear(40, 2 * 16, 2), normal(6, tokens, 2, 40)
    module = filled(module, 7)
    values = module.weight.detach()
    part = WeightPart("w", "dense", tuple(values.shape), {"weight": values})
    made = ReferenceGroupedLinear(FACTS)
    got = made.apply(x, made.pack(Weight((part,)), FACTS))
    with torch.no_grad():
        torch.testing.assert_close(got, module(x[None])[0].flatten(1), rtol=1e-12, atol=1e-12)


def table(freq, positions=400):
    angle = torch.arange(positions).double()[:, None] * freq.double()
    return torch.cat((angle.cos(), angle.sin()), -1)


@pytest.mark.parametrize("group", [0, 64])
def test_rotation_is_of_the_last_dims_and_comes_back(group):
    x, at, freq = normal(8, 6, 3, 96), torch.tensor([0, 5, 5, 399, 2, 1]), inv_freq(R, 1e4)
    weight = normal(9, 96)
    want = rope(rms(x, weight), at, freq)
    got = norm_rope(x, weight, 1e-6, at, table(freq), group)
    torch.testing.assert_close(got[..., -R:], want[..., -R:], rtol=1e-5, atol=1e-5)
    plain = want[..., :-R]
    if group:
        for first, last in ((0, 64), (64, 88)):
            q, scale = fp8_vectors(plain[..., first:last])
            plain[..., first:last] = q.double() * scale.unsqueeze(-1)
    torch.testing.assert_close(got[..., :-R], plain, rtol=1e-5, atol=1e-5)
    back = rope_back(rope(x, at, freq), at, table(freq))
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5)


def cuts(total, data):
    """Sizes of chunks that make up so many tokens."""
    made = []
    while total:
        made.append(min(total, data.draw(st.sampled_from([1, 1, 2, 3, 5, 17, 60]))))
        total -= made[-1]
    return made


@settings(max_examples=examples(25), deadline=None)
@given(st.data(), st.booleans(), st.integers(0, 4), st.integers(0, 99))
def test_compressed_entries_are_the_same_in_any_chunks(data, overlap, undo, seed):
    ratio, total = (4, 45) if overlap else (8, 45)
    width, freq = HEAD * (1 + overlap), inv_freq(R, 160000.0, (16, 64, 32, 1))
    weights = {
        "wkv.weight": normal(seed, width, HIDDEN),
        "wgate.weight": normal(seed + 1, width, HIDDEN),
    }
    weights |= {"ape": normal(seed + 2, ratio, width), "norm.weight": normal(seed + 3, HEAD)}
    x, pool = normal(seed + 4, total, HIDDEN), Pool(ratio, HEAD)
    pool.overlap = overlap
    want = torch.stack(pool.feed(weights, x, torch.arange(total), freq, 1e-6))
    state = torch.full((3, ratio * (1 + overlap) - 1 + undo, 2 * width), torch.nan).double()
    rows = torch.cat((x @ weights["wkv.weight"].T, x @ weights["wgate.weight"].T), 1)
    found, first = [], 0
    for size in cuts(total, data):
        positions = torch.arange(first, first + size)
        again = data.draw(st.integers(0, min(undo, size - 1)))  # rows that are taken back
        for noise in (1.0, 0.0) if again else (0.0,):
            tried = rows[positions].clone()
            tried[size - again :] += noise
            blocks = torch.full((size,), 1)
            made = compress_windows(
                tried, weights["ape"], weights["norm.weight"], 1e-6, positions, table(freq), 0,
                state, blocks,
            )  # fmt: skip
            if noise:
                rest = slice(size - again, size)
                keep = compress_windows(
                    rows[positions][rest], weights["ape"], weights["norm.weight"], 1e-6,
                    positions[rest], table(freq), 0, state, blocks[rest],
                )  # fmt: skip
                made[rest] = keep
                break
        found.append(made[(positions + 1) % ratio == 0])
        first += size
    torch.testing.assert_close(torch.cat(found), want, rtol=1e-5, atol=1e-5)
    assert state[[0, 2]].isnan().all(), "other blocks stay as they are"


class Layer:
    """Attention of a layer by the ops: a window in block 1, pages of 4 entries in any order."""

    def __init__(self, weights, config, layer, mixed, entries=64):
        self.mixed = mixed  # index queries and keys, by the Hadamard matrix: scores stay
        self.w, self.c, self.ratio = weights, config, config["compress_ratios"][layer]
        self.at, c = f"layers.{layer}.attn.", config
        yarn = c["yarn"] if self.ratio else None
        theta = c["compress_rope_theta"] if self.ratio else c["rope_theta"]
        self.freq = inv_freq(R, theta, yarn)
        self.table = table(self.freq)
        self.recent = torch.full((2, WINDOW + 1, HEAD), torch.nan).double()
        order = torch.randperm(entries // 4 + 1, generator=torch.Generator().manual_seed(3))
        self.pages = order[: entries // 4].to(torch.int32).unsqueeze(0)
        self.compressed = torch.full((len(order), 4, HEAD), torch.nan).double()
        self.index = torch.full((len(order), 4, 16), torch.nan).double()
        span = 7 if self.ratio == 4 else max(1, self.ratio - 1)
        overlap = 1 + (self.ratio == 4)
        self.state = torch.full((2, span, 2 * overlap * HEAD), torch.nan).double()
        self.istate = torch.full((2, 7, 64), torch.nan).double()

    def weight(self, name):
        return self.w[self.at + name]

    def entries(self, x, positions, at, state):
        """(entries of windows that close, their slots, −1 where none does)."""
        rows = torch.cat(
            (x @ self.weight(f"{at}wkv.weight").T, x @ self.weight(f"{at}wgate.weight").T), 1
        )
        made = compress_windows(
            rows, self.weight(f"{at}ape"), self.weight(f"{at}norm.weight"), 1e-6, positions,
            self.table, 0, state, torch.ones_like(positions),
        )  # fmt: skip
        entry = positions // self.ratio
        slots = self.pages[0].long()[entry // 4] * 4 + entry % 4
        closing = (positions + 1) % self.ratio == 0
        return made, slots.where(closing, -1)

    def slots(self, x, latent, positions):
        seen = (positions + 1) // self.ratio
        owners = torch.zeros_like(positions, dtype=torch.int32)
        if self.ratio != 4:
            n = int(seen.max())
            each = torch.arange(n)
            made = self.pages[0].long()[each // 4] * 4 + each % 4
            return made.expand(len(x), n).where(each < seen.unsqueeze(1), -1).int()
        q = (latent @ self.weight("indexer.wq_b.weight").T).view(len(x), 16, 16)
        keys, slots = self.entries(x, positions, "indexer.compressor.", self.istate)
        q, _ = index_encode(q, keys, positions, self.table, self.mixed, self.index, slots)
        shares = (x @ self.weight("indexer.weights_proj.weight").T) * 16**-1.0
        return index_select(q, shares, self.index, self.pages, owners, seen.int(), TOP_K)

    def __call__(self, x, positions):
        c, norm = self.c, self.weight
        latent = rms(x @ norm("wq_a.weight").T, norm("q_norm.weight"))
        q = (latent @ norm("wq_b.weight").T).view(len(x), HEADS, HEAD)
        q = norm_rope(q, None, 1e-6, positions, self.table, 0)
        kv = (x @ norm("wkv.weight").T).unsqueeze(1)
        kv = norm_rope(kv, norm("kv_norm.weight"), 1e-6, positions, self.table, 0).squeeze(1)
        slots = torch.empty(len(x), 0, dtype=torch.int32)
        if self.ratio:
            made, at = self.entries(x, positions, "compressor.", self.state)
            cache_write(self.compressed, made[:, :-R], made[:, -R:], at)
            slots = self.slots(x, latent, positions)
        blocks, entries = torch.ones_like(positions), self.recent.shape[1]

        def attend(own):
            o, _ = window_sparse(
                q, norm("attn_sink"), own, self.recent, positions, blocks, WINDOW,
                self.compressed, slots, HEAD**-0.5,
            )  # fmt: skip
            return o

        o = attend(kv) if len(x) > 1 else None
        last = slice(-entries, None)
        at = entries + positions[last] % entries
        cache_write(self.recent, kv[last, :-R], kv[last, -R:], at)
        o = attend(None) if o is None else o  # a step reads its own row from the cache
        o = rope_back(o, positions, self.table).view(len(x), c["o_groups"], -1)
        made = ReferenceGroupedLinear(FACTS)
        values = norm("wo_a.weight")
        part = WeightPart("w", "dense", tuple(values.shape), {"weight": values})
        return made.apply(o, made.pack(Weight((part,)), FACTS)) @ norm("wo_b.weight").T


def plain():
    """(weights, config) of the plain model's attention."""
    config = {
        "compress_ratios": [0, 4, 128], "num_hidden_layers": 3, "head_dim": HEAD,
        "index_head_dim": 16, "qk_rope_head_dim": R, "compress_rope_theta": 160000.0,
        "rope_theta": 10000.0, "yarn": (16, 64, 32, 1), "num_attention_heads": HEADS,
        "rms_norm_eps": 1e-6, "sliding_window": WINDOW, "index_n_heads": 16, "index_topk": TOP_K,
        "o_groups": 2, "o_lora_rank": 16, "hc_mult": 4,
    }  # fmt: skip
    shapes = {
        "wq_a.weight": (32, HIDDEN), "wq_b.weight": (HEADS * HEAD, 32),
        "wkv.weight": (HEAD, HIDDEN),
        "wo_a.weight": (32, HEADS * HEAD // 2), "wo_b.weight": (HIDDEN, 32), "q_norm.weight": (32,),
        "kv_norm.weight": (HEAD,), "attn_sink": (HEADS,),
        "indexer.wq_b.weight": (256, 32), "indexer.weights_proj.weight": (16, HIDDEN),
    }  # fmt: skip
    for at, dim in (("compressor.", HEAD), ("indexer.compressor.", 16)):
        shapes[f"{at}norm.weight"] = (dim,)
    weights = {}
    for layer, ratio in enumerate((0, 4, 128)):
        own = dict(shapes)
        for at, dim in (("compressor.", HEAD), ("indexer.compressor.", 16)):
            width = dim * (2 if ratio == 4 else 1)
            own |= {f"{at}{name}.weight": (width, HIDDEN) for name in ("wkv", "wgate")}
            own[f"{at}ape"] = (max(1, ratio), width)
        for i, (name, shape) in enumerate(own.items()):
            weights[f"layers.{layer}.attn.{name}"] = normal(100 * layer + i, *shape) * 0.2
    return weights, config


PLAIN = plain()


@cache
def wanted(layer):
    """(inputs, what the plain model makes of them); of the last, beyond its first entry."""
    x = normal(200 + layer, 140 if layer == 2 else 45, HIDDEN)
    return x, attention(*PLAIN, layer, x)


@settings(max_examples=examples(8), deadline=None)
@given(st.data(), st.sampled_from([0, 1, 2]), st.booleans())
def test_attention_by_the_ops_equals_the_plain_model(data, layer, mixed):
    (weights, config), (x, want) = PLAIN, wanted(layer)
    made, found, first = Layer(weights, config, layer, mixed), [], 0
    for size in cuts(len(x), data):
        found.append(made(x[first : first + size], torch.arange(first, first + size)))
        first += size
    torch.testing.assert_close(torch.cat(found), want, rtol=1e-5, atol=1e-5)
