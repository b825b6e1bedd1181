"""The sites of a model: every op at every place, as the model classes will ask for it.

Torch-free, so that `ds-runtime plan` needs no weights. Must agree with `model/*.py`: an op that a
layer uses but that is not listed here raises at its first call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Literal

from ds_runtime.description.config import ModelConfig
from ds_runtime.ops.contract import Site

FormatOf = Callable[[str], str]  # module path in the checkpoint → format that is packed
Verify = Literal["", "verify", "tree"]
# Where attention of several tokens per sequence is bound: those of a chain, and of a tree.
VERIFY, TREE = "self_attn.verify", "self_attn.tree"


def vocab_rows(config: ModelConfig, tp: int) -> int:
    """Rows of embedding and head per rank; the last rank's are padded with zeros."""
    return -(-config.vocab_size // tp)


INDEXER = "self_attn.indexer"
INDEXER_TREE = f"{INDEXER}.tree"  # where rows that are nodes of trees choose
_WRITING = ("rope", "cache_write")  # what a cache of expanded keys and values needs
MLA_INPUTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
INPUTS = "self_attn.inputs"  # the fusion of all before attention, where steps only decode
SAMPLER_OPS = ("mask_logits", "sample", "logprobs")
# Fusions by joining weights: the first projections of query and latent; that of index keys with
# these; shared experts as slots behind the routed ones.
QKV_A = "qkv_a"
INDEX_KEYS = "index_keys"
SHARED_EXPERTS = "shared_experts"
JOINS = (QKV_A, INDEX_KEYS, SHARED_EXPERTS)
_SLOT_FORMATS = frozenset({"dense", "fp8_block"})  # in which a part of a Linear is one, too
_BLOCK = 128


def model_sites(
    config: ModelConfig,
    format_of: FormatOf,
    tp: int = 1,
    apart: Collection[str] = (),
    adapted: Collection[str] = (),
    verify: Verify = "",
    attention_tp: int | None = None,
) -> list[Site]:
    """All sites of the target model on one of `tp` ranks.

    attention_tp: ranks that divide the heads of attention (default: all). apart: fusions that are
    not wanted. adapted: modules of the checkpoint that have slots for low-rank adapters; of routed
    experts all of a layer, or none. verify: the phase of decode steps with several tokens per
    sequence, if there are such steps.
    """
    sites = [Site("embed", -1, "embed_tokens"), Site("add_rms_norm", -1, "norm")]
    for layer in range(config.layers):
        divided = (tp, attention_tp or tp)
        sites += block_sites(config, layer, format_of, divided, apart, verify, adapted)
        absorbs = config.q_lora and not adapted and not config.expanded
        sites += _inputs(config, layer, format_of) if absorbs else []
    rows = vocab_rows(config, tp)
    head = format_of("lm_head")
    sites.append(Site("linear", -1, "lm_head", weight_format=head, shape=(rows, config.hidden)))
    # Drafts are drawn within captured steps, and trees are grown there.
    inside = {"verify": {"sample"}, "tree": {"logprobs"}, "": set()}[verify]
    sites += [Site(op, -1, "sampler", captured=op in inside) for op in SAMPLER_OPS]
    return sites + [delta for site in sites if (delta := _delta(site, adapted)) is not None]


# Sites whose weight is that of several modules, by the last part of their names.
_PARTS = {
    "qkv_a_proj": ("q_a_proj", "q_proj", "indexer.wk", "kv_a_proj_with_mqa"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def _delta(site: Site, adapted: Collection[str]) -> Site | None:
    """Where adapters add to the product at `site`, if any may."""
    if not adapted or site.op not in ("linear", "mla_absorb"):
        return None
    at, _, name = site.module.rpartition(".")
    prefix = f"model.layers.{site.layer}.{at}." if at else ""
    prefix += "0." if site.count > 1 else ""
    if not any(prefix + part in adapted for part in _PARTS.get(name, (name,))):
        return None
    return Site("lora_delta", site.layer, site.module, shape=site.shape, count=site.count)


def joined(formats: Iterable[str]) -> tuple[str, str]:
    """(format that a weight of several Linears is packed from, what they have if not all that)."""
    found = sorted(set(formats))
    return (found[0], "") if len(found) == 1 else ("dense", " and ".join(found))


def block_sites(
    config: ModelConfig,
    layer: int,
    format_of: FormatOf,
    divided: tuple[int, int],
    apart: Collection[str],
    verify: Verify,
    adapted: Collection[str] = (),
) -> list[Site]:
    """The sites of one decoder layer. divided: ranks that divide it, and those that divide its
    heads.
    """
    tp, heads_tp = divided
    sites = [Site("rms_norm", layer, "block"), Site("add_rms_norm", layer, "block")]
    if verify == "verify" and config.indexing is None:
        sites.append(Site(decode_op(config), layer, VERIFY, verify))
    sites += _attention(config, layer, format_of, heads_tp, apart)
    if verify == "tree":
        if config.indexing is None:
            sites.append(Site(decode_op(config), layer, TREE, verify))
        elif config.has_indexer(layer):
            sites += tree_choice(layer)
        sites.append(Site("cache_move", layer, TREE))
    return [*sites, *_mlp(config, layer, format_of, tp, apart, adapted)]


def decode_op(config: ModelConfig) -> str:
    """What attends the cache where attention is dense."""
    return "mha_decode" if config.expanded else "mla_decode"


def tree_choice(layer: int) -> list[Site]:
    """What an indexer chooses by for rows that are nodes of trees."""
    return [Site(op, layer, INDEXER_TREE) for op in ("index_scores", "index_topk")]


def _linear(layer: int, module: str, shape: tuple[int, int], format_of: FormatOf) -> Site:
    weight_format = format_of(f"model.layers.{layer}.{module}")
    return Site("linear", layer, module, weight_format=weight_format, shape=shape)


def quantising(op: str, into: Site, module: str) -> list[Site]:
    """A fusion with the quantisation in front of a Linear, if that may take activations so."""
    whole = into.shape[1] % _BLOCK == 0
    return [Site(op, into.layer, module)] if into.weight_format == "fp8_block" and whole else []


def _attention(
    c: ModelConfig, layer: int, format_of: FormatOf, tp: int, apart: Collection[str]
) -> list[Site]:
    heads = c.heads // tp
    at = "self_attn"
    kv_b = (heads * (c.qk_nope + c.v_head), c.kv_lora)
    sites = [
        Site("rms_norm", layer, at),
        *(Site(op, layer, at) for op in (_WRITING if c.expanded else ("mla_prologue",))),
        Site("cache_gather", layer, at, "prefill"),
        Site("mha_prefill", layer, at, "prefill"),
        Site("merge_state", layer, at, "prefill"),
        *_decoding(c, layer, at),
        *(_indexer(c, layer, format_of) if c.has_indexer(layer) else ()),
        Site(
            "mla_absorb",
            layer,
            f"{at}.kv_b_proj",
            weight_format=format_of(f"model.layers.{layer}.{at}.kv_b_proj"),
            shape=kv_b,
        ),
        o_proj := _linear(layer, f"{at}.o_proj", (c.hidden, heads * c.v_head), format_of),
    ]
    if c.indexing is None and c.v_head == _BLOCK:
        fused = quantising("mha_prefill_quantize", o_proj, at)
        sites += (replace(site, phase="prefill") for site in fused)
    first = ("q_a_proj", c.q_lora) if c.q_lora else ("q_proj", heads * c.qk_head)
    if c.q_lora:
        up = _linear(layer, f"{at}.q_b_proj", (heads * c.qk_head, c.q_lora), format_of)
        sites.append(up)
        if not c.has_indexer(layer):  # which needs the normed query latent as it is
            sites += quantising("rms_norm_quantize", up, at)
    query = _linear(layer, f"{at}.{first[0]}", (first[1], c.hidden), format_of)
    latent = _linear(layer, f"{at}.kv_a_proj_with_mqa", (c.latent, c.hidden), format_of)
    parts = [query, latent]
    if c.indexing is not None and c.has_indexer(layer):
        keys = _linear(layer, f"{INDEXER}.wk", (c.indexing.dim, c.hidden), format_of)
        parts.insert(1, keys)  # the latent's rows may end within a block of scales
    joined_parts = parts if INDEX_KEYS not in apart else [query, latent]
    if QKV_A in apart or query.weight_format != latent.weight_format:
        joined_parts = []
    elif any(part.weight_format != query.weight_format for part in joined_parts):
        joined_parts = [query, latent]
    if joined_parts:
        shape = (sum(part.shape[0] for part in joined_parts), c.hidden)
        sites.append(both := replace(query, module=f"{at}.qkv_a_proj", shape=shape))
        if not c.has_indexer(layer):  # which reads what is normed
            for op in ("rms_norm_quantize", "add_rms_norm_quantize"):
                sites += quantising(op, both, "block")
    return [*sites, *(part for part in parts if part not in joined_parts)]


def _inputs(c: ModelConfig, layer: int, format_of: FormatOf) -> list[Site]:
    """Its shape is that of the first projections. Weights of several formats are not joined."""
    assert c.q_lora is not None
    form, stored = joined(format_of(f"model.layers.{layer}.self_attn.{n}") for n in MLA_INPUTS)
    shape = (c.q_lora + c.latent, c.hidden)
    return [] if stored else [Site("mla_inputs", layer, INPUTS, "decode", form, shape)]


def _decoding(c: ModelConfig, layer: int, at: str) -> list[Site]:
    """Attention in the latent space: decode, and where it is sparse long prefill, too."""
    if c.indexing is None:
        return [Site(decode_op(c), layer, at, "decode")]
    prefill = Site("sparse_prefill", layer, at, "prefill")
    return [prefill, Site("sparse_decode", layer, at, "decode")]


def _indexer(c: ModelConfig, layer: int, format_of: FormatOf) -> list[Site]:
    """Every rank has the whole indexer and makes the same choice."""
    assert c.indexing is not None and c.q_lora is not None
    heads, d = c.indexing.heads, c.indexing.dim
    return [
        Site("index_prologue", layer, INDEXER),
        Site("index_select", layer, INDEXER),
        Site("router_logits", layer, INDEXER),
        _linear(layer, f"{INDEXER}.wq_b", (heads * d, c.q_lora), format_of),
    ]


def _slots(
    c: ModelConfig, layer: int, format_of: FormatOf, form: str, adapted: Collection[str]
) -> int:
    """How many slots behind the routed experts, of format `form`, hold the shared experts: as many
    as these are routed experts wide, or 0 where they have another format, parts of blocks or
    adapters of their own."""
    at = f"model.layers.{layer}.mlp.shared_experts"
    names = [f"{at}.{part}_proj" for part in ("gate", "up", "down")]
    whole = c.shared_experts == 1 or form == "dense" or c.moe_intermediate % _BLOCK == 0
    alike = form in _SLOT_FORMATS and {format_of(name) for name in names} == {form}
    return c.shared_experts if alike and whole and not any(n in adapted for n in names) else 0


def _mlp(
    c: ModelConfig,
    layer: int,
    format_of: FormatOf,
    tp: int,
    apart: Collection[str],
    adapted: Collection[str],
) -> list[Site]:
    if not c.is_moe(layer):
        return _swiglu(c, layer, "mlp", c.intermediate // tp, format_of)
    width = c.moe_intermediate // tp
    sites = [Site("router_logits", layer, "mlp"), Site("route", layer, "mlp")]
    at = f"model.layers.{layer}.mlp.experts"
    parts = ("gate_proj", "up_proj", "down_proj")
    form, stored = joined(format_of(f"{at}.{e}.{p}") for e in range(c.experts) for p in parts)
    site = Site("experts", layer, "mlp.experts", weight_format=form, stored=stored)
    slots = 0
    if f"{at}.0.gate_proj" in adapted:  # one by one
        at = "mlp.experts"
        sites.append(Site("silu_mul", layer, at))
        for name, shape in (("gate_up", (2 * width, c.hidden)), ("down", (c.hidden, width))):
            owner = replace(site, op="linear", module=f"{at}.{name}_proj", shape=shape)
            sites.append(replace(owner, count=c.experts))
    else:
        if not stored and SHARED_EXPERTS not in apart:
            slots = _slots(c, layer, format_of, form, adapted)
        sites.append(replace(site, shape=(c.experts + slots, width, c.hidden)))
    if c.shared_experts and not slots:
        shared = c.shared_experts * c.moe_intermediate // tp
        sites += _swiglu(c, layer, "mlp.shared_experts", shared, format_of)
    return sites


def _swiglu(c: ModelConfig, layer: int, module: str, width: int, format_of: FormatOf) -> list[Site]:
    pair = ("gate_proj", "up_proj")
    form, stored = joined(format_of(f"model.layers.{layer}.{module}.{name}") for name in pair)
    down = _linear(layer, f"{module}.down_proj", (c.hidden, width), format_of)
    return [
        Site("silu_mul", layer, module),
        *quantising("silu_mul_quantize", down, module),
        Site(
            "linear",
            layer,
            f"{module}.gate_up_proj",
            weight_format=form,
            shape=(2 * width, c.hidden),
            stored=stored,
        ),
        down,
    ]
