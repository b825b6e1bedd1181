"""The npu plugin against stand-ins for torch-npu's ops: conformance, engines, refusals."""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from vendor_doubles import RefusedError, install, records, torch_npu
from vendor_doubles.served import INDEXED, TRUE, demo, on_host, serve
from vendor_doubles.served import platform as served_platform

from ds_runtime.api import Routing, install_command, route
from ds_runtime.config import EngineConfig
from ds_runtime.ops.binding.bind import refusal
from ds_runtime.ops.contract import Dims, Offers
from ds_runtime_bench import shapes
from ds_runtime_bench.checkpoints.checkpoint import make_checkpoint
from ds_runtime_kit.bisect.search import bisect
from ds_runtime_kit.checks.conformance import (
    SMALL_DIMS,
    TRUE_DIMS,
    cases_for,
    check_kernel,
    facts_for,
)
from ds_runtime_kit.devices import fake
from ds_runtime_kit.models import tiny
from ds_runtime_npu import attention, experts, kernels

sys.path.append(str(Path(__file__).parents[1] / "core" / "model"))
import published_kinds

KERNELS = (
    *kernels.ATTENTION,
    *kernels.MOE,
    *kernels.TOPK,
    *kernels.LINEAR,
    *kernels.SMALL,
)
OFFERS = Offers(KERNELS, (kernels.LATENT_SPLIT,))


@pytest.fixture(autouse=True)
def doubles(monkeypatch):
    install(monkeypatch, torch_npu.MODULES, torch_npu.ADAPTERS)


def label(kernel):
    return f"{kernel.op.name}-{kernel.fn.rpartition('.')[2]}"


PROLOG_DIMS = Dims({**TRUE_DIMS, "hidden": 6144, "q_lora": 1536})


@pytest.mark.parametrize("kernel", KERNELS, ids=label)
def test_an_op_conforms(kernel):
    ran = 0
    sizes = ((SMALL_DIMS, 16), (TRUE_DIMS, 64))
    for dims, page in ((PROLOG_DIMS, 16),) if kernel.op.name == "mla_inputs" else sizes:
        for dtype in ("bfloat16", "float16"):
            facts = facts_for(on_host("npu", "910b"), dtype, dims, page)
            ran += len(cases_for((kernel,), facts))
            assert [r for r in check_kernel(kernel, facts, OFFERS) if not r.ok] == []
    assert ran >= 2, "no sample was accepted"


def told(monkeypatch, name):
    """What each call of an op is given, by name."""
    package, calls = torch_npu.MODULES["torch_npu"], []
    op = getattr(package, name)

    def record(*args, **kwargs):
        calls.append(inspect.signature(op).bind(*args, **kwargs).arguments)
        return op(*args, **kwargs)

    monkeypatch.setattr(package, name, record)
    return calls


def test_the_prolog_has_the_models_epsilon_for_both_norms(monkeypatch):
    """Its own default is 1e-5."""
    calls = told(monkeypatch, "npu_mla_prolog_v3")
    facts = facts_for(on_host("npu", "910b"), "bfloat16", PROLOG_DIMS, 16)
    assert all(r.ok for r in check_kernel(by_fn(":MlaProlog"), facts, OFFERS))
    eps = {(c["rmsnorm_epsilon_cq"], c["rmsnorm_epsilon_ckv"]) for c in calls}
    assert eps == {(1e-6, 1e-6)}


def test_scores_near_zero_are_normalised():
    """The sum of the chosen ones is divided by, however small: nothing to speak of is added."""
    routing = Routing(4, 16, 2, 1, "sigmoid", "noaux_tc", True, 2.5)
    logits = torch.full((3, 16), -25.0) + torch.arange(16) / 8
    for bias in (None, torch.zeros(16)):
        weights, ids = experts.choose(logits, bias, routing)
        expected, same = route(logits, bias, routing)
        assert torch.equal(ids.sort(1).values, same.sort(1).values)
        torch.testing.assert_close(weights.sum(1), torch.full((3,), 2.5))
        torch.testing.assert_close(weights.sort(1).values, expected.sort(1).values)


@pytest.mark.parametrize("heads", [3, 12])
def test_sparse_attention_takes_any_number_of_heads(heads):
    """They are filled up to a power of two, which the op wants."""
    kernel = next(k for k in KERNELS if k.op.name == "sparse_decode")
    dims = Dims({**TRUE_DIMS, "heads": heads})
    results = check_kernel(kernel, facts_for(on_host("npu", "910b"), "bfloat16", dims, 16), OFFERS)
    assert results and [r for r in results if not r.ok] == []


