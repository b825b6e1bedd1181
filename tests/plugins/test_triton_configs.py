"""Tuned configurations: their files, how they are found, and that none of them changes a result."""

from __future__ import annotations

import ast
import inspect
import json
import re
from dataclasses import replace
from importlib import import_module
from importlib.resources import files

import pytest
import torch
import torch.nn.functional as F
from interpreter import DEVICE, faithful, needs_triton

from ds_runtime.errors import PluginError
from ds_runtime.ops.batch import Limits, Segments
from ds_runtime.ops.contract import Dims
from ds_runtime.ops.contracts.attention import index as contract
from ds_runtime.ops.reference.attention import dense as attention
from ds_runtime.ops.reference.attention import index as reference
from ds_runtime.ops.reference.attention.dense import decode_batch
from ds_runtime.ops.reference.attention.scaled import decoded, encoded
from ds_runtime.ops.reference.attention.sparse import attend_slots
from ds_runtime.ops.reference.cases import Maker, SampleExperts
from ds_runtime.ops.reference.matrices import moe
from ds_runtime_kit.checks.conformance import SMALL_DIMS, facts_for
from ds_runtime_kit.checks.inputs import index_pages
from ds_runtime_kit.checks.numerics import relative_error
from ds_runtime_triton import config as config_module
from ds_runtime_triton import workspace
from ds_runtime_triton.config import ORDERED, Sizes, chosen, tuned

FOLDER = files("ds_runtime_triton") / "configs"
FILES = sorted(p for p in FOLDER.rglob("*.json") if p.parent != FOLDER)
NAMES = frozenset(p.stem for p in FILES)


def configs(op):
    """Every distinct configuration of an op, of every architecture, with its size."""
    found = {}
    for path in FILES:
        if path.stem == op:
            for sizes in json.loads(path.read_text())["shapes"].values():
                for bound, config in sizes.items():
                    found.setdefault(json.dumps(config), (int(bound), config))
    return [pytest.param(*v, id=f"{op}-{i}") for i, v in enumerate(found.values())]


def facts(dtype="bfloat16", **dims):
    made = facts_for(DEVICE, dtype)
    return replace(made, dims=Dims({**SMALL_DIMS, **dims}))


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_files_are_of_the_documented_form(path):
    held = json.loads(path.read_text())
    assert set(held) == {"measured", "shapes"} and held["measured"]
    for sizes in held["shapes"].values():
        assert sizes and all(bound.isdigit() for bound in sizes)
        for config in sizes.values():
            assert all(isinstance(v, int) for v in config.values())


def test_configurations_stay_within_the_workspace_that_is_declared():
    for param in (*configs("sparse_mla"), *configs("mla_decode")):
        config = param.values[1]
        assert config["WAVES"] <= workspace.WAVES and config["BLOCK_H"] <= workspace.BLOCK_H
    for param in configs("index_topk"):
        assert param.values[1]["PROGRAMS"] <= workspace.PROGRAMS


def test_only_experts_of_two_blocks_are_fused():
    """What jit/narrow.py holds on chip."""
    for path in FILES:
        for shape, sizes in json.loads(path.read_text())["shapes"].items():
            if any("FUSED" in config for config in sizes.values()):
                assert path.stem == "experts_fp8" and "N=256" in shape.split(","), shape


def test_no_configuration_swaps_where_latents_are_scaled():
    """Triton 3.6 makes code for it that computes wrong numbers or reads beyond its memory."""
    for path in FILES:
        if path.stem == "sparse_mla":
            for shape, sizes in json.loads(path.read_text())["shapes"].items():
                assert shape == "plain" or not any(config["SWAP"] for config in sizes.values())


def test_every_generic_file_has_a_configuration_for_every_shape():
    for path in FILES:
        if path.parent.name == "generic":
            assert "*" in json.loads(path.read_text())["shapes"]


ORDER = ("BLOCK_K", "SPLIT", "SWAP", "DIRECT", "QUANTISED", "APART")  # what bits hang on
OTHERS = {"TORCH", "VECTOR", "WIDE", "FUSED", "TILES", "DN_SPLIT", "UP_BLOCK_K", "DN_BLOCK_K"}


