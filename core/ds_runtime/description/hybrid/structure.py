"""The weights of DeepSeek-V4, layer by layer, under their native names. Torch-free.

Places, where ops are bound, have the words of the other models; paths in the checkpoint have V4's.
"""

from __future__ import annotations

from typing import Any

from ds_runtime.description.config import ModelConfig
from ds_runtime.description.tree import (
    ATTENTION,
    COMPRESSOR,
    EXPERTS,
    HEAD,
    HEAD_COLS,
    HEAD_ROWS,
    INDEXER,
    MLP,
    VOCAB,
    Axis,
    CompressedIndexerNode,
    CompressorNode,
    FormatOf,
    LayerMaker,
    LinearNode,
    MixNode,
    ModelTree,
    MoeNode,
    Over,
    RoutedExperts,
    Stored,
    StreamBlockNode,
    StreamsTree,
    SwiGluNode,
    WindowNode,
)

_TRIO = ("w1", "w3", "w2")  # gate, up, down
_ATTN, _FFN = "attn", "ffn"
_HEADS = Axis(0, "heads")
DRAFTS = "mtp."  # what weights of draft layers begin with


def native_name(name: str) -> str:
    """The native name of a tensor, which transformers' save_pretrained writes with others in it."""
    name = name.removeprefix("model.").replace("hc_head.hc_", "hc_head_")
    name = name.replace("embed_tokens.", "embed.").replace("lm_head.", "head.")
    return name.replace(f".{_ATTN}.norm.", f".{_ATTN}.kv_norm.")


def hybrid_model(
    config: ModelConfig, format_of: FormatOf, layers: range | None, experts: range | None
) -> ModelTree:
    """As `structure.model_of`."""
    layers = range(config.layers) if layers is None else layers
    first, last = layers.start == 0, layers.stop == config.layers
    vocab = (config.vocab_size, config.hidden)
    embedding = Stored("embed", vocab, "", VOCAB, "embedding", "embed")
    norm = Stored("norm", (config.hidden,), kind="norm", name="norm")
    head = Stored("head", vocab, format_of("head") if last else "", VOCAB, "head", "head")
    assert config.hybrid is not None
    makers = [HybridLayer(config, format_of, n, n) for n in layers]
    streams = config.hybrid.streams
    return ModelTree(
        embedding=embedding if first else None,
        norm=norm if last else None,
        head=LinearNode(-1, HEAD, (head,)) if last else None,
        blocks=(),
        streams=StreamsTree(
            tuple(make.stream_block(experts) for make in makers),
            _mix("hc_head", "hc_head", config, streams, 1) if last else None,
        ),
    )


def _mix(module: str, name: str, config: ModelConfig, rows: int, scales: int) -> MixNode:
    assert config.hybrid is not None
    shapes = ((rows, config.hybrid.streams * config.hidden), (rows,), (scales,))
    return MixNode(
        *(
            Stored(f"{module}_{part}", shape, kind="numbers", name=f"{name}_{part}")
            for part, shape in zip(("fn", "base", "scale"), shapes, strict=True)
        )
    )


