"""What a model is made of: its weights, layer by layer, under their names. Torch-free.

`model_of` and `draft_of` build a tree from a config, or a part of it: the layers of a stage, the
routed experts of a rank. It is the only description of a model. Read off it are what a checkpoint
must hold and which share a rank has (here), ops (`sites.py`), bytes (`assembly/estimate.py`), and
the layers (`model/`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

from ds_runtime.description.config import ModelConfig

FormatOf = Callable[[str], str]  # module path in the checkpoint → weight format
# How a weight is stored and held. linear, head, tied: packed by a kernel, as their format says;
# tied is a head whose values are the embedding's. plain: a matrix that no kernel packs. correction,
# bias: a vector in float32 whose tensor has the module's own name.
Kind = Literal["linear", "head", "tied", "embedding", "norm", "plain", "correction", "bias"]
Over: TypeAlias = Literal["heads", "width", "expert", "shared", "vocab"]  # see Axis

HEAD, EMBEDDING = "lm_head", "embed_tokens"
ATTENTION, MLP = "self_attn", "mlp"
INDEXER = f"{ATTENTION}.indexer"
EXPERTS = f"{MLP}.experts"
KV_B = "kv_b_proj"
_TRIO = ("gate_proj", "up_proj", "down_proj")
JOIN = "eh_proj"  # of a draft layer, and of no other
JOINED_INPUTS = f"{ATTENTION}.qkv_a_proj"  # the place of the first projections where they are one
SHARED = (EMBEDDING, "shared_head.head")  # copies of the model's, which a draft layer may have


class Axis(NamedTuple):
    """What ranks divide of a weight. dim: 0 rows, 1 columns. over: heads of attention, the width of
    FFNs, of a routed or of the shared experts, or the vocabulary, which is padded."""

    dim: int
    over: Over


HEAD_ROWS, HEAD_COLS, VOCAB = Axis(0, "heads"), Axis(1, "heads"), Axis(0, "vocab")


class Ranks(NamedTuple):
    """How many ranks divide the width of FFNs and the vocabulary, the heads, and the experts."""

    width: int = 1
    heads: int = 1
    experts: int = 1  # by number

    def of(self, over: str) -> int:
        """How many divide what is cut so. Beside experts by number the shared ones see the rows of
        a rank's own sequences, as attention does."""
        own = self.heads if self.experts > 1 else self.width
        some = {"heads": self.heads, "shared": own, "expert": self.width // self.experts}
        return some.get(over, self.width)


def padded(size: int, ranks: int) -> int:
    """Rows of a vocabulary on each of so many ranks; the last ones' are padded."""
    return -(-size // ranks)


class Stack(NamedTuple):
    """Where a weight of a routed expert lies if the checkpoint stacks the experts of a layer: in
    matrix `number` of this module, as `part` of the `parts` equal ones that its rows are."""

    module: str
    number: int
    part: int = 0
    parts: int = 1


class Stored(NamedTuple):
    """One module's weight, whole. module: its path in the checkpoint; name: its path in the model,
    which is another where a draft layer has a folder of its own.

    format: its weight format if a kernel packs it, else "". cut: what ranks divide; None if each
    holds the whole. rotated: the width of each of its heads, in rows, if their last `qk_rope` are
    rotated; else 0.
    """

    module: str
    shape: tuple[int, ...]
    format: str = ""
    cut: Axis | None = None
    kind: Kind = "linear"
    name: str = ""
    stack: Stack | None = None
    rotated: int = 0

    @property
    def bare(self) -> bool:
        """Whether its tensor has the module's own name."""
        return self.kind in ("correction", "bias")

    def local(self, ranks: Ranks) -> tuple[int, ...]:
        """The shape of one rank's part."""
        if self.cut is None:
            return self.shape
        dim, over = self.cut
        count, size = ranks.of(over), self.shape[dim]
        part = padded(size, count) if over == "vocab" else size // count
        return (*self.shape[:dim], part, *self.shape[dim + 1 :])


class LinearNode(NamedTuple):
    """A product: `parts`, one below the other, are multiplied as one. layer: −1 outside the layers.
    module: the place where it is bound, below its layer."""

    layer: int
    module: str
    parts: tuple[Stored, ...]

    @property
    def format(self) -> str:
        """The format that all parts have; dense where they have several."""
        return joined(part.format for part in self.parts)[0]

    def shape(self, ranks: Ranks) -> tuple[int, int]:
        """(rows, columns) of one rank's part."""
        shapes = [part.local(ranks) for part in self.parts]
        return sum(shape[0] for shape in shapes), shapes[0][1]


class SwiGluNode(NamedTuple):
    """down(silu(gate x) · up x): an MLP, one routed expert, or all shared experts."""

    layer: int
    module: str
    gate_up: LinearNode
    down: LinearNode

    @property
    def parts(self) -> tuple[Stored, ...]:
        """gate, up and down."""
        return (*self.gate_up.parts, *self.down.parts)


class RoutedExperts(Sequence[SwiGluNode]):
    """The routed experts of a layer that are there. Each is made when it is asked for: a model has
    thousands. formats: of the weights of all that the layer has, here or not."""

    def __init__(self, make: _Layer, numbers: range) -> None:
        self._make, self._numbers = make, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        width = self._make.config.moe_intermediate
        return self._make.swiglu(EXPERTS, width, self._numbers[index])

    @cached_property
    def formats(self) -> frozenset[str]:
        at, format_of = self._make.stored + EXPERTS, self._make.format_of
        every = range(self._make.config.experts)
        return frozenset(format_of(f"{at}.{e}.{n}") for e in every for n in _TRIO)


class MoeNode(NamedTuple):
    """Routed experts, and shared ones. slots: how many slots behind the routed experts hold the
    shared ones. single: routed experts are products of their own, for adapters."""

    layer: int
    router: Stored
    correction: Stored | None
    experts: RoutedExperts
    shared: SwiGluNode | None
    slots: int = 0
    single: bool = False


class IndexerNode(NamedTuple):
    """What chooses the tokens that sparse attention reads."""

    query: LinearNode
    keys: LinearNode
    weights: Stored
    norm: Stored
    bias: Stored


class AttentionNode(NamedTuple):
    """query: to the query latent, which `norm` and `up` make queries of, or to the queries where
    there is no such latent. inputs: the products of hidden states, as they are made: a rule may
    join what also stands in the other fields.
    """

    layer: int
    query: LinearNode
    norm: Stored | None
    up: LinearNode | None
    latent: LinearNode
    latent_norm: Stored
    kv_b: LinearNode
    output: LinearNode
    indexer: IndexerNode | None
    inputs: tuple[LinearNode, ...]


class BlockNode(NamedTuple):
    """One decoder layer. layer: its number in the model."""

    layer: int
    norm: Stored
    mlp_norm: Stored
    attention: AttentionNode
    mlp: SwiGluNode | MoeNode


class ModelTree(NamedTuple):
    """The target model, or those of its layers that one stage has: the first has the embedding,
    the last has the norm and the head."""

    embedding: Stored | None
    norm: Stored | None
    head: LinearNode | None
    blocks: tuple[BlockNode, ...]


class DraftTree(NamedTuple):
    """The draft layer (MTP, NextN). Embedding and head are the model's."""

    embedding_norm: Stored
    hidden_norm: Stored
    norm: Stored
    join: LinearNode
    block: BlockNode


def joined(formats: Iterable[str]) -> tuple[str, str]:
    """(format that a weight of several Linears is packed from, what they have if not all that)."""
    found = sorted(set(formats))
    return (found[0], "") if len(found) == 1 else ("dense", " and ".join(found))


def model_of(
    config: ModelConfig,
    format_of: FormatOf,
    layers: range | None = None,
    experts: range | None = None,
) -> ModelTree:
    """The tree of a model. layers, experts: those that are there, without a step; None: all."""
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
    """The tree of the draft layer behind the model's last. layer: its number in its checkpoint.
    experts: as of a model."""
    make = _Layer(config, format_of, config.layers, layer)
    return DraftTree(
        embedding_norm=make.norm("enorm", config.hidden),
        hidden_norm=make.norm("hnorm", config.hidden),
        norm=make.norm("shared_head.norm", config.hidden),
        join=make.linear(JOIN, config.hidden, 2 * config.hidden),
        block=make.block(experts),
    )


class _Layer:
    """Makes one layer. number: in the model, which says of what kind it is; stored: in its
    checkpoint."""

    def __init__(self, config: ModelConfig, format_of: FormatOf, number: int, stored: int) -> None:
        self.config, self.format_of, self.number = config, format_of, number
        self.at, self.stored = f"model.layers.{number}.", f"model.layers.{stored}."

    def weight(
        self, path: str, shape: tuple[int, ...], kind: Kind = "linear", **more: Any
    ) -> Stored:
        module = self.stored + path
        form = self.format_of(module) if kind == "linear" else ""
        return Stored(module, shape, form, kind=kind, name=self.at + path, **more)

    def norm(self, path: str, width: int) -> Stored:
        return self.weight(path, (width,), "norm")

    def linear(
        self, path: str, rows: int, cols: int, cut: Axis | None = None, rotated: int = 0
    ) -> LinearNode:
        part = self.weight(path, (rows, cols), cut=cut, rotated=rotated)
        return LinearNode(self.number, path, (part,))

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


def weights(node: Any) -> Iterator[Stored]:
    """Every weight of a part of a tree, some of them twice. Of a tied head it is the embedding."""
    if isinstance(node, Stored):
        tied = node.kind == "tied"
        yield node._replace(name=node.module, format="", kind="embedding") if tied else node
    elif isinstance(node, tuple | RoutedExperts):
        for part in node:
            yield from weights(part)


def by_name(tree: ModelTree | DraftTree) -> dict[str, Stored]:
    """Every weight that is read, by its path in the model."""
    return {stored.name: stored for stored in weights(tree)}


def stored_modules(config: ModelConfig, format_of: FormatOf) -> dict[str, Stored]:
    """Every weight of a model, by its path."""
    return by_name(model_of(config, format_of))
