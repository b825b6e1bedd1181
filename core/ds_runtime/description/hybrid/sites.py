"""The sites of layers over several residual streams, read off their structure. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ds_runtime.description.caches import ENTRIES, WINDOW
from ds_runtime.description.tree import (
    ATTENTION,
    EXPERTS,
    INDEXER,
    MLP,
    CompressorNode,
    MixNode,
    MoeNode,
    Ranks,
    StreamBlockNode,
    StreamsTree,
    WindowNode,
    joined,
    made,
    product_site,
    router_site,
)
from ds_runtime.ops.contract import Site


def stream_sites(tree: StreamsTree, ranks: Ranks) -> Iterator[Site]:
    """Of all layers, and of what is between the last one and the head."""
    for block in tree.blocks:
        yield from _block(block, ranks)
    if tree.mix is not None:
        yield _mixing("hc_head", -1, "norm", tree.mix)
        yield Site("rms_norm", -1, "norm")


def _mixing(op: str, layer: int, module: str, *mixes: MixNode) -> Site:
    parts = [part for mix in mixes for part in mix]
    return made(Site(op, layer, module), parts, sum(math.prod(part.shape) for part in parts))


def _block(block: StreamBlockNode, ranks: Ranks) -> Iterator[Site]:
    layer = block.layer
    yield Site("rms_norm", layer, "block")
    yield _mixing("hc_pre", layer, "block", block.mix, block.mlp_mix)
    yield Site("hc_post", layer, "block")
    yield from _attention(block.attention, ranks)
    yield from _moe(block.mlp, ranks)


def _attention(a: WindowNode, ranks: Ranks) -> Iterator[Site]:
    layer, at = a.layer, ATTENTION
    yield from (Site(op, layer, at) for op in ("rms_norm", "norm_rope", "rope_back"))
    yield Site("cache_write", layer, at, group=WINDOW)
    yield Site("window_prefill", layer, at, "prefill", group=WINDOW)
    yield Site("window_decode", layer, at, "decode", group=WINDOW)
    yield from (product_site(p, ranks) for p in (a.query, a.up, a.latent, a.output))
    yield product_site(a.groups, ranks, "grouped_linear")
    if a.compressor is not None:
        yield from _compressor(layer, a.compressor, ranks)
        yield Site("cache_write", layer, a.compressor.place, group=ENTRIES[a.stride])
    if a.indexer is not None:
        yield from (Site(op, layer, INDEXER) for op in ("index_encode", "index_select"))
        yield router_site(a.indexer.weights, layer, INDEXER)
        yield product_site(a.indexer.query, ranks)
        yield from _compressor(layer, a.indexer.compressor, ranks)


def _compressor(layer: int, node: CompressorNode, ranks: Ranks) -> Iterator[Site]:
    yield product_site(node.rows, ranks)
    yield Site("compress_windows", layer, node.place)


def _moe(moe: MoeNode, ranks: Ranks) -> Iterator[Site]:
    layer, one = moe.layer, moe.experts[0]
    yield router_site(moe.router, layer, MLP)
    route = Site("route_softplus", layer, MLP)
    yield route if moe.table is None else made(route, [moe.table], 0)
    form, stored = joined(moe.experts.formats)
    shape = (len(moe.experts), *one.parts[0].local(ranks))
    site = Site("experts_limited", layer, EXPERTS, "any", form, shape, stored=stored)
    yield replace(site, values=3 * math.prod(shape))
    if (shared := moe.shared) is not None:
        yield Site("silu_mul_limited", layer, shared.module)
        yield from (product_site(p, ranks) for p in (shared.gate_up, shared.down))