def test_ordered_configurations_differ_in_nothing_that_a_bit_hangs_on():
    found = set()
    for path in FILES:
        sizes = json.loads(path.read_text())["shapes"].get(ORDERED)
        if sizes is None:
            continue
        found.add((path.parent.name, path.stem))
        assert not any(OTHERS & config.keys() for config in sizes.values())
        if path.stem != "mla_decode":  # whose sizes are heads, of which a place has one number
            assert len({tuple(c.get(name) for name in ORDER) for c in sizes.values()}) == 1
    ops = "linear_dense", "linear_fp8", "experts_dense", "experts_fp8", "absorb", "mla_decode"
    assert {("generic", op) for op in ops} <= found


def test_lookup_goes_from_the_shape_to_the_generic_entry():
    assert tuned("nobody", "linear_dense", "N=1,K=1") == tuned("generic", "linear_dense")
    shapes = json.loads((FOLDER / "sm90" / "linear_fp8.json").read_text())["shapes"]
    own = {s: sorted((int(b), c) for b, c in found.items()) for s, found in shapes.items()}
    assert len(own) > 1 and "*" in own
    for shape, wanted in own.items():  # its own entry, though the same file has "*"
        sizes = tuned("sm90", "linear_fp8", shape)
        assert list(zip(sizes.bounds, sizes.configs, strict=True)) == wanted
    assert any(found != own["*"] for found in own.values())
    assert tuned("sm90", "linear_fp8", "N=1,K=1") == tuned("sm90", "linear_fp8")
    sizes = Sizes((8, 64), ({"a": 1}, {"a": 2}))
    assert [sizes.at(n)["a"] for n in (0, 8, 9, 64, 65, 10**6)] == [1, 1, 2, 2, 2, 2]
    with pytest.raises(LookupError, match="no configuration of nothing"):
        tuned("sm90", "nothing")


@needs_triton
def test_names_are_parameters_of_the_kernels():
    from ds_runtime_triton.jit import (
        absorb,
        coded,
        down,
        experts,
        gemm,
        index,
        mha,
        mla,
        narrow,
        small,
        sparse,
        topk,
    )

    routed = (
        experts.gate_up_kernel,
        experts.gate_up_vector_kernel,
        down.down_kernel,
        down.down_direct_kernel,
        down.down_vector_kernel,
    )
    kernels = {
        "linear_dense": [gemm.dense_gemm_kernel],
        "linear_fp8": [gemm.fp8_gemm_kernel, gemm.fp8_wide_kernel, gemm.fp8_vector_kernel],
        "experts_dense": [*routed],
        "experts_fp8": [*routed, narrow.narrow_experts_kernel],
        "linear_int8": [gemm.fp8_gemm_kernel, gemm.fp8_wide_kernel],
        "experts_int8": [*routed],
        "linear_weight_only": [coded.coded_gemm_kernel],
        "experts_weight_only": [coded.coded_experts_kernel],
        "experts_w4afp8": [coded.coded_experts_kernel],
        "absorb": [absorb.absorb_kernel],
        "mla_decode": [mla.mla_decode_kernel],
        "mha_prefill": [mha.mha_prefill_kernel],
        "index_scores": [index.index_scores_kernel],
        "index_topk": [topk.count_kernel, topk.gather_kernel],
        "sparse_mla": [sparse.sparse_mla_kernel],
        "router": [],
        "launch": [small.silu_mul_kernel],
    }
    assert set(kernels) == NAMES
    for op, functions in kernels.items():
        known = {"num_warps", "num_stages", "maxnreg"}
        known |= {
            "TORCH",
            "WAVES",
            "DIRECT",
            "FUSED",
            "QUANTISED",
            "WIDE",
            "VECTOR",
            "PROGRAMS",
            "ROW_WARPS",
            "NARROW",
        }
        for function in functions:
            known |= set(inspect.signature(function.fn).parameters)
        for param in configs(op):
            names = {re.sub("^(UP|DN|Q|V)_", "", name) for name in param.values[1]}
            assert names <= known, names - known


