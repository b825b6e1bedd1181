"""Geometry and constants of one model, as everything else reads them. Torch-free.

`description/hf.py` makes a ModelConfig from config.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ds_runtime.errors import ConfigError
from ds_runtime.ops.contract import Dims, Routing


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN rope scaling (arXiv 2309.00071) as DeepSeek configures it.

    mscale: 0 where config.json states mscale_all_dim alone, which then counts for softmax only.
    """

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def multiplier(self, scale: float) -> float:
        """0.1 · scale · ln(factor) + 1, and 1 where factor ≤ 1."""
        return 1.0 if self.factor <= 1.0 else 0.1 * scale * math.log(self.factor) + 1.0


@dataclass(frozen=True, slots=True)
class Indexing:
    """The lightning indexer of sparse attention.

    interleaved: rotates pairs rather than halves. computes: per layer, whether it has an indexer of
    its own. The others attend what the last one before them chose (arXiv 2603.12201). because: the
    key of config.json that says so, with its value.
    """

    heads: int
    dim: int
    top_k: int
    interleaved: bool
    computes: tuple[bool, ...]
    because: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Hybrid:
    """What DeepSeek-V4 has and no model before it: attention of a window and of compressed
    entries, several residual streams, and experts chosen by token id.

    ratios: per layer, how many tokens a compressed entry stands for; 0: there is a window alone.
    window: tokens. theta, yarn: rotation in layers with compressed entries; elsewhere it is the
    model's. groups, o_lora: of the output projection, and the width that each comes down to.
    hashed: how many layers, from the first, choose experts by token id. limit: of what an expert's
    activation multiplies. streams: of the residual, which `rounds` of scaling mix (arXiv
    2512.24880); stream_eps: what is added to their shares.
    """

    ratios: tuple[int, ...]
    window: int
    theta: float
    yarn: Yarn | None
    groups: int
    o_lora: int
    hashed: int
    limit: float
    streams: int
    rounds: int
    stream_eps: float


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry and constants of one checkpoint; names follow the literature."""

    architecture: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    q_lora: int | None
    kv_lora: int
    qk_nope: int
    qk_rope: int
    v_head: int
    intermediate: int
    moe_intermediate: int
    experts: int  # 0: every layer is dense
    shared_experts: int
    first_dense: int
    moe_every: int
    routing: Routing | None
    eps: float
    rope_theta: float
    yarn: Yarn | None
    rope_interleave: bool
    max_positions: int
    tie_embeddings: bool
    mtp_layers: int
    dtype: Literal["bfloat16", "float16", "float32"]
    quantization: Mapping[str, Any]
    eos_tokens: tuple[int, ...]
    indexing: Indexing | None = None  # attention is dense without
    left_over: str = field(default="", compare=False)  # a quantization_config that is not used
    hybrid: Hybrid | None = None  # of DeepSeek-V4, whose latents are keys and values as they are
    expanded: bool = False  # the KV cache holds keys and values of all heads, no latents

    @property
    def qk_head(self) -> int:
        """Width of one query head: nope + rope."""
        return self.qk_nope + self.qk_rope

    @property
    def latent(self) -> int:
        """Cached elements per token and layer: latent + rope key."""
        return self.kv_lora + self.qk_rope

    @property
    def softmax_scale(self) -> float:
        """(nope + rope)^-½, times m(mscale_all_dim)² under YaRN (V2 and V3 reference code)."""
        scale: float = self.qk_head**-0.5
        if self.yarn is not None and self.yarn.mscale_all_dim:
            scale *= self.yarn.multiplier(self.yarn.mscale_all_dim) ** 2
        return scale

    def is_moe(self, layer: int) -> bool:
        """Whether this layer's MLP is routed."""
        return self.experts > 0 and layer >= self.first_dense and layer % self.moe_every == 0

    def has_indexer(self, layer: int) -> bool:
        """Whether this layer chooses the tokens that it attends. Draft layers always do."""
        if self.indexing is None:
            return False
        return layer >= self.layers or self.indexing.computes[layer]

    def dims(self, tp: int = 1, attn_tp: int | None = None, ep: int = 1) -> Dims:
        """Geometry for Facts; heads and expert widths are those of one rank. attn_tp: ranks
        that divide the heads (default: all).
        """
        index: dict[str, int] = {}
        if (i := self.indexing) is not None:
            index = {"index_heads": i.heads, "index_dim": i.dim, "index_topk": i.top_k}
        if (h := self.hybrid) is not None:
            groups = h.groups // (attn_tp or tp)
            index |= {"window": h.window, "o_groups": groups, "o_lora": h.o_lora}
            index |= {"streams": h.streams}
        return Dims(
            {
                **index,
                "hidden": self.hidden,
                "layers": self.layers,
                "heads": self.heads // (attn_tp or tp),
                "q_lora": self.q_lora or 0,
                "kv_lora": self.kv_lora,
                "qk_nope": self.qk_nope,
                "qk_rope": self.qk_rope,
                "v": self.v_head,
                "intermediate": self.intermediate // tp,
                "moe_intermediate": self.moe_intermediate // (tp // ep),
                "experts": self.experts,
                "top_k": self.routing.top_k if self.routing else 0,
                "vocab": self.vocab_size,
            }
        )

    def check_tp(self, tp: int, attn_tp: int | None = None, ep: int = 1) -> None:
        """Raise ConfigError if the model cannot be cut into `tp` ranks, and its heads by
        `attn_tp` (default: all). ep: parts of the experts by number.
        """
        attn_tp = attn_tp or tp
        if (uncut := self._uncut(tp, attn_tp, ep)) is None:
            return
        groups = tp // attn_tp
        each = math.lcm(groups, ep)  # other numbers of ranks with the same --dp and --ep
        others = range(each, groups * self.heads + 1, each)
        fits = [n for n in others if self._uncut(n, n // groups, ep) is None]
        near = [*[n for n in fits if n < tp][-1:], *[n for n in fits if n > tp][:1]]
        remedy = " or ".join(f"--tp {n}" for n in near) or "another --dp or --ep"
        by = "it" if uncut[2] == tp else f"the {uncut[2]} ranks of each --dp group"
        raise ConfigError(
            f"--tp {tp}: {uncut[0]} {uncut[1]} of this model is not divisible by {by}: "
            f"give {remedy}"
        )

    def _uncut(self, tp: int, attn_tp: int, ep: int) -> tuple[str, int, int] | None:
        """The name and size of the first width that does not divide, and by how many ranks."""
        shared = self.shared_experts * self.moe_intermediate
        cuts = [
            ("num_attention_heads", self.heads, attn_tp),
            ("intermediate_size", self.intermediate, tp),
        ]
        if self.hybrid is not None:
            cuts.append(("o_groups", self.hybrid.groups, attn_tp))
        if self.experts:
            cuts += [
                ("moe_intermediate_size", self.moe_intermediate, tp // ep),
                ("shared expert width", shared, attn_tp if ep > 1 else tp),
            ]
        return next((cut for cut in cuts if cut[1] % cut[2]), None)
