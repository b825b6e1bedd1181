"""What a call of an op must at least move and compute, from sizes alone. Torch-free.

Every input is read once and every output written once; nothing between them touches memory.
Weights and caches count in the encoding that their format has in memory, scales included, unless a
kernel says that it packs them tighter. A multiply-add is two FLOPs, and so is its integer
counterpart; elementwise ops count about one per arithmetic operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_runtime.ops.contract import FP8_GROUPS, Facts, Routing
from ds_runtime.ops.declare import OpWork
from ds_runtime.ops.formats import FORMATS

ITEM_BYTES: Mapping[str, float] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int32": 4,
    "int64": 8,
    FP8_GROUPS: 656 / 576,  # scales included, at DeepSeek's widths
}
SCALE, ID = 4, 8  # bytes of a float32 scale, of an int64 id
GROUP = 128  # activations that share a scale, where something is timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a call's work follows from: the facts of its place, and what these do not say.

    width: of rows of a small op. context: cached tokens per sequence. vocab: rows of logits and
    embedding on this rank. held: the format in which the kernel keeps its weight. prompt: of ops
    that choose what a row sees, the rows are those of one sequence, after `context` others of it;
    else each is of a sequence of its own.
    """

    facts: Facts
    width: int = 0
    context: int = 0
    vocab: int = 0
    routing: Routing | None = None
    held: str = "dense"
    prompt: bool = False

    def dims(self, *names: str) -> tuple[int, ...]:
        """These of the model's dims."""
        return tuple(self.facts.dims[name] for name in names)

    def seen(self, rows: int, most: int | None = None) -> float:
        """Tokens that rows see, added up; most: that one attends, if not all."""
        if not self.prompt:
            return rows * (self.context if most is None else min(self.context, most))
        below = rows if most is None else max(0, min(rows, most - self.context))
        whole = 0 if most is None else (rows - below) * most
        return whole + below * self.context + below * (below + 1) / 2

    def cached_rows(self, rows: int) -> int:
        """Rows of the cache that are read for them."""
        if self.prompt:
            return self.context + rows if rows else 0
        return rows * self.context

    @property
    def item(self) -> float:
        """Bytes of a value in the compute dtype."""
        return ITEM_BYTES[self.facts.dtype]

    @property
    def kept(self) -> float:
        """Bytes of a value in the KV cache."""
        return ITEM_BYTES[self.facts.kv_dtype]

    @property
    def cached(self) -> int:
        """Values of a cached token but for its rotated key."""
        return self.facts.dims["kv_lora"]


def matrix_bytes(rows: int, cols: int, fmt: str, dtype: str) -> float:
    """Bytes of a [rows, cols] weight in format `fmt`; "dense" holds the compute dtype."""
    return FORMATS.get(fmt, FORMATS["dense"]).nbytes(rows, cols, int(ITEM_BYTES[dtype]))


def product(s: Sizes, out: int, cols: int, tokens: int) -> OpWork:
    """x [tokens, cols] times a weight: [tokens, out]."""
    return OpWork(
        matrix_bytes(out, cols, s.held, s.facts.dtype) if tokens else 0.0,
        tokens * cols * s.item,
        tokens * out * s.item,
        2.0 * tokens * out * cols,
    )


def rows_of(tokens: int, reads: float, writes: float, flops: float, once: float = 0.0) -> OpWork:
    """Of an op whose rows are each for themselves. reads, writes, flops: of a row; once: bytes that
    all rows read, such as the weight of a norm."""
    return OpWork(0.0, tokens * reads + once, tokens * writes, tokens * flops)


def coded(width: float) -> float:
    """Bytes of a row of FP8 codes with their scales."""
    return width + SCALE * (width // GROUP)


def distinct_experts(experts: int, top_k: int, tokens: int) -> float:
    """How many experts `tokens` tokens reach on average, if routing is even and independent."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def by_vocab(s: Sizes) -> str:
    """Rows of logits."""
    return str(s.vocab)


def by_choice(s: Sizes) -> str:
    """Experts to choose from."""
    return f"{s.routing.num_experts} experts" if s.routing is not None else ""


def by_heads(s: Sizes) -> str:
    """Heads and the widths of queries and values."""
    heads, nope, rope, v = s.dims("heads", "qk_nope", "qk_rope", "v")
    return f"{heads}×({nope}+{rope}, {v})"


def by_index(s: Sizes) -> str:
    """Index heads and their width."""
    return "×".join(map(str, s.dims("index_heads", "index_dim")))


def by_row(s: Sizes) -> str:
    """Latent and rotated key of a cached token."""
    return "({}+{})".format(*s.dims("kv_lora", "qk_rope"))


def by_latent(s: Sizes) -> str:
    """That, for each head."""
    return f"{s.facts.dims['heads']}×{by_row(s)}"
