"""What one call of an op must at least move and compute, from its shapes alone. Torch-free.

Every input is read once and every output written once; nothing between them touches memory.
Weights and caches count in the encoding that their format has in memory, scales included, unless a
kernel says that it packs them tighter (`as_read`). A multiply-add is two FLOPs, and so is its
integer counterpart; elementwise ops count about one per arithmetic operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ds_runtime.ops.contract import FP8_GROUPS, Facts, Kernel
from ds_runtime.ops.formats import FORMATS

ITEM_BYTES: Mapping[str, float] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    FP8_GROUPS: 656 / 576,  # scales included, at DeepSeek's widths
}
SCALE, ID = 4, 8  # bytes of a float32 scale, of an int64 id


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes and FLOPs of one call. weights: bytes of weights read; reads: of everything else."""

    weights: float = 0.0
    reads: float = 0.0
    writes: float = 0.0
    flops: float = 0.0

    @property
    def nbytes(self) -> float:
        """All bytes moved."""
        return self.weights + self.reads + self.writes

    def __add__(self, other: Work) -> Work:
        return Work(
            self.weights + other.weights,
            self.reads + other.reads,
            self.writes + other.writes,
            self.flops + other.flops,
        )

    def times(self, n: float) -> Work:
        """The work of n such calls."""
        return Work(self.weights * n, self.reads * n, self.writes * n, self.flops * n)


def matrix_bytes(rows: int, cols: int, fmt: str, dtype: str) -> float:
    """Bytes of a [rows, cols] weight in format `fmt`; "dense" holds the compute dtype."""
    return FORMATS.get(fmt, FORMATS["dense"]).nbytes(rows, cols, int(ITEM_BYTES[dtype]))


def as_read(work: Work, kernel: Kernel, facts: Facts) -> Work:
    """The work with the weights' bytes as `kernel` reads them, where it packs them tighter."""
    share = 1.0 if kernel.reads is None else kernel.reads(facts)
    return replace(work, weights=share * work.weights)