@needs_triton
def test_whatever_is_launched_waits_first():
    """A kernel that read before the one in front of it had ended could read old values."""
    from ds_runtime_triton.jit.entry import Entry

    found = 0
    for path in sorted((files("ds_runtime_triton") / "jit").glob("*.py")):
        module = import_module(f"ds_runtime_triton.jit.{path.stem}")
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef) or not node.name.endswith("_kernel"):
                continue
            body = node.body[1 if ast.get_docstring(node) else 0 :]
            assert isinstance(getattr(module, node.name), Entry), node.name
            assert node.args.args[-1].arg == "PDL" and ast.unparse(body[0]) == "follow(PDL)"
            found += 1
    assert found > 30


def close(got, want, tolerance):
    assert relative_error(got, want) <= tolerance


@needs_triton
@pytest.mark.parametrize(("size", "config"), configs("linear_dense"))
def test_linear_dense(size, config):
    from ds_runtime_triton.linear import LinearDense

    rows = min(size, 70)
    make = Maker(facts(), f"dense {rows}")
    weight, x = make.weight(150, 200), make.normal(rows, 200)
    kernel = LinearDense(facts())
    packed = kernel.pack(weight, facts())
    packed.tensors["tuned"] = Sizes((1,), (config,))
    with faithful():
        got = kernel.apply(x, packed)
    close(got, x.double() @ weight.dequantise(torch.float64).T, 4e-3)


@needs_triton
@pytest.mark.parametrize(("size", "config"), configs("linear_fp8"))
def test_linear_fp8(size, config):
    from ds_runtime_triton.linear import LinearFp8

    rows = min(size, 70)
    make = Maker(facts(), f"fp8 {rows}")
    weight, x = make.weight(270, 400, "fp8_block", (128, 142)), make.normal(rows, 400)
    kernel = LinearFp8(facts())
    packed = kernel.pack(weight, facts())
    packed.tensors["tuned"] = Sizes((1,), (config,))
    with faithful():
        got = kernel.apply(x, packed)
    close(got, x.double() @ weight.dequantise(torch.float64).T, 4e-2)
    close(packed.dequantise(), weight.dequantise(torch.float64), 1e-6)


@needs_triton
@pytest.mark.parametrize("fmt", ["dense", "fp8_block"])
@pytest.mark.parametrize(("size", "config"), configs("experts_dense") + configs("experts_fp8"))
def test_experts(size, config, fmt):
    from ds_runtime_triton.experts import ExpertsDense, ExpertsFp8

    if ("BLOCK_K" in config) is not (fmt == "dense"):
        return
    few = config.get("DIRECT") or config.get("VECTOR")
    tokens = 2 if few else min(size, 40)
    make = Maker(facts(), f"experts {tokens}")
    inter = 256 if config.get("FUSED") else 128
    shapes = ((inter, 256), (inter, 256), (256, inter))
    triples = [tuple(make.weight(*shape, fmt) for shape in shapes) for _ in range(5)]
    kernel = (ExpertsDense if fmt == "dense" else ExpertsFp8)(facts())
    packed = kernel.pack(SampleExperts(triples), facts())
    packed.tensors["layer"].sizes = Sizes((1,), (config,))
    x, weights = make.normal(tokens, 256), make.uniform(tokens, 3).float()
    ids = torch.stack([make.order(4)[:3] for _ in range(tokens)]).int()
    with faithful():
        got = kernel.apply(x, weights, ids, packed)
    wide = moe.ReferenceExperts(facts("float64"))
    held = wide.pack(SampleExperts(triples), facts("float64"))
    want = wide.apply(x.double(), weights.double(), ids, held)
    close(got, want, 8e-3 if fmt == "dense" else 6e-2)


def ways(op):
    """A configuration of each way that an op goes."""
    names = ("DIRECT", "VECTOR", "FUSED", "SWAP", "SPLIT")
    found = {
        tuple(bool(config.get(n)) for n in names): config
        for _, config in (entry.values for entry in configs(op))
    }
    return [pytest.param(config, id=" ".join(map(str, key))) for key, config in found.items()]


@pytest.fixture
def poisoned(monkeypatch):
    """What is allocated holds large numbers: what nobody writes must change nothing."""
    empty = torch.empty

    def made(*args, **kwargs):
        found = empty(*args, **kwargs)
        return found.fill_(400.0 if found.is_floating_point() else 1)

    monkeypatch.setattr(torch, "empty", made)