def test_rows_too_wide_to_be_turned_are_turned_before():
    """128 local heads of 512 latent values are one more than the op takes transposed."""
    draw = torch.Generator().manual_seed(1)
    for heads in (127, 128):
        x = torch.randn(3, heads, 512, generator=draw).bfloat16()
        weight = torch.randn(heads, 512, 128, generator=draw).bfloat16()
        found = attention._per_head(x, weight)
        exact = torch.einsum("thk,hkn->thn", x.float(), weight.float())
        assert found.shape == (3, heads, 128)
        torch.testing.assert_close(found.float(), exact, rtol=0.01, atol=0.3)
    with pytest.raises(RefusedError, match="K · B below 65536"):
        torch_npu.npu_transpose_batchmatmul(x, weight, [1, 0, 2], [1, 0, 2])


ATTENTION = {"mla_decode": {"npu.MlaDecode"}, "mha_prefill": {"npu.mha_prefill"}}
SPARSE = {op: {"npu.sparse_mla"} for op in ("sparse_decode", "sparse_prefill")}
SPARSE["index_select"] = {"npu.index_select"}
SMALL = {k.op.name: {k.name} for k in kernels.SMALL}


def served(folder, model, experts, linear="npu.LinearDense", attention=ATTENTION, **settings):
    """The error of an engine whose kernels are these."""
    told = serve(folder, model, "npu", "910b", page_size=128, **settings)
    expected = {**attention, **SMALL, "experts": {experts}, "route": {"npu.choose"}}
    expected |= {"cache_write": {"npu.cache_write"}, "mla_absorb": {"npu.MlaAbsorb"}}
    assert expected.items() <= told.kernels.items() and linear in told.kernels["linear"]
    return told.error


def test_v3_in_bfloat16(tmp_path):
    model = tiny.write_tiny(tmp_path, "v3", 3, **TRUE)
    assert served(tmp_path, model, "npu.Experts") < 0.04


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "sizes"), [("v3", TRUE), ("v32", INDEXED)])
def test_with_the_prolog(tmp_path, shape, sizes):
    """The op is made for the widths of V3; a step that only decodes uses it, prefill does not. The
    indexer reads the query latent that it gives."""
    wide = {"hidden_size": 6144, "q_lora_rank": 1536, "n_routed_experts": 8, "n_group": 2}
    wide |= {"moe_intermediate_size": 64, "intermediate_size": 64, "topk_group": 1}
    model = tiny.write_tiny(tmp_path, shape, 3, **sizes | wide)
    given = {"page_size": 128}
    if shape == "v32":
        given["index_cache_dtype"] = "bfloat16"
    told = serve(tmp_path, model, "npu", "910b", **given)
    assert told.kernels["mla_inputs"] == {"npu.MlaProlog"}
    apart = serve(tmp_path, model, "npu", "910b", fusion=("mla_inputs=off",), **given)
    assert apart.kernels["mla_inputs"] == {"composed"}
    assert told.error < 1.1 * apart.error < (0.1 if shape == "v3" else 0.5)


def test_v2_with_an_odd_number_of_heads(tmp_path):
    """Heads are filled up to a power of two, and scores are not normalised."""
    odd = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 384}
    model = tiny.write_tiny(tmp_path, "v2", 3, **TRUE | odd)
    assert served(tmp_path, model, "npu.Experts") < 0.15


def test_v3_in_fp8_is_widened(tmp_path):
    """No FP8 on these chips."""
    model = tiny.write_tiny_fp8(tmp_path, "v3", 3, **TRUE)
    assert served(tmp_path, model, "npu.Experts") < 0.06


def test_v3_in_int8(monkeypatch, tmp_path):
    monkeypatch.setattr(published_kinds, "WIDTHS", TRUE)
    model = published_kinds.write_kind(tmp_path, "int8 rows", 3)
    assert served(tmp_path, model, "npu.ExpertsInt8", "npu.LinearInt8") < 0.2


def test_v32_sparse(tmp_path):
    """Index scores in bfloat16 choose other tokens than in float32: the references do so, too."""
    model = tiny.write_tiny(tmp_path, "v32", 3, **INDEXED)
    keys = {"index_cache_dtype": "bfloat16"}  # as the plugin wishes on its own device
    error = served(tmp_path, model, "npu.Experts", attention=SPARSE, **keys)
    plain = serve(tmp_path, model, "npu", "910b", without=("torch_npu",), **keys)
    assert plain.kernels["sparse_decode"] == {"reference.sparse_mla"}
    assert error < 1.2 * plain.error


def test_the_demo_model_adds():
    """Its heads are narrower than what attention takes: experts and the rest are the vendor's."""
    text, providers = demo("npu", "910b")
    assert text.endswith("579") and "npu" in providers


WIDE = Dims({**TRUE_DIMS, "index_topk": 2500})


@pytest.mark.parametrize(
    ("backend", "select", "topk"),
    [("npu", {"npu.index_select"}, set()), ("triton", {"composed"}, {"triton.index_topk"})],
)
def test_the_choice_of_tokens_has_a_backend(backend, select, topk):
    """That of the vendor is the fusion; one of a part alone takes it apart."""
    rows = fake.plan("demo-v32", "910b", nsa_topk_backend=backend).plan.rows
    assert {r.kernel for r in rows if r.op == "index_select"} == select
    assert {r.kernel for r in rows if r.op == "index_topk"} == topk


