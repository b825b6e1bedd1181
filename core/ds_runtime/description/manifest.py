"""Which modules a checkpoint stores, their shapes, and how ranks cut them. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ds_runtime.description.config import ModelConfig

ROWS, COLS = 0, 1
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".prob_output_scale")  # of keys and values
VOCAB = 2  # rows of the vocabulary, of which every rank gets an equal, padded number

FormatOf = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Stored:
    """One module's weight as a checkpoint stores it.

    format: its weight format if it is a Linear that a kernel packs, "" for plain tensors.
    cut: what ranks divide, ROWS, COLS or VOCAB; None if each holds the whole. For routed experts
    `expert` is (layer, index).
    """

    module: str
    shape: tuple[int, ...]
    format: str = ""
    cut: int | None = None
    expert: tuple[int, int] | None = None


def stored_modules(config: ModelConfig, format_of: FormatOf) -> dict[str, Stored]:
    """Every module that the model reads, by its path in the checkpoint."""
    return {s.module: s for s in _all(config, format_of)}


def adaptable_modules(config: ModelConfig) -> dict[str, Stored]:
    """Every Linear that a low-rank adapter may change: all but the routers."""
    found = {
        m: s
        for m, s in stored_modules(config, lambda module: "dense").items()
        if s.format and len(s.shape) == 2
    }
    found.setdefault("lm_head", Stored("lm_head", (config.vocab_size, config.hidden), cut=VOCAB))
    return found


def is_attention(module: str) -> bool:
    """Whether this is a module of attention: whole on every rank that has sequences of its own."""
    return ".self_attn." in module


def _all(c: ModelConfig, format_of: FormatOf) -> Iterator[Stored]:
    yield Stored("model.embed_tokens", (c.vocab_size, c.hidden), cut=VOCAB)
    yield Stored("model.norm", (c.hidden,))
    if not c.tie_embeddings:
        yield Stored("lm_head", (c.vocab_size, c.hidden), format_of("lm_head"), VOCAB)
    for layer in range(c.layers):
        yield from block_modules(c, layer, c.is_moe(layer), c.has_indexer(layer), format_of)


def block_modules(
    c: ModelConfig, layer: int, moe: bool, indexer: bool, format_of: FormatOf
) -> Iterator[Stored]:
    """The modules of one decoder layer, which is layer `layer` of its checkpoint."""
    at = f"model.layers.{layer}"
    yield Stored(f"{at}.input_layernorm", (c.hidden,))
    yield Stored(f"{at}.post_attention_layernorm", (c.hidden,))
    yield from _attention(c, f"{at}.self_attn", format_of)
    if indexer:
        yield from _indexer(c, f"{at}.self_attn.indexer", format_of)
    if moe:
        yield from _moe(c, layer, format_of)
    else:
        yield from _swiglu(c, f"{at}.mlp", c.intermediate, format_of)


def _attention(c: ModelConfig, at: str, format_of: FormatOf) -> Iterator[Stored]:
    def linear(name: str, rows: int, cols: int, cut: int | None) -> Stored:
        module = f"{at}.{name}"
        return Stored(module, (rows, cols), format_of(module), cut)

    if c.q_lora:
        yield linear("q_a_proj", c.q_lora, c.hidden, None)
        yield Stored(f"{at}.q_a_layernorm", (c.q_lora,))
        yield linear("q_b_proj", c.heads * c.qk_head, c.q_lora, ROWS)
    else:
        yield linear("q_proj", c.heads * c.qk_head, c.hidden, ROWS)
    yield linear("kv_a_proj_with_mqa", c.latent, c.hidden, None)
    yield Stored(f"{at}.kv_a_layernorm", (c.kv_lora,))
    yield linear("kv_b_proj", c.heads * (c.qk_nope + c.v_head), c.kv_lora, ROWS)
    yield linear("o_proj", c.hidden, c.heads * c.v_head, COLS)


def _indexer(c: ModelConfig, at: str, format_of: FormatOf) -> Iterator[Stored]:
    assert c.indexing is not None and c.q_lora is not None
    heads, d = c.indexing.heads, c.indexing.dim
    yield Stored(f"{at}.wq_b", (heads * d, c.q_lora), format_of(f"{at}.wq_b"))
    yield Stored(f"{at}.wk", (d, c.hidden), format_of(f"{at}.wk"))
    yield Stored(f"{at}.weights_proj", (heads, c.hidden))
    yield Stored(f"{at}.k_norm", (d,))
    yield Stored(f"{at}.k_norm.bias", (d,))


def _swiglu(
    c: ModelConfig,
    at: str,
    width: int,
    format_of: FormatOf,
    expert: tuple[int, int] | None = None,
) -> Iterator[Stored]:
    for name in ("gate_proj", "up_proj"):
        module = f"{at}.{name}"
        yield Stored(module, (width, c.hidden), format_of(module), ROWS, expert)
    module = f"{at}.down_proj"
    yield Stored(module, (c.hidden, width), format_of(module), COLS, expert)


def _moe(c: ModelConfig, layer: int, format_of: FormatOf) -> Iterator[Stored]:
    at = f"model.layers.{layer}.mlp"
    yield Stored(f"{at}.gate", (c.experts, c.hidden))
    if c.routing is not None and c.routing.method == "noaux_tc":
        yield Stored(f"{at}.gate.e_score_correction_bias", (c.experts,))
    for e in range(c.experts):
        width = c.moe_intermediate
        yield from _swiglu(c, f"{at}.experts.{e}", width, format_of, (layer, e))
    if c.shared_experts:
        width = c.shared_experts * c.moe_intermediate
        yield from _swiglu(c, f"{at}.shared_experts", width, format_of)