@needs_triton
@pytest.mark.parametrize(
    ("op", "config"),
    [
        pytest.param(op, *entry.values, id=f"{op} {entry.id}")
        for op in ("experts_dense", "experts_fp8", "experts_w4afp8")
        for entry in ways(op)
    ],
)
def test_experts_of_other_ranks_add_nothing(op, config, poisoned):
    """Of some choices, of all of a token, and of all of a call."""
    from ds_runtime_triton import coded_experts, experts

    divided = replace(facts(), ranks=Dims({"ep": 2}))
    fmt, made = {
        "experts_dense": ("dense", experts.ExpertsDense),
        "experts_fp8": ("fp8_block", experts.ExpertsFp8),
        "experts_w4afp8": ("w4afp8", coded_experts.ExpertsW4AFp8),
    }[op]
    tokens = 2 if config.get("DIRECT") or config.get("VECTOR") else 9
    make, inter = Maker(facts(), f"others {tokens}"), 256 if config.get("FUSED") else 128
    shapes = ((inter, 256), (inter, 256), (256, inter))
    triples = [tuple(make.weight(*shape, fmt) for shape in shapes) for _ in range(4)]
    kernel = made(divided)
    packed = kernel.pack(SampleExperts(triples), divided)
    packed.tensors["layer"].sizes = Sizes((1,), (plain(config),))
    wide = moe.ReferenceExperts(facts("float64"))
    held = wide.pack(SampleExperts(triples), facts("float64"))
    x, weights = make.normal(tokens, 256), make.uniform(tokens, 3).float()
    ids = torch.stack([make.order(4)[:3] for _ in range(tokens)]).int()
    for rows, columns in ((slice(1, None, 2), slice(1, 2)), (slice(1), slice(3))):
        ids[rows, columns] = -1
        with faithful():
            got = kernel.apply(x, weights, ids, packed)
        want = wide.apply(x.double(), weights.double(), ids, held)
        close(got, want, 8e-3 if fmt == "dense" else 6e-2)
    with faithful():
        assert not kernel.apply(x, weights, torch.full_like(ids, -1), packed).any()


@needs_triton
@pytest.mark.parametrize(
    ("inter", "hidden", "fmt"),
    [(128, 256, "fp8_block"), (256, 192, "fp8_block"), (256, 256, "dense")],
)
def test_other_experts_are_not_fused(inter, hidden, fmt):
    from ds_runtime_triton.experts import ExpertsDense, ExpertsFp8

    make = Maker(facts(), "not fused")
    shapes = ((inter, hidden), (inter, hidden), (hidden, inter))
    triple = tuple(make.weight(*shape, fmt) for shape in shapes)
    kernel = (ExpertsDense if fmt == "dense" else ExpertsFp8)(facts())
    packed = kernel.pack(SampleExperts([triple]), facts())
    packed.tensors["layer"].sizes = Sizes((1,), ({"FUSED": 1, "BLOCK_M": 16, "SWAP": 1},))
    with pytest.raises(AssertionError, match="two whole blocks wide"):
        kernel.apply(make.normal(1, hidden), torch.ones(1, 1), torch.zeros(1, 1).int(), packed)


@needs_triton
@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("chunk", [16, 4096])  # of the pairs that are sorted: several, and one
def test_fused_experts(chunk, ue8m0, monkeypatch):
    """An odd number of experts, some without a token, one that every token takes."""
    from ds_runtime_triton import experts, pairs

    monkeypatch.setattr(pairs, "_CHUNK", chunk)
    config = {"FUSED": 1, "BLOCK_M": 16, "SWAP": 1, "num_stages": 3, "num_warps": 4}
    make = Maker(facts(), f"fused {chunk} {ue8m0}")
    shapes = ((256, 384), (256, 384), (384, 256))
    triples = [tuple(make.weight(*shape, "fp8_block") for shape in shapes) for _ in range(7)]
    for triple in triples if ue8m0 else ():
        for weight in triple:
            scale = weight.parts[0].tensors["scale"]
            scale.copy_(torch.exp2(torch.log2(scale).round()))
    kernel = experts.ExpertsFp8(facts())
    packed = kernel.pack(SampleExperts(triples), facts())
    assert packed.tensors["layer"].ue8m0 is ue8m0
    packed.tensors["layer"].sizes = Sizes((1,), (config,))
    x, weights = make.normal(19, 768)[:, ::2][:, :384], make.uniform(19, 3).float()
    ids = torch.stack([torch.tensor([6, *make.order(4)[:2].tolist()]) for _ in range(19)]).int()
    wide = moe.ReferenceExperts(facts("float64"))
    held = wide.pack(SampleExperts(triples), facts("float64"))
    with faithful():
        got = kernel.apply(x, weights, ids, packed)
    close(got, wide.apply(x.double(), weights.double(), ids, held), 6e-2)


