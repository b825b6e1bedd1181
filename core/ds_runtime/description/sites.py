"""The sites of a model: every op at every place, read off its structure. Torch-free.

So `ds-runtime plan` needs no weights. Must agree with `model/*.py`: an op that a layer uses but
that is not listed here raises at its first call.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Literal

from ds_runtime.description.config import ModelConfig
from ds_runtime.description.hybrid.sites import stream_sites
from ds_runtime.description.joins import rewritten
from ds_runtime.description.nextn import NextN
from ds_runtime.description.structure import JOINED_INPUTS, draft_of, model_of
from ds_runtime.description.tree import (
    ATTENTION,
    EMBEDDING,
    EXPERTS,
    INDEXER,
    MLP,
    AttentionNode,
    BlockNode,
    FormatOf,
    IndexerNode,
    LinearNode,
    MoeNode,
    Ranks,
    Stored,
    SwiGluNode,
    joined,
    made,
    product_site,
    router_site,
)
from ds_runtime.ops.contract import DRAFT, Phase, Site

Verify = Literal["", "verify", "tree"]
# Where attention of several tokens per sequence is bound: those of a chain, and of a tree.
VERIFY, TREE = f"{ATTENTION}.verify", f"{ATTENTION}.tree"
INDEXER_TREE = f"{INDEXER}.tree"  # where rows that are nodes of trees choose
INPUTS = f"{ATTENTION}.inputs"  # the fusion of all before attention, where steps only decode
DRAFT_HEAD = "draft_head"  # the site of a copy of the model's head that drafts are drawn by
SAMPLER_OPS = ("mask_logits", "sample", "logprobs")
ONE_RANK = Ranks()
_BLOCK = 128


def model_sites(
    config: ModelConfig,
    format_of: FormatOf,
    ranks: Ranks = ONE_RANK,
    apart: Collection[str] = (),
    adapted: Collection[str] = (),
    verify: Verify = "",
    layers: range | None = None,
    experts: range | None = None,
    alone: bool = False,
) -> list[Site]:
    """All sites of the target model on one of `ranks`.

    format_of: module of the checkpoint → format that is packed. apart: fusions that are not wanted.
    adapted: modules of the checkpoint that have slots for low-rank adapters; of routed experts all
    of a layer, or none. verify: the phase of decode steps with several tokens per sequence, if
    there are such steps. layers, experts: as in `model_of`; where experts are divided by number,
    those of the first rank stand for all by default. alone: every row attends the cache as a
    sequence of its own, those of prompts and of drafts, too.
    """
    model = model_of(config, format_of, layers, experts or first_experts(config, ranks.experts))
    make, sites = _Sites(config, ranks, alone), list[Site]()
    if model.embedding is not None:
        values = math.prod(model.embedding.local(ranks))
        sites.append(made(Site("embed", -1, EMBEDDING), [model.embedding], values))
    if model.streams is not None:
        sites += stream_sites(model.streams, ranks)
    elif model.norm is not None:
        sites.append(Site("add_rms_norm", -1, "norm"))
    for block in model.blocks:
        sites += make.block(rewritten(block, apart, adapted), verify)
        sites += () if adapted or alone else make.mla_inputs(block.attention)
    if model.head is not None:
        sites.append(make.product(model.head))
        # Drafts are drawn within captured steps, and trees are grown there.
        inside = {"verify": {"sample"}, "tree": {"logprobs"}, "": set()}[verify]
        sites += [Site(op, -1, "sampler", captured=op in inside) for op in SAMPLER_OPS]
    return sites + [
        Site("lora_delta", s.layer, s.module, shape=s.shape, count=s.count)
        for s in sites
        if s.op in ("linear", "mla_absorb") and any(name in adapted for name in s.weights)
    ]


def nextn_sites(
    config: ModelConfig,
    nextn: NextN,
    format_of: FormatOf,
    ranks: Ranks = ONE_RANK,
    apart: Collection[str] = (),
    verify: Verify = "verify",
    head: str = "",
    alone: bool = False,
) -> list[Site]:
    """The draft layer's sites on one of `ranks`. format_of: of its own checkpoint's paths. head:
    the format of its copy of the model's head; none: it has no copy. alone: as of the model.
    """
    held, layer = first_experts(config, ranks.experts), config.layers
    draft = draft_of(config, nextn.layer, format_of, held)
    make = _Sites(config, ranks, alone)
    sites = [
        Site("rms_norm", layer, "nextn"),
        Site("add_rms_norm", layer, "nextn"),
        make.product(draft.join),
        *make.block(rewritten(draft.block, apart), "verify"),
        *(make.tree(draft.block.attention) if verify == "tree" else ()),
    ]
    copied = model_of(config, lambda module: head, range(layer, layer)).head
    if head and copied is not None:
        sites.append(make.product(copied._replace(layer=layer, module=DRAFT_HEAD)))
    return [replace(site, role=DRAFT) for site in sites]


def first_experts(config: ModelConfig, ep: int) -> range | None:
    """Those of the first of `ep` ranks, whose sites are those of all; None: there is one."""
    return None if ep == 1 else range(config.experts // ep)


def _quantising(op: str, into: Site, module: str, phase: Phase = "any") -> list[Site]:
    """A fusion with the quantisation in front of a Linear, if that may take activations so."""
    fits = into.weight_format == "fp8_block" and into.shape[1] % _BLOCK == 0
    return [Site(op, into.layer, module, phase)] if fits else []


class _Sites:
    """Lists the sites of the parts of a tree, on one of `ranks`."""

    def __init__(self, config: ModelConfig, ranks: Ranks, alone: bool) -> None:
        self.config, self.ranks, self.alone = config, ranks, alone
        self.sparse = config.indexing is not None
        self.decode = "mha_decode" if config.expanded else "mla_decode"  # where it is dense

    def product(self, linear: LinearNode, op: str = "linear") -> Site:
        return product_site(linear, self.ranks, op)

    def block(self, block: BlockNode, verify: Verify) -> Iterator[Site]:
        layer = block.layer
        yield from (Site("rms_norm", layer, "block"), Site("add_rms_norm", layer, "block"))
        if verify == "verify" and not (self.sparse or self.alone):
            yield Site(self.decode, layer, VERIFY, verify)
        yield from self.attention(block.attention)
        if verify == "tree":
            yield from self.tree(block.attention)
            yield Site("cache_move", layer, TREE)
        yield from self.moe(block.mlp) if isinstance(block.mlp, MoeNode) else self.swiglu(block.mlp)

    def tree(self, a: AttentionNode) -> Iterator[Site]:
        """What attends, or what an indexer chooses by, for rows that are nodes of trees."""
        if not self.sparse:
            yield Site(self.decode, a.layer, TREE, "tree")
        elif a.indexer is not None:
            yield Site("index_scores", a.layer, INDEXER_TREE)
            yield Site("index_topk", a.layer, INDEXER_TREE)

    def attention(self, a: AttentionNode) -> Iterator[Site]:
        c, layer, at = self.config, a.layer, ATTENTION
        yield Site("rms_norm", layer, at)
        writing = ("rope", "cache_write") if c.expanded else ("mla_prologue",)
        yield from (Site(op, layer, at) for op in writing)
        for op in () if self.alone else ("cache_gather", "mha_prefill", "merge_state"):
            yield Site(op, layer, at, "prefill")
        if self.sparse and not self.alone:  # decode always, and long prefill
            yield Site("sparse_prefill", layer, at, "prefill")
        yield Site("sparse_decode" if self.sparse else self.decode, layer, at, "decode")
        yield from self.indexer(a.indexer, layer) if a.indexer is not None else ()
        yield self.product(a.kv_b, "mla_absorb")
        yield (output := self.product(a.output))
        if not (self.sparse or self.alone) and c.v_head == _BLOCK:
            yield from _quantising("mha_prefill_quantize", output, at, "prefill")
        if a.up is not None:
            yield (up := self.product(a.up))
            if a.indexer is None:  # which needs the normed query latent as it is
                yield from _quantising("rms_norm_quantize", up, at)
        for linear in a.inputs:
            yield (site := self.product(linear))
            if linear.module == JOINED_INPUTS and a.indexer is None:  # which reads what is normed
                for op in ("rms_norm_quantize", "add_rms_norm_quantize"):
                    yield from _quantising(op, site, "block")

    def mla_inputs(self, a: AttentionNode) -> Iterator[Site]:
        """Its shape is that of the first projections. Weights of several formats are not joined."""
        if a.up is None or self.config.expanded:
            return
        c, ranks = self.config, self.ranks
        parts = [part for linear in (a.query, a.up, a.latent, a.kv_b) for part in linear.parts]
        form, several = joined(part.format for part in parts)
        shape = (a.query.shape(ranks)[0] + a.latent.shape(ranks)[0], c.hidden)
        rows, cols = a.kv_b.shape(ranks)
        keys = rows // (c.qk_nope + c.v_head) * c.qk_nope * cols  # what it takes of kv_b
        values = math.prod(shape) + math.prod(a.up.shape(ranks)) + keys
        if not several:
            site = Site("mla_inputs", a.layer, INPUTS, "decode", form, shape)
            yield made(site, parts, values)

    def indexer(self, indexer: IndexerNode, layer: int) -> Iterator[Site]:
        yield Site("index_prologue", layer, INDEXER)
        yield Site("index_select", layer, INDEXER)
        yield router_site(indexer.weights, layer, INDEXER)
        yield self.product(indexer.query)

    def moe(self, moe: MoeNode) -> Iterator[Site]:
        layer, count, shared, one = moe.layer, len(moe.experts), moe.shared, moe.experts[0]
        yield router_site(moe.router, layer, MLP)
        yield Site("route", layer, MLP)
        form, stored = joined(moe.experts.formats)
        if moe.single:
            yield Site("silu_mul", layer, EXPERTS)
            for site in map(self.product, (one.gate_up, one.down)):
                every = replace(site, count=count, values=count * site.values)
                yield replace(every, weight_format=form, stored=stored)
        else:
            shape, parts = (count + moe.slots, *one.parts[0].local(self.ranks)), list[Stored]()
            if shared is not None and moe.slots:  # each reads all rows of its columns of down
                parts = [*shared.gate_up.parts, *moe.slots * shared.down.parts]
            site = Site("experts", layer, EXPERTS, "any", form, shape, stored=stored)
            yield made(site, parts, 3 * math.prod(shape))
        if shared is not None and not moe.slots:
            yield from self.swiglu(shared)

    def swiglu(self, mlp: SwiGluNode) -> Iterator[Site]:
        down = self.product(mlp.down)
        yield Site("silu_mul", mlp.layer, mlp.module)
        yield from _quantising("silu_mul_quantize", down, mlp.module)
        yield from (self.product(mlp.gate_up), down)