def distinct_experts(experts: int, top_k: int, tokens: int) -> float:
    """How many experts `tokens` tokens reach on average, if routing is even and independent."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def linear(out: int, cols: int, fmt: str, dtype: str, tokens: int) -> Work:
    """Linear.apply: x [tokens, cols] → [tokens, out]."""
    item = ITEM_BYTES[dtype]
    return Work(
        matrix_bytes(out, cols, fmt, dtype) if tokens else 0.0,
        tokens * cols * item,
        tokens * out * item,
        2.0 * tokens * out * cols,
    )


def experts(
    inter: int, hidden: int, fmt: str, dtype: str, tokens: int, top_k: int, distinct: float
) -> Work:
    """Experts.apply: x [tokens, hidden], of which `distinct` experts have some."""
    item = ITEM_BYTES[dtype]
    one = 2 * matrix_bytes(inter, hidden, fmt, dtype) + matrix_bytes(hidden, inter, fmt, dtype)
    return Work(
        distinct * one,
        tokens * hidden * item + tokens * top_k * 8,
        tokens * hidden * item,
        6.0 * tokens * top_k * inter * hidden,
    )


def mla_absorb(
    method: str, heads: int, nope: int, rope_dim: int, v: int, lora: int, dtype: str, tokens: int
) -> Work:
    """MlaAbsorb.apply_q, apply_v or expand, with a weight in the compute dtype."""
    item = ITEM_BYTES[dtype]
    if method == "expand":
        return linear(heads * (nope + v), lora, "dense", dtype, tokens)
    width = {"apply_q": nope, "apply_v": v}[method]
    weight = heads * width * lora * item if tokens else 0
    short, long = tokens * heads * width * item, tokens * heads * lora * item
    reads, writes = (short, long) if method == "apply_q" else (long, short)
    copied = tokens * heads * rope_dim * item if method == "apply_q" else 0
    return Work(weight, reads + copied, writes + copied, 2.0 * tokens * heads * width * lora)


def mla_decode(
    heads: int, lora: int, rope: int, dtype: str, kv_dtype: str, lens: Iterable[int]
) -> Work:
    """MlaDecode.run, one row per sequence of these lengths."""
    tokens, rows = sums(lens)
    item, width = ITEM_BYTES[dtype], lora + rope
    return Work(
        reads=tokens * width * ITEM_BYTES[kv_dtype] + rows * heads * width * item,
        writes=rows * heads * lora * item,
        flops=2.0 * tokens * heads * (width + lora),
    )


def mha_decode(
    heads: int, nope: int, rope: int, v: int, dtype: str, kv_dtype: str, lens: Iterable[int]
) -> Work:
    """MhaDecode.run, one row per sequence of these lengths."""
    tokens, rows = sums(lens)
    item, width = ITEM_BYTES[dtype], heads * (nope + v) + rope
    return Work(
        reads=tokens * width * ITEM_BYTES[kv_dtype] + rows * heads * (nope + rope) * item,
        writes=rows * heads * v * item,
        flops=2.0 * tokens * heads * (nope + rope + v),
    )


def mha_prefill(heads: int, nope: int, rope: int, d_v: int, dtype: str, tokens: int) -> Work:
    """MhaPrefill over the new tokens of one sequence, causal."""
    item = ITEM_BYTES[dtype]
    pairs = tokens * (tokens + 1) / 2
    return Work(
        reads=tokens * (heads * (2 * nope + rope + d_v) + rope) * item,
        writes=tokens * heads * (d_v * item + 4),
        flops=2.0 * pairs * heads * (nope + rope + d_v),
    )


def mha_prefill_quantize(
    heads: int, nope: int, rope: int, d_v: int, dtype: str, tokens: int
) -> Work:
    """MhaPrefillQuantize of one sequence, a group per head."""
    attended = mha_prefill(heads, nope, rope, d_v, dtype, tokens)
    codes = quantize_group(heads * d_v, d_v, dtype, tokens)
    return Work(0, attended.reads, codes.writes, attended.flops + codes.flops)


def merge_state(heads: int, d: int, dtype: str, tokens: int) -> Work:
    """MergeState of two partial results."""
    each = tokens * heads * (d * ITEM_BYTES[dtype] + 4)
    return Work(reads=2 * each, writes=each, flops=4.0 * tokens * heads * d)


def rms_norm(width: int, dtype: str, tokens: int) -> Work:
    """RmsNorm of [tokens, width]."""
    rows = tokens * width * ITEM_BYTES[dtype]
    return Work(width * ITEM_BYTES[dtype] if tokens else 0, rows, rows, 4.0 * tokens * width)


def add_rms_norm(width: int, dtype: str, tokens: int) -> Work:
    """AddRmsNorm of [tokens, width]: two inputs, two outputs."""
    return rms_norm(width, dtype, tokens) + Work(
        reads=tokens * width * ITEM_BYTES[dtype],
        writes=tokens * width * ITEM_BYTES[dtype],
        flops=1.0 * tokens * width,
    )


def rope(heads: int, d: int, dtype: str, tokens: int) -> Work:
    """Rope of q [tokens, heads, d] and k [tokens, d]."""
    values = tokens * (heads + 1) * d
    item = ITEM_BYTES[dtype]
    return Work(
        reads=values * item + tokens * (4 * d + ID), writes=values * item, flops=3.0 * values
    )


def silu_mul(width: int, dtype: str, tokens: int) -> Work:
    """SiluMul of [tokens, 2 · width]."""
    values = tokens * width * ITEM_BYTES[dtype]
    return Work(reads=2 * values, writes=values, flops=5.0 * tokens * width)


def cache_write(width: int, dtype: str, kv_dtype: str, tokens: int) -> Work:
    """CacheWrite of rows of `width` values."""
    rows = tokens * width
    return Work(reads=rows * ITEM_BYTES[dtype] + tokens * ID, writes=rows * ITEM_BYTES[kv_dtype])


def cache_gather(width: int, dtype: str, kv_dtype: str, tokens: int) -> Work:
    """CacheGather of `tokens` cached rows."""
    rows = tokens * width
    return Work(reads=rows * ITEM_BYTES[kv_dtype], writes=rows * ITEM_BYTES[dtype])


def cache_move(width: int, kv_dtype: str, tokens: int) -> Work:
    """CacheMove of `tokens` cached rows."""
    row = tokens * width * ITEM_BYTES[kv_dtype]
    return Work(reads=row + 2 * tokens * ID, writes=row)


def mla_prologue(
    heads: int, lora: int, rope_dim: int, dtype: str, kv_dtype: str, tokens: int
) -> Work:
    """MlaPrologue: of q only the rope columns are read."""
    item, width = ITEM_BYTES[dtype], lora + rope_dim
    q, kv = tokens * heads * rope_dim, tokens * width
    return Work(
        lora * item if tokens else 0,
        (q + kv) * item + tokens * (4 * rope_dim + 2 * ID),
        (q + kv) * item + kv * ITEM_BYTES[kv_dtype],
        4.0 * tokens * lora + 3.0 * tokens * (heads + 1) * rope_dim,
    )


def mla_inputs(dims: Mapping[str, int], fmt: str, dtype: str, tokens: int) -> Work:
    """MlaInputs: its four matmuls. What lies between them stays in the kernel."""
    heads, inner, lora, nope = (dims[k] for k in ("heads", "q_lora", "kv_lora", "qk_nope"))
    first = linear(inner + lora + dims["qk_rope"], dims["hidden"], fmt, dtype, tokens)
    second = linear(heads * (nope + dims["qk_rope"]), inner, fmt, dtype, tokens)
    sizes = heads, nope, dims["qk_rope"], dims["v"], lora
    third = mla_absorb("apply_q", *sizes, dtype, tokens)
    width = heads * (lora + dims["qk_rope"]) + inner + lora + dims["qk_rope"]
    return Work(
        first.weights + second.weights + third.weights,
        tokens * dims["hidden"] * ITEM_BYTES[dtype],
        tokens * width * ITEM_BYTES[dtype],
        first.flops + second.flops + third.flops,
    )


def router_logits(experts: int, hidden: int, dtype: str, tokens: int) -> Work:
    """RouterLogits: a float32 weight, float32 results."""
    return Work(
        experts * hidden * 4 if tokens else 0,
        tokens * hidden * ITEM_BYTES[dtype],
        tokens * experts * 4,
        2.0 * tokens * experts * hidden,
    )


def route(experts: int, top_k: int, tokens: int) -> Work:
    """Route of float32 logits."""
    return Work(reads=tokens * experts * 4, writes=tokens * top_k * 8, flops=4.0 * tokens * experts)


def embed(hidden: int, dtype: str, tokens: int) -> Work:
    """Embed: only the rows that are asked for."""
    row = hidden * ITEM_BYTES[dtype]
    return Work(tokens * row, tokens * ID, tokens * row)


def quantize_group(width: int, group: int, dtype: str, tokens: int) -> Work:
    """QuantizeGroup of [tokens, width]."""
    values = tokens * width
    return Work(
        reads=values * ITEM_BYTES[dtype],
        writes=values + tokens * (width // group) * SCALE,
        flops=3.0 * values,
    )


def rms_norm_quantize(width: int, group: int, dtype: str, tokens: int) -> Work:
    """RmsNormQuantize of [tokens, width]."""
    norm, codes = rms_norm(width, dtype, tokens), quantize_group(width, group, dtype, tokens)
    return Work(norm.weights, norm.reads, codes.writes, norm.flops + codes.flops)


def add_rms_norm_quantize(width: int, group: int, dtype: str, tokens: int) -> Work:
    """AddRmsNormQuantize of [tokens, width]: the sum is written, too."""
    norm, codes = add_rms_norm(width, dtype, tokens), quantize_group(width, group, dtype, tokens)
    writes = codes.writes + tokens * width * ITEM_BYTES[dtype]
    return Work(norm.weights, norm.reads, writes, norm.flops + codes.flops)


def silu_mul_quantize(width: int, group: int, dtype: str, tokens: int) -> Work:
    """SiluMulQuantize of [tokens, 2 · width]."""
    silu, codes = silu_mul(width, dtype, tokens), quantize_group(width, group, dtype, tokens)
    return Work(0, silu.reads, codes.writes, silu.flops + codes.flops)


def sample(vocab: int, tokens: int) -> Work:
    """Sample from float32 logits."""
    return Work(
        reads=tokens * (vocab * 4 + 4 * 4 + 8), writes=tokens * ID, flops=3.0 * tokens * vocab
    )


def lora_delta(out: int, cols: int, rank: int, slots: int, dtype: str, tokens: int) -> Work:
    """LoraDelta of one group, `slots` adapters among the rows."""
    item = ITEM_BYTES[dtype]
    return Work(
        slots * rank * (cols + out) * item if tokens else 0,
        tokens * ((cols + out) * item + 4),
        tokens * out * item,
        2.0 * tokens * rank * (cols + out),
    )


def mask_logits(vocab: int, tokens: int) -> Work:
    """MaskLogits with a mask of its own for every row."""
    words = -(-vocab // 32)
    return Work(reads=tokens * (vocab * 4 + words * 4 + 4), writes=tokens * vocab * 4)


def logprobs(vocab: int, top_n: int, tokens: int) -> Work:
    """Logprobs of one id and `top_n` others per row."""
    return Work(
        reads=tokens * (vocab * 4 + ID),
        writes=tokens * (4 + 12 * top_n),
        flops=3.0 * tokens * vocab,
    )


def sums(lens: Iterable[int]) -> tuple[int, int]:
    counted = Counter(lens)
    return sum(n * times for n, times in counted.items()), sum(counted.values())