class HybridLayer(LayerMaker):
    """Makes one layer."""

    def __init__(self, config: ModelConfig, format_of: FormatOf, number: int, stored: int) -> None:
        super().__init__(config, format_of, number, stored)
        assert config.hybrid is not None
        self.hybrid = config.hybrid
        self.at, self.stored = f"layers.{number}.", f"layers.{stored}."
        self.stride = self.hybrid.ratios[number]

    def product(
        self, place: str, parts: dict[str, tuple[int, int]], cut: Axis | None = None
    ) -> LinearNode:
        """parts: paths below the layer, with their rows and columns."""
        made = (self.weight(path, shape, cut=cut) for path, shape in parts.items())
        return LinearNode(self.number, place, tuple(made))

    def numbers(self, path: str, *shape: int, **more: Any) -> Stored:
        return self.weight(path, shape, "numbers", **more)

    def stream_block(self, experts: range | None) -> StreamBlockNode:
        hidden = self.config.hidden
        return StreamBlockNode(
            self.number,
            self.mix("hc_attn"),
            self.norm("attn_norm", hidden),
            self.attention(),
            self.mix("hc_ffn"),
            self.norm("ffn_norm", hidden),
            self.moe(experts),
        )

    def mix(self, path: str) -> MixNode:
        n = self.hybrid.streams
        return _mix(self.stored + path, self.at + path, self.config, n * (2 + n), 3)

    def attention(self) -> WindowNode:
        c, h, place, at = self.config, self.hybrid, ATTENTION, _ATTN
        assert c.q_lora is not None
        head, inner = c.v_head, h.groups * h.o_lora
        return WindowNode(
            layer=self.number,
            stride=self.stride,
            query=self.product(f"{place}.wq_a", {f"{at}.wq_a": (c.q_lora, c.hidden)}),
            norm=self.norm(f"{at}.q_norm", c.q_lora),
            up=self.product(f"{place}.wq_b", {f"{at}.wq_b": (c.heads * head, c.q_lora)}, HEAD_ROWS),
            latent=self.product(f"{place}.wkv", {f"{at}.wkv": (head, c.hidden)}),
            latent_norm=self.norm(f"{at}.kv_norm", head),
            sink=self.numbers(f"{at}.attn_sink", c.heads, cut=_HEADS),
            groups=self.product(
                f"{place}.wo_a", {f"{at}.wo_a": (inner, c.heads // h.groups * head)}, HEAD_ROWS
            ),
            output=self.product(f"{place}.wo_b", {f"{at}.wo_b": (c.hidden, inner)}, HEAD_COLS),
            compressor=self.compressor(place, at, head) if self.stride else None,
            indexer=self.indexer() if c.has_indexer(self.number) else None,
        )

    def compressor(self, place: str, at: str, head: int) -> CompressorNode:
        """Of the entries of attention, or of index keys. Every rank has the whole of it."""
        width = head * (2 if self.config.has_indexer(self.number) else 1)  # windows overlap
        place, at = f"{place}.{COMPRESSOR}", f"{at}.{COMPRESSOR}"
        shape = (width, self.config.hidden)
        return CompressorNode(
            place,
            self.product(f"{place}.rows", {f"{at}.wkv": shape, f"{at}.wgate": shape}),
            self.numbers(f"{at}.ape", self.stride, width),
            self.norm(f"{at}.norm", head),
        )

    def indexer(self) -> CompressedIndexerNode:
        """Every rank has the whole of it and makes the same choice."""
        c, indexing, at = self.config, self.config.indexing, f"{_ATTN}.indexer"
        assert indexing is not None and c.q_lora is not None
        rows = indexing.heads * indexing.dim
        return CompressedIndexerNode(
            self.product(f"{INDEXER}.wq_b", {f"{at}.wq_b": (rows, c.q_lora)}),
            self.weight(f"{at}.weights_proj", (indexing.heads, c.hidden), "plain"),
            self.compressor(INDEXER, at, indexing.dim),
        )

    def moe(self, experts: range | None) -> MoeNode:
        c, at = self.config, f"{_FFN}.gate"
        assert c.routing is not None
        correction = table = None
        if self.number < self.hybrid.hashed:
            table = self.weight(f"{at}.tid2eid", (c.vocab_size, c.routing.top_k), "ids")
        else:
            correction = self.weight(f"{at}.bias", (c.experts,), "correction")
        own = range(c.experts) if experts is None else experts
        assert own, "a rank has routed experts"
        return MoeNode(
            self.number,
            self.weight(at, (c.experts, c.hidden), "plain"),
            correction,
            RoutedExperts(self, own),
            self._swiglu(f"{MLP}.shared_experts", f"{_FFN}.shared_experts", "shared"),
            table=table,
        )

    def _swiglu(self, place: str, at: str, over: Over) -> SwiGluNode:
        inner, hidden = self.config.moe_intermediate, self.config.hidden
        gate, up, down = (f"{at}.{name}" for name in _TRIO)
        shape = (inner, hidden)
        both = self.product(f"{place}.gate_up_proj", {gate: shape, up: shape}, Axis(0, over))
        below = self.product(f"{place}.down_proj", {down: (hidden, inner)}, Axis(1, over))
        return SwiGluNode(self.number, place, both, below)

    def expert(self, number: int) -> SwiGluNode:
        return self._swiglu(EXPERTS, f"{_FFN}.experts.{number}", "expert")

    def of_expert(self, number: int) -> tuple[str, ...]:
        return tuple(f"{self.stored}{_FFN}.experts.{number}.{name}" for name in _TRIO)
