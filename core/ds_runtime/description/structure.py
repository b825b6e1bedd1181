"""What a model is made of: its weights, layer by layer, under their names. Torch-free.

`model_of` and `draft_of` build a tree from a config, or a part of it: the layers of a stage, the
routed experts of a rank. It is the only description of a model. Read off it are what a checkpoint
must hold and which share a rank has (here), ops (`sites.py`), bytes (`assembly/estimate.py`), and
the layers (`model/`).
"""

from __future__ import annotations

from ds_runtime.description.config import ModelConfig
from ds_runtime.description.hybrid.structure import hybrid_model
from ds_runtime.description.tree import (
    ATTENTION,
    EMBEDDING,
    EXPERTS,
    HEAD,
    HEAD_COLS,
    HEAD_ROWS,
    INDEXER,
    MLP,
    VOCAB,
    AttentionNode,
    Axis,
    BlockNode,
    DraftTree,
    FormatOf,
    IndexerNode,
    Kind,
    LayerMaker,
    LinearNode,
    ModelTree,
    MoeNode,
    Over,
    RoutedExperts,
    Stack,
    Stored,
    SwiGluNode,
    by_name,
)

KV_B = "kv_b_proj"
_TRIO = ("gate_proj", "up_proj", "down_proj")
JOIN = "eh_proj"  # of a draft layer, and of no other
JOINED_INPUTS = f"{ATTENTION}.qkv_a_proj"  # the place of the first projections where they are one
SHARED = (EMBEDDING, "shared_head.head")  # copies of the model's, which a draft layer may have


def model_of(
    config: ModelConfig,
    format_of: FormatOf,
    layers: range | None = None,
    experts: range | None = None,
) -> ModelTree:
    """The tree of a model. layers, experts: those that are there, without a step; None: all."""
    if config.hybrid is not None:
        return hybrid_model(config, format_of, layers, experts)
    layers = range(config.layers) if layers is None else layers
    first, last = layers.start == 0, layers.stop == config.layers
    vocab = (config.vocab_size, config.hidden)
    embedding = Stored(f"model.{EMBEDDING}", vocab, "", VOCAB, "embedding", f"model.{EMBEDDING}")
    norm = Stored("model.norm", (config.hidden,), kind="norm", name="model.norm")
    kind: Kind = "tied" if config.tie_embeddings else "head"
    module = embedding.module if kind == "tied" else HEAD
    head = Stored(module, vocab, format_of(HEAD) if last else "", VOCAB, kind, HEAD)
    return ModelTree(
        embedding=embedding if first else None,
        norm=norm if last else None,
        head=LinearNode(-1, HEAD, (head,)) if last else None,
        blocks=tuple(_Layer(config, format_of, n, n).block(experts) for n in layers),
    )


def draft_of(
    config: ModelConfig, layer: int, format_of: FormatOf, experts: range | None = None
) -> DraftTree:
    """The tree of the draft layer after the model's last. layer: its number in its checkpoint.
    experts: as of a model."""
    make = _Layer(config, format_of, config.layers, layer)
    return DraftTree(
        embedding_norm=make.norm("enorm", config.hidden),
        hidden_norm=make.norm("hnorm", config.hidden),
        norm=make.norm("shared_head.norm", config.hidden),
        join=make.linear(JOIN, config.hidden, 2 * config.hidden),
        block=make.block(experts),
    )