@needs_triton
@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("hidden", [2048, 1152])  # whole steps of eight groups, and a ragged one
def test_one_token_s_experts_by_vectors_take_several_steps(hidden, ue8m0):
    from ds_runtime_triton.experts import ExpertsFp8

    # Rows of weights to a program as many as keep programs few: the interpreter runs one by one.
    config = {"VECTOR": 1, "UP_BLOCK_N": 32, "UP_GROUPS": 8, "UP_num_warps": 1}
    config |= {"DN_BLOCK_N": 64, "DN_GROUPS": 2, "DN_num_warps": 4}
    make = Maker(facts(), f"vectors {hidden}")
    shapes = ((512, hidden), (512, hidden), (hidden, 512))
    triples = [tuple(make.weight(*shape, "fp8_block") for shape in shapes) for _ in range(4)]
    for triple in triples if ue8m0 else ():
        for weight in triple:
            scale = weight.parts[0].tensors["scale"]
            scale.copy_(torch.exp2(torch.log2(scale).round()))
    kernel = ExpertsFp8(facts())
    packed = kernel.pack(SampleExperts(triples), facts())
    assert packed.tensors["layer"].ue8m0 is ue8m0
    packed.tensors["layer"].sizes = Sizes((1,), (config,))
    x, weights = make.normal(1, hidden), make.uniform(1, 3).float()
    ids = make.order(4)[:3][None].int()
    wide = moe.ReferenceExperts(facts("float64"))
    held = wide.pack(SampleExperts(triples), facts("float64"))
    with faithful():
        got = kernel.apply(x, weights, ids, packed)
    close(got, wide.apply(x.double(), weights.double(), ids, held), 6e-2)


def plain(config):
    """Without PTX, which the interpreter does not know: what it gives is checked on a GPU."""
    return {**config, "PTX": 0}


@needs_triton
@pytest.mark.parametrize(("size", "config"), configs("linear_weight_only"))
def test_linear_weight_only(size, config):
    from ds_runtime_triton.weight_only import LinearWeightOnly

    rows = min(size, 70)
    make = Maker(facts(), f"int4 {rows}")
    weight, x = make.weight(150, 200, "int4_group"), make.normal(rows, 200)
    kernel = LinearWeightOnly(facts())
    packed = kernel.pack(weight, facts())
    packed.tensors["tuned"] = Sizes((1,), (plain(config),))
    with faithful():
        got = kernel.apply(x, packed)
    close(got, x.double() @ weight.dequantise(torch.float64).T, 4e-3)


@needs_triton
@pytest.mark.parametrize(("size", "config"), configs("experts_w4afp8"))
def test_coded_experts(size, config):
    from ds_runtime_triton.coded_experts import ExpertsW4AFp8

    tokens = 2 if config["DIRECT"] else 5
    make = Maker(facts(), f"coded experts {tokens}")
    triples = [
        tuple(make.weight(*shape, "w4afp8") for shape in ((64, 128), (64, 128), (128, 64)))
        for _ in range(4)
    ]
    kernel = ExpertsW4AFp8(facts())
    packed = kernel.pack(SampleExperts(triples), facts())
    packed.tensors["layer"].sizes = Sizes((1,), (plain(config),))
    x, weights = make.normal(tokens, 128), make.uniform(tokens, 2).float()
    ids = torch.stack([make.order(4)[:2] for _ in range(tokens)]).int()
    with faithful():
        got = kernel.apply(x, weights, ids, packed)
    wide = moe.ReferenceExperts(facts("float64"))
    held = wide.pack(SampleExperts(triples), facts("float64"))
    close(got, wide.apply(x.double(), weights.double(), ids, held), 6e-2)