def test_every_call_of_a_model_is_held_against_its_reference(monkeypatch, tmp_path):
    """`ds-runtime bisect` over the split cache: latents and keys are no one row."""
    raw = {**shapes.SHAPES["tiny-v3"], **TRUE}
    monkeypatch.setattr(shapes, "SHAPES", {**shapes.SHAPES, "tiny-v3": raw})
    make_checkpoint(tmp_path, "tiny-v3", "bfloat16")
    given = {"model": str(tmp_path), "platform": "double", "plugins": ("npu",), "threads": 1}
    given |= {"dtype": "bfloat16", "page_size": 16, "kv_memory": 16 << 20, "context_length": 256}
    double = served_platform(on_host("npu", "910b"))
    config = EngineConfig(**given)
    finding = bisect(config, given, ["12+30=", "7"], 2, tmp_path / "case", [double])
    asked = {kernel for _, _, kernel in finding.shares}
    assert finding.culprit is None
    assert {"npu.MlaDecode", "npu.cache_write", "npu.Experts", "npu.MlaAbsorb"} <= asked


def by_fn(name):
    return next(k for k in KERNELS if k.fn.endswith(name))


def facts(**changes):
    return replace(facts_for(on_host("npu", "910b"), "bfloat16", TRUE_DIMS, 128), **changes)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (":MlaDecode", {"page_size": 100}, "multiples of 16 up to 1024: pass --page-size 128"),
        (":MlaDecode", {"page_size": 2048}, "page size 2048, takes multiples of 16 up to 1024"),
        (":MlaDecode", {"dims": SMALL_DIMS}, "made for 512 latent and 64 rotated values"),
        (":MlaDecode", {"dims": Dims({**TRUE_DIMS, "heads": 160})}, "at most 128 heads, not 160"),
        (":MlaProlog", {"dims": PROLOG_DIMS, "page_size": 64}, "takes 16 or 128: pass --page-size"),
        (":MlaProlog", {"dims": Dims({**PROLOG_DIMS, "hidden": 5120})}, "not 5120 and 1536"),
        (":MlaProlog", {"dims": Dims({**PROLOG_DIMS, "heads": 12})}, "a power of two of heads"),
        (":MlaProlog", {"dims": PROLOG_DIMS, "dtype": "float16"}, "computes in bfloat16, not"),
        (":index_select", {"dims": SMALL_DIMS}, "up to 64 index heads of 128 values, not 16 of 32"),
        (":index_select", {"dims": WIDE}, "or multiples of 1024 up to 8192, not 2500"),
        (":index_select", {"index_dtype": "float8_e4m3fn"}, "pass --index-cache-dtype bfloat16"),
        (":index_select", {"page_size": 24}, "takes multiples of 16 up to 1024"),
        (":MlaDecode", {"dtype": "float32"}, "computes in bfloat16 or float16, not float32"),
        (":sparse_mla", {"kv_dtype": "float8_e4m3fn"}, "pass --kv-cache-dtype auto"),
        (
            ":mha_prefill",
            {"dims": SMALL_DIMS},
            "made for heads of 128 + 64 and 128 dims, not",
        ),
        (":MlaAbsorb", {"dims": SMALL_DIMS}, "dims in multiples of 16, and 12 is none"),
        (":ExpertsInt8", {"shape": (8, 48, 256)}, "multiples of 32, and 48 is none"),
        (":LinearInt8", {"shape": (129280, 7168)}, "at most 65535 columns, not 129280"),
    ],
)
def test_refusals_are_sentences_with_their_reason(name, changes, said):
    format_ = {"weight_format": min(by_fn(name).formats)} if by_fn(name).formats else {}
    sentence = refusal(by_fn(name), facts(**format_ | changes))
    assert sentence is not None and said in sentence


def test_other_devices_and_missing_packages_are_named():
    norm, here = by_fn(":rms_norm"), on_host("npu", "910c")
    assert norm.refuse(facts(device=here)) is None
    bare = replace(here, features=frozenset({"bf16"}))
    said = norm.refuse(facts(device=bare))
    assert said == f"torch-npu is not installed: {install_command('npu')}"
    older = norm.refuse(facts(device=replace(here, arch="ascend310p")))
    assert older == "made for ascend910b and ascend910_93, not for ascend310p"
    elsewhere = norm.refuse(facts(device=fake.device("mi300x")))
    assert elsewhere == "runs on Ascend NPUs, not on AMD Instinct"


def test_every_call_of_the_plugin_is_recorded():
    """Ops are called as npu().NAME: the names are those in the record, no more and no fewer."""
    called = set()
    for file in Path(kernels.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.lstrip("_").startswith("npu_"):
                called.add(node.attr)
            if isinstance(node, ast.Attribute) and node.attr == "out":
                called.add(f"{node.value.attr}.out")
    assert called == {name.partition(":")[2] for name in records("torch_npu")}