class _Layer(LayerMaker):
    """Makes one layer."""

    def block(self, experts: range | None) -> BlockNode:
        c, routed = self.config, self.config.is_moe(self.number)
        return BlockNode(
            self.number,
            self.norm("input_layernorm", c.hidden),
            self.norm("post_attention_layernorm", c.hidden),
            self.attention(),
            self.moe(experts) if routed else self.swiglu(MLP, c.intermediate),
        )

    def attention(self) -> AttentionNode:
        c, at = self.config, ATTENTION
        queries, norm, up = c.heads * c.qk_head, None, None
        if c.q_lora:
            query = self.linear(f"{at}.q_a_proj", c.q_lora, c.hidden)
            norm = self.norm(f"{at}.q_a_layernorm", c.q_lora)
            up = self.linear(f"{at}.q_b_proj", queries, c.q_lora, HEAD_ROWS, c.qk_head)
        else:
            query = self.linear(f"{at}.q_proj", queries, c.hidden, HEAD_ROWS, c.qk_head)
        latent = self.linear(f"{at}.kv_a_proj_with_mqa", c.latent, c.hidden, rotated=c.latent)
        latent_norm = self.norm(f"{at}.kv_a_layernorm", c.kv_lora)
        both = c.heads * (c.qk_nope + c.v_head)
        kv_b = self.linear(f"{at}.{KV_B}", both, c.kv_lora, HEAD_ROWS)
        output = self.linear(f"{at}.o_proj", c.hidden, c.heads * c.v_head, HEAD_COLS)
        indexer = self.indexer() if c.has_indexer(self.number) else None
        keys = () if indexer is None else (indexer.keys,)
        inputs = (query, *keys, latent)  # the latent's rows may end within a block of scales
        return AttentionNode(
            self.number, query, norm, up, latent, latent_norm, kv_b, output, indexer, inputs
        )

    def indexer(self) -> IndexerNode:
        """Every rank has the whole of it and makes the same choice."""
        c, indexing, at = self.config, self.config.indexing, INDEXER
        assert indexing is not None and c.q_lora is not None
        heads, dim = indexing.heads, indexing.dim
        return IndexerNode(
            self.linear(f"{at}.wq_b", heads * dim, c.q_lora),
            self.linear(f"{at}.wk", dim, c.hidden),
            self.weight(f"{at}.weights_proj", (heads, c.hidden), "plain"),
            self.norm(f"{at}.k_norm", dim),
            self.weight(f"{at}.k_norm.bias", (dim,), "bias"),
        )

    def swiglu(self, place: str, width: int, expert: int | None = None) -> SwiGluNode:
        """expert: the number of a routed one; all of a layer have one place."""
        inner, outer = (width, self.config.hidden), (self.config.hidden, width)
        at, both, below = place, f"{place}.gate_up_proj", f"{place}.down_proj"
        stacks: tuple[Stack | None, ...] = (None, None, None)
        over: Over = "width" if place == MLP else "shared"
        if expert is not None:
            at, stack, over = f"{place}.{expert}", self.stored + both, "expert"
            halves = Stack(stack, expert, 0, 2), Stack(stack, expert, 1, 2)
            stacks = (*halves, Stack(self.stored + below, expert))
        each = zip(_TRIO, (inner, inner, outer), (0, 0, 1), stacks, strict=True)
        gate, up, down = (
            self.weight(f"{at}.{name}", shape, cut=Axis(dim, over), stack=stack)
            for name, shape, dim, stack in each
        )
        products = (
            LinearNode(self.number, both, (gate, up)),
            LinearNode(self.number, below, (down,)),
        )
        return SwiGluNode(self.number, place, *products)

    def expert(self, number: int) -> SwiGluNode:
        return self.swiglu(EXPERTS, self.config.moe_intermediate, number)

    def of_expert(self, number: int) -> tuple[str, ...]:
        return tuple(f"{self.stored}{EXPERTS}.{number}.{name}" for name in _TRIO)

    def moe(self, experts: range | None) -> MoeNode:
        c, correction, shared = self.config, None, None
        router = self.weight(f"{MLP}.gate", (c.experts, c.hidden), "plain")
        if c.routing is not None and c.routing.method == "noaux_tc":
            path = f"{MLP}.gate.e_score_correction_bias"
            correction = self.weight(path, (c.experts,), "correction")
        if c.shared_experts:
            width = c.shared_experts * c.moe_intermediate
            shared = self.swiglu(f"{MLP}.shared_experts", width)
        own = range(c.experts) if experts is None else experts
        assert own, "a rank has routed experts"
        return MoeNode(self.number, router, correction, RoutedExperts(self, own), shared)


def stored_modules(config: ModelConfig, format_of: FormatOf) -> dict[str, Stored]:
    """Every weight of a model, by its path."""
    return by_name(model_of(config, format_of))