@needs_triton
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("size", "config"), configs("mla_decode"))
def test_mla_decode(size, config, kv_dtype, tree):
    from ds_runtime_triton.mla import MlaDecode

    here = facts(heads=20, kv_lora=64, qk_rope=16)
    kernel = MlaDecode(here)
    kernel.sizes = Sizes((1,), (config,))
    kernel.cores = 40
    make = Maker(here, "decode")
    lens = (1, 63, 64, 65, 300)
    cache = make.normal(30, 16, 80).to(kv_dtype)
    table = make.order(30)[:20].int().repeat(5, 1)
    limits = Limits(16, 8, 24, 16, 20, torch.device("cpu"), max_queries=2)
    rows = 10 if tree else 5
    batch = decode_batch(lens, table, (2,) * 5 if tree else ())
    if tree:  # a row of a tree sees some of the last 64 tokens, these lie in two blocks
        seen = make.integers(-(2**62), 2**62, rows) | (1 << 61)
        batch = replace(batch, decode=replace(batch.decode, tree=seen))
    state, q = kernel.state(limits), make.normal(rows, 20, 80)
    kernel.prepare(state, batch)
    with faithful():
        got = kernel.run(state, q, cache, 0.1)
    oracle = attention.ReferenceMlaDecode(here)
    held = oracle.state(limits)
    oracle.prepare(held, batch)
    close(got, oracle.run(held, q.double(), cache.double(), 0.1), 6e-3)


@needs_triton
@pytest.mark.parametrize("index_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(("size", "config"), configs("index_scores"))
def test_index_scores(size, config, index_dtype, monkeypatch):
    from ds_runtime_triton import index

    monkeypatch.setattr(index, "tuned", lambda *_: Sizes((1,), (config,)))
    here = replace(facts(), index_dtype=index_dtype)
    (case,) = (c for c in contract.index_scores_samples(here) if c.label == "prefill")
    args = case.calls[0].args
    cache = index_pages(args[2], here)
    with faithful():
        got = index.index_scores(*args[:2], cache, *args[3:])
    want = reference.index_scores(*args[:2], cache, *args[3:])
    unseen = want == float("-inf")
    close(got.masked_fill(unseen, 0.0), want.masked_fill(unseen, 0.0), 1e-5)


@needs_triton
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("size", "config"), configs("sparse_mla"))
def test_sparse_mla(size, config, grouped, monkeypatch):
    from ds_runtime_triton import sparse

    monkeypatch.setattr(sparse, "tuned", lambda *_: Sizes((1,), (config,)))
    monkeypatch.setattr(sparse, "cores", lambda: 40)
    make = Maker(facts(), "sparse")
    q, rows = make.normal(3, 20, 144), make.normal(80, 144)
    slots = torch.stack([make.order(80)[:70] for _ in range(3)]).int()
    slots[0, 5:9], slots[1, 33:], slots[2] = -1, -1, -1
    cache, run = rows.view(5, 16, 144), sparse.sparse_mla
    if grouped:
        cache, run = encoded(rows[:, :128], rows[:, 128:]).view(5, 16, -1), sparse.scaled_sparse_mla
        rows = decoded(cache.flatten(0, 1), 128)
    with faithful():
        got = run(q, cache, slots, 128, 0.1)
    want = attend_slots(q.double(), slots, 128, 0.1, lambda chosen: rows.double()[chosen])
    close(got, want, 6e-3)
    assert not got[2].any()


@needs_triton
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("size", "config"), configs("mha_prefill"))
def test_mha_prefill(size, config, causal, monkeypatch):
    from ds_runtime_triton import mha

    monkeypatch.setattr(mha, "tuned", lambda *_: Sizes((1,), (config,)))
    check_mha_prefill(causal, 16, 8)


@needs_triton
@pytest.mark.parametrize("nope", [48, 40, 96])  # 192 as 128 + 64, smaller; not all of a piece
def test_heads_between_powers_of_two_are_kept_in_two_pieces(nope):
    check_mha_prefill(True, nope, 16)


