"""The structure of a model against what is not written here: transformers' models, the files of the
demos, and weights that were packed. And its folds against each other."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from model_harness import decide
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
)

import ds_runtime
from ds_runtime.checkpoint.tensors import tensors_of
from ds_runtime.description.adapter import adaptable_modules
from ds_runtime.description.hf import from_hf, load_config
from ds_runtime.description.joins import JOINS
from ds_runtime.description.sites import model_sites
from ds_runtime.description.structure import SHARED, draft_of, model_of
from ds_runtime.description.tree import MoeNode, Ranks, by_name
from ds_runtime.engine.banner import parameters
from ds_runtime.ops.binding.bound import BoundOps
from ds_runtime.parallel.layout import Shard, Shards
from ds_runtime.parallel.mesh import Mesh
from ds_runtime.parallel.placement import Placement
from ds_runtime.parallel.world import World
from ds_runtime.weights.load import load_model

DEMOS = Path(ds_runtime.__file__).parent
SEVERAL = settings(max_examples=25, deadline=None)


def dense(module):
    return "dense"


@st.composite
def raws(draw, family=None):
    """A config.json of a small model."""
    family = family or draw(st.sampled_from(["V2", "V3", "V32"]))
    layers, experts = draw(st.integers(1, 4)), draw(st.sampled_from([4, 8]))
    latent = [24, 32] if family == "V32" else [None, 24, 32]
    raw = {
        "architectures": [f"Deepseek{family}ForCausalLM"],
        "vocab_size": draw(st.sampled_from([50, 64])),
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": draw(st.sampled_from([4, 8])),
        "num_key_value_heads": 4,
        "q_lora_rank": draw(st.sampled_from(latent)),
        "kv_lora_rank": draw(st.sampled_from([16, 40])),
        "qk_nope_head_dim": draw(st.sampled_from([8, 12])),
        "qk_rope_head_dim": 8,
        "v_head_dim": draw(st.sampled_from([8, 20])),
        "intermediate_size": 64,
        "moe_intermediate_size": draw(st.sampled_from([8, 16])),
        "n_routed_experts": experts,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": draw(st.sampled_from([1, 2])),
        "first_k_dense_replace": draw(st.integers(0, layers)),
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 64,
        "tie_word_embeddings": draw(st.booleans()),
        "rope_theta": 10000.0,
    }
    if family == "V2":
        raw |= {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False}
    else:
        raw |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
    if family == "V32":
        raw |= {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8}
        kinds = st.sampled_from(["full", "shared"])
        raw["indexer_types"] = ["full", *(draw(kinds) for _ in range(1, layers))]
    return raw


def stored_tensors(weights):
    """Tensor → shape, with the experts of a layer stacked as transformers has them."""
    found = {}
    for w in weights:
        if w.stack is None:
            found[w.module if w.bare else f"{w.module}.weight"] = w.shape
        else:
            rows, cols = w.shape
            count = max(found.get(w.stack.module, (0,))[0], w.stack.number + 1)
            found[w.stack.module] = (count, w.stack.parts * rows, cols)
    return found


@pytest.mark.parametrize("family", ["V2", "V3"])
@SEVERAL
@given(data=st.data())
def test_weights_are_those_of_transformers(family, data):
    raw = data.draw(raws(family))
    kind, made = {
        "V2": (DeepseekV2Config, DeepseekV2ForCausalLM),
        "V3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    }[family]
    with torch.device("meta"):
        model = made(kind(**{k: v for k, v in raw.items() if k != "num_nextn_predict_layers"}))
    wanted = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    if raw["tie_word_embeddings"]:  # the same tensor under another name
        del wanted["lm_head.weight"]
    config = from_hf(raw)
    assert stored_tensors(by_name(model_of(config, dense)).values()) == wanted
    biases = sum(math.prod(s) for n, s in wanted.items() if n.endswith("correction_bias"))
    assert parameters(config) == sum(p.numel() for p in model.parameters()) + biases


@pytest.mark.parametrize("name", ["demo", "demo_v32"])
def test_weights_are_those_of_the_demos(name):
    """With a draft layer, and with indexers: files that training wrote."""
    config = load_config(DEMOS / name)
    weights = [*by_name(model_of(config, dense)).values()]
    files = tensors_of(DEMOS / name)
    at = f"model.layers.{config.layers}."
    drafts = any(n.startswith(at) for n in files)
    if drafts and config.mtp_layers:
        weights += by_name(draft_of(config, config.layers, dense)).values()
    wanted = {n: e.shape for n, e in files.items() if config.mtp_layers or not n.startswith(at)}
    wanted = {n: shape for n, shape in wanted.items() if not n.removeprefix(at).startswith(SHARED)}
    assert {w.module if w.bare else f"{w.module}.weight": w.shape for w in weights} == wanted
    assert name == "demo_v32" or (drafts and config.mtp_layers == 1)


@pytest.mark.parametrize("name", ["demo", "demo_v32"])
def test_values_of_sites_are_those_that_are_packed(name):
    """A reference holds a Linear in float32 as it is."""
    assembly = decide(DEMOS / name, context_length=64)
    bound = BoundOps(assembly.binding)
    model = load_model(assembly, bound, World.alone(), torch.device("cpu"))
    values = {(s.op, s.layer, s.module): s.values for s, _ in assembly.binding.choices}
    packed = {("linear", -1, "lm_head"): model.lm_head}
    for n, block in enumerate(model.blocks):
        attention, mlp = block.attention, block.mlp
        packed["linear", n, "self_attn.o_proj"] = attention.o_proj
        packed["linear", n, "self_attn.qkv_a_proj"] = attention.inputs.joined
        packed["linear", n, "self_attn.q_b_proj"] = attention.inputs.up
        if hasattr(mlp, "experts"):
            packed["experts", n, "mlp.experts"] = mlp.experts
        else:
            packed["linear", n, "mlp.gate_up_proj"] = mlp.mlp.gate_up
            packed["linear", n, "mlp.down_proj"] = mlp.mlp.down
        if attention.indexer is not None:
            packed["linear", n, "self_attn.indexer.wq_b"] = attention.indexer.query
    assert {key: layer.packed.nbytes for key, layer in packed.items()} == {
        key: 4 * values[key] for key in packed
    }
    assert model.embed.table.numel() == values["embed", -1, "embed_tokens"]


def matrices(tree, ranks):
    """Values of all matrices of one rank: what sites own."""
    found = [w for w in by_name(tree).values() if len(w.shape) == 2]
    head = [] if tree.head is None else [w for w in tree.head.parts if w.kind == "tied"]
    return sum(math.prod(w.local(ranks)) for w in found + head)


@SEVERAL
@given(raw=raws(), data=st.data())
def test_every_matrix_has_one_site_whatever_is_joined(raw, data):
    """On any number of ranks, with any of the joins, formats and adapters."""
    config = from_hf(raw)
    ranks = Ranks(data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([1, 2, 4])))
    apart = data.draw(st.sets(st.sampled_from(JOINS)))
    adapted = data.draw(st.sets(st.sampled_from(sorted(adaptable_modules(config)))))
    known = adaptable_modules(config)
    routed = {n for n, w in known.items() if w.stack is not None}
    adapted = adapted - routed | (routed if data.draw(st.booleans()) else set())
    kinds = st.sampled_from(["dense", "fp8_block", "int8_channel"])
    formats = data.draw(st.lists(kinds, min_size=1))
    form = {name: formats[i % len(formats)] for i, name in enumerate(known)}
    tree = model_of(config, lambda m: form.get(m, "dense"))
    sites = model_sites(config, lambda m: form.get(m, "dense"), ranks, apart, adapted)
    owned = [s for s in sites if s.op != "mla_inputs"]
    assert sum(s.values for s in owned) == matrices(tree, ranks)
    names = Counter(name for s in owned for name in set(s.weights))
    every = {n: w for n, w in by_name(tree).items() if len(w.shape) == 2}
    wanted = {n for n, w in every.items() if w.stack is None} | {"lm_head"}
    assert {n: c for n, c in names.items() if n in wanted} == dict.fromkeys(wanted, 1)
    assert all(every[n].stack.number == 0 for n in names.keys() - wanted)
    for site in sites:
        if site.op == "linear":
            assert site.values == site.count * math.prod(site.shape)
    told = {name for s in sites if s.op == "lora_delta" for t in sites
            if (t.layer, t.module) == (s.layer, s.module) for name in t.weights}  # fmt: skip
    assert {n for n in adapted if n not in routed or ".experts.0." in n} <= told


@SEVERAL
@given(raw=raws(), data=st.data())
def test_stages_and_ranks_with_experts_of_their_own_make_up_the_whole(raw, data):
    """Layers divided among stages, and routed experts among ranks, are those of the model."""
    config = from_hf(raw)
    whole = by_name(model_of(config, dense))
    cuts = data.draw(st.sets(st.integers(1, config.layers)))
    stages = [range(a, b) for a, b in pairwise(sorted({0, config.layers} | cuts))]
    parts = [by_name(model_of(config, dense, layers)) for layers in stages]
    assert {k: w for part in parts for k, w in part.items()} == whole
    twice = config.tie_embeddings and len(stages) > 1  # the first and the last need the embedding
    assert sum(map(len, parts)) == len(whole) + twice
    both = [s for layers in stages for s in model_sites(config, dense, layers=layers)]
    assert Counter(both) == Counter(model_sites(config, dense))
    split = data.draw(st.integers(1, config.experts - 1))
    ranks = [range(split), range(split, config.experts)]
    held = [by_name(model_of(config, dense, experts=experts)) for experts in ranks]
    assert held[0] | held[1] == whole
    shared = held[0].keys() & held[1].keys()
    assert shared == {name for name, w in whole.items() if w.stack is None}
    every = [model_sites(config, dense, apart=JOINS, experts=experts) for experts in ranks]
    counts = [[s.shape[0] for s in sites if s.op == "experts"] for sites in every]
    assert [sum(pair) for pair in zip(*counts, strict=True)] == [config.experts] * len(counts[0])
    mtp = by_name(draft_of(config, config.layers, dense))
    assert mtp.keys().isdisjoint(whole) and len(mtp) > 4
    moved = draft_of(config, 0, dense)
    assert [w.module for w in by_name(moved).values()] == [
        name.replace(f"layers.{config.layers}.", "layers.0.") for name in mtp
    ]


@SEVERAL
@given(raw=raws(), tp=st.sampled_from([1, 2, 4]), data=st.data())
def test_every_part_of_an_expert_has_one_rank(raw, tp, data):
    """Of routed experts; of everything else each group of attention, or all ranks, have it once."""
    dp, ep = (data.draw(st.sampled_from([n for n in (1, 2, 4) if tp % n == 0])) for _ in "de")
    config, mesh = from_hf(raw), Mesh(tp, dp, ep=ep)
    every = by_name(model_of(config, dense))
    seen = {n: torch.zeros(w.shape, dtype=torch.int32) for n, w in every.items()}
    assume(not config.experts or config.experts % ep == 0)
    placement = Placement.even(config.experts, ep)
    for rank in range(tp):
        held = placement.held(mesh.at(rank, "ep"))
        shards = Shards.at(mesh, rank)
        for name, w in by_name(model_of(config, dense, experts=held or None)).items():
            if len(w.shape) == 2:
                rows, cols = shards.part(w)
                seen[name][rows, cols] += 1
                shape, local = seen[name][rows, cols].shape, w.local(shards.ranks)
                vocab = w.cut is not None and w.cut.over == "vocab"
                assert shape == local or (vocab and shape[0] <= local[0])
    for name, counts in seen.items():
        over = None if every[name].cut is None else every[name].cut.over
        whole = {None: tp, "heads": dp, "shared": dp if ep > 1 else 1}.get(over, 1)
        assert len(every[name].shape) != 2 or counts.eq(whole).all(), name


@given(st.integers(0, 12), st.integers(1, 6))
def test_a_placement_says_where_every_expert_is(each, ep):
    """Each is on one rank, and the tables of all ranks agree about it."""
    placement = Placement.even(each * ep, ep)
    held = [placement.held(rank) for rank in range(ep)]
    assert [e for own in held for e in own] == list(range(each * ep))
    for rank, own in enumerate(held):
        local = placement.local(rank)
        assert [e for e, slot in enumerate(local) if slot >= 0] == list(own)
        assert [local[e] for e in own] == list(range(len(own)))
        assert [(placement.ranks[e], placement.slots[e]) for e in own] == [
            (rank, slot) for slot in range(len(own))
        ]


@SEVERAL
@given(raw=raws(), size=st.sampled_from([1, 2, 4]), heads=st.sampled_from([1, 2, 4]))
def test_ranks_divide_every_weight_without_rest(raw, size, heads):
    """The parts of all ranks are the whole, each once; `local` is how large each is."""
    config = from_hf(raw)
    tree = model_of(config, dense)
    for w in by_name(tree).values():
        if len(w.shape) != 2:
            continue
        over = 1 if w.cut is None else heads if w.cut.over == "heads" else size
        seen = torch.zeros(w.shape, dtype=torch.int32)
        for rank in range(over):
            shards = Shards(
                Shard(rank if over == size else 0, size), Shard(rank if over == heads else 0, heads)
            )
            rows, cols = shards.part(w)
            seen[rows, cols] += 1
            shape = seen[rows, cols].shape
            local = w.local(shards.ranks)
            vocab = w.cut is not None and w.cut.over == "vocab"
            assert shape == local or (vocab and shape[0] <= local[0] and shape[1] == local[1])
        assert seen.eq(1).all(), w
    moe = [block.mlp for block in tree.blocks if isinstance(block.mlp, MoeNode)]
    for node in moe:
        assert node.shared is not None
        pieces = config.shared_experts
        for part in node.shared.parts:
            seen = torch.zeros(part.shape, dtype=torch.int32)
            for piece in range(pieces):
                for rank in range(size):
                    rows, cols = Shards(Shard(rank, size), Shard()).part(part, piece, pieces)
                    seen[rows, cols] += 1
            assert seen.eq(1).all(), part
