"""The nodes that a model's tree is made of, and the walk over its weights. Torch-free.

`structure.py` says which trees there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

from ds_runtime.description.config import ModelConfig
from ds_runtime.ops.contract import Site

FormatOf = Callable[[str], str]  # module path in the checkpoint → weight format
# How a weight is stored and held. linear, head, tied: packed by a kernel, as their format says;
# tied is a head whose values are the embedding's. plain: a matrix that no kernel packs. The tensors
# of the others have the module's own name. correction, bias: a vector in float32; numbers: any
# tensor in float32; ids: whole numbers.
Kind = Literal[
    "linear", "head", "tied", "embedding", "norm", "plain", "correction", "bias", "numbers", "ids"
]
Over: TypeAlias = Literal["heads", "width", "expert", "shared", "vocab"]  # see Axis

HEAD, EMBEDDING = "lm_head", "embed_tokens"
HEADS = (HEAD, "head")  # the second: DeepSeek-V4's native name
ATTENTION, MLP = "self_attn", "mlp"
INDEXER = f"{ATTENTION}.indexer"
EXPERTS, SHARED = f"{MLP}.experts", f"{MLP}.shared_experts"
QKV_A, Q_B, DOWN = "qkv_a_proj", "q_b_proj", "down_proj"  # linears that an op feeds
COMPRESSOR = "compressor"  # below attention and its indexer


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
        """How many divide what is cut so. With experts by number the shared ones see the rows of
        a rank's own sequences, as attention does."""
        own = self.heads if self.experts > 1 else self.width
        some = {"heads": self.heads, "shared": own, "expert": self.width // self.experts}
        return some.get(over, self.width)


def padded(size: int, ranks: int) -> int:
    """How many rows each of this many ranks has of a vocabulary; the last ones' are padded."""
    return -(-size // ranks)


class Stack(NamedTuple):
    """Where a weight of a routed expert lies if the checkpoint stacks the experts of a layer. It is
    in matrix `number` of this module, as `part` of the `parts` equal ones that its rows are."""

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
        return self.kind in ("correction", "bias", "numbers", "ids")

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

    def __init__(self, make: LayerMaker, numbers: range) -> None:
        self._make, self._numbers = make, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        return self._make.expert(self._numbers[index])

    @cached_property
    def formats(self) -> frozenset[str]:
        make = self._make
        every = range(make.config.experts)
        return frozenset(make.format_of(m) for e in every for m in make.of_expert(e))


class MoeNode(NamedTuple):
    """Routed experts, and shared ones. table: the experts of every token, where these are not
    chosen by scores. slots: how many slots after the routed experts hold the
    shared ones. single: routed experts are products of their own, for adapters."""

    layer: int
    router: Stored
    correction: Stored | None
    experts: RoutedExperts
    shared: SwiGluNode | None
    slots: int = 0
    single: bool = False
    table: Stored | None = None


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


class MixNode(NamedTuple):
    """How a sublayer, or the head, reads residual streams: numbers of `hc_pre` or `hc_head`."""

    fn: Stored
    base: Stored
    scale: Stored


class CompressorNode(NamedTuple):
    """Rows of tokens → compressed entries. rows: values above scores."""

    place: str
    rows: LinearNode
    ape: Stored
    norm: Stored


class CompressedIndexerNode(NamedTuple):
    """What chooses compressed entries."""

    query: LinearNode
    weights: Stored
    compressor: CompressorNode


class WindowNode(NamedTuple):
    """Attention over a window and compressed entries, of `stride` tokens each (0: there are none).
    query, norm, up: to queries; latent,
    latent_norm: to what is key and value; groups, output: from what heads give, in groups of them.
    """

    layer: int
    stride: int
    query: LinearNode
    norm: Stored
    up: LinearNode
    latent: LinearNode
    latent_norm: Stored
    sink: Stored
    groups: LinearNode
    output: LinearNode
    compressor: CompressorNode | None
    indexer: CompressedIndexerNode | None


class StreamBlockNode(NamedTuple):
    """One decoder layer over several residual streams."""

    layer: int
    mix: MixNode
    norm: Stored
    attention: WindowNode
    mlp_mix: MixNode
    mlp_norm: Stored
    mlp: MoeNode


class StreamsTree(NamedTuple):
    """What a model over several residual streams has: layers, and the head's share of each."""

    blocks: tuple[StreamBlockNode, ...]
    mix: MixNode | None


class ModelTree(NamedTuple):
    """The target model, or those of its layers that one stage has: the first has the embedding,
    the last has the norm and the head. streams: the layers, where the residual has several."""

    embedding: Stored | None
    norm: Stored | None
    head: LinearNode | None
    blocks: tuple[BlockNode, ...]
    streams: StreamsTree | None = None


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


class LayerMaker:
    """Makes weights of one layer. number: in the model, which says of what kind it is; stored: in
    its checkpoint."""

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

    def expert(self, number: int) -> SwiGluNode:
        """One routed expert."""
        raise NotImplementedError

    def of_expert(self, number: int) -> tuple[str, ...]:
        """Paths of its Linears in the checkpoint."""
        raise NotImplementedError


def weights(node: Any) -> Iterator[Stored]:
    """Every weight of a tree or of a part of one, some of them twice. Of a tied head it is the
    embedding, which a stage needs that has no other use for it."""
    if isinstance(node, Stored):
        tied = node.kind == "tied"
        yield node._replace(name=node.module, format="", kind="embedding") if tied else node
    elif isinstance(node, tuple | RoutedExperts):
        for part in node:
            yield from weights(part)


def by_name(tree: ModelTree | DraftTree) -> dict[str, Stored]:
    """Every weight that is read, by its path in the model."""
    return {stored.name: stored for stored in weights(tree)}


def made(site: Site, parts: Sequence[Stored], values: int) -> Site:
    """The site with what it is made from, and how many numbers it holds."""
    return replace(site, weights=tuple(part.name for part in parts), values=values)


def product_site(linear: LinearNode, ranks: Ranks, op: str = "linear") -> Site:
    """Where a product is made, on one of the ranks."""
    form, stored = joined(part.format for part in linear.parts)
    shape = linear.shape(ranks)
    site = Site(op, linear.layer, linear.module, "any", form, shape, stored=stored)
    return made(site, linear.parts, math.prod(shape))


def router_site(stored: Stored, layer: int, module: str) -> Site:
    """Where scores are made by a matrix in float32."""
    return made(Site("router_logits", layer, module), [stored], math.prod(stored.shape))