def check_mha_prefill(causal: bool, nope: int, rope: int):
    from ds_runtime_triton import mha

    make = Maker(facts(), "prefill")
    q_lens, k_lens = (3, 150), (150, 150)
    q, q_rope = make.normal(153, 2, nope), make.normal(153, 2, rope)
    k, k_rope = make.normal(300, 2, nope), make.normal(300, rope)
    parts = (q, q_rope, k, k_rope, make.normal(300, 2, 16))
    q_segs, k_segs = (
        Segments(n, torch.tensor([0, n[0], sum(n)], dtype=torch.int32)) for n in (q_lens, k_lens)
    )
    with faithful():
        got = mha.mha_prefill(*parts, q_segs, k_segs, causal, 0.2)
    wide = (part.double() for part in parts)
    want = attention.mha_prefill(*wide, q_segs, k_segs, causal, 0.2)
    close(got[0], want[0], 6e-3)
    close(got[1], want[1], 1e-5)


@needs_triton
@pytest.mark.parametrize("fmt", ["dense", "fp8_block"])
@pytest.mark.parametrize(("size", "config"), configs("absorb"))
def test_absorb(size, config, fmt):
    from ds_runtime_triton.absorb import MlaAbsorb

    here = facts(heads=2, qk_nope=128, v=128, kv_lora=256)
    kernel = MlaAbsorb(here)
    kernel.sizes = Sizes((1,), (config,))
    make, rows = Maker(here, f"absorb {size}"), min(size, 70)
    weight = make.weight(512, 256, fmt)
    packed = kernel.pack(weight, here)
    q, x = make.normal(rows, 2, 128), make.normal(rows, 2, 256)
    q_rope = make.inside(make.normal(rows, 2, 24), 8, 8)
    with faithful():
        up, down = kernel.apply_q(q, q_rope, packed), kernel.apply_v(x, packed)
    per_head = weight.dequantise(torch.float64).view(2, 256, 256)
    up, behind = up.split((256, 24), 2)
    assert torch.equal(behind, q_rope)
    close(up, torch.einsum("thk,hkn->thn", q.double(), per_head[:, :128]), 4e-3)
    close(down, torch.einsum("thk,hnk->thn", x.double(), per_head[:, 128:]), 4e-3)
    assert F.linear(x[:, 0], kernel._wide(packed.tensors["blocks"])).shape == (rows, 512)


@needs_triton
def test_float32_takes_the_generic_files():
    """Files of an architecture fill its memory on chip with elements of two bytes."""
    from ds_runtime_triton.experts import ExpertsDense
    from ds_runtime_triton.linear import LinearDense
    from ds_runtime_triton.mla import MlaDecode

    device = replace(DEVICE, arch="sm90")
    made = {}
    for dtype in ("float32", "bfloat16"):
        given = replace(facts(dtype, heads=128), device=device)
        places = LinearDense(given).facts, ExpertsDense(given).facts
        ops = "linear_dense", "experts_dense"
        made[dtype] = MlaDecode(given).sizes, *map(chosen, places, ops)
    for dtype, arch in (("float32", "generic"), ("bfloat16", "sm90")):
        decode = tuned(arch, "mla_decode", "H=128")
        assert made[dtype] == (decode, *(tuned(arch, op) for op in ops))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Expecting property name"),
        ("{}", "no 'shapes'"),
        ('{"shapes": {"*": {}}}', r"\*: no configuration"),
        ('{"shapes": {"*": {"x": {"A": 1}}}}', r"\*, x: whole numbers"),
        ('{"shapes": {"*": {"8": {"A": "1"}}}}', r"\*, 8: whole numbers"),
        ('{"shapes": {"*": [1]}}', "has no attribute"),
    ],
)
def test_a_broken_file_is_named(tmp_path, monkeypatch, text, said):
    (tmp_path / "configs" / "x1").mkdir(parents=True)
    (tmp_path / "configs" / "x1" / "op.json").write_text(text)
    monkeypatch.setattr(config_module, "files", lambda package: tmp_path)
    with pytest.raises(PluginError, match=rf"x1/op\.json: is no file of configurations: .*{said}"):
        config_module._file("x1", "op")
