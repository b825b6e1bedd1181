"""The npu plugin against stand-ins for torch-npu's ops: conformance, engines, refusals."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from vendor_doubles import install, records, torch_npu
from vendor_doubles.served import INDEXED, TRUE, demo, on_host, serve

from ds_runtime.ops.bind import refusal
from ds_runtime.ops.spec import Dims, Offers
from ds_runtime.testing import tiny
from ds_runtime.testing.conformance import SMALL_DIMS, TRUE_DIMS, cases_for, check_kernel, facts_for
from ds_runtime_npu import kernels

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


@pytest.mark.parametrize("kernel", KERNELS, ids=label)
def test_an_op_conforms(kernel):
    ran = 0
    for dims, page in ((SMALL_DIMS, 16), (TRUE_DIMS, 64)):
        for dtype in ("bfloat16", "float16"):
            facts = facts_for(on_host("npu", "910b"), dtype, dims, page)
            ran += len(cases_for((kernel,), facts))
            assert [r for r in check_kernel(kernel, facts, OFFERS) if not r.ok] == []
    assert ran >= 2, "no sample was accepted"


ATTENTION = {"mla_decode": {"npu.MlaDecode"}, "mha_prefill": {"npu.mha_prefill"}}
SPARSE = {"sparse_decode": {"npu.sparse_mla"}, "sparse_prefill": {"npu.sparse_mla"}}
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
    error = served(tmp_path, model, "npu.Experts", attention=SPARSE)
    plain = serve(tmp_path, model, "npu", "910b", without=("torch_npu",))
    assert plain.kernels["sparse_decode"] == {"reference.sparse_mla"}
    assert error < 1.2 * plain.error


def test_the_demo_model_adds():
    """Its heads are narrower than what attention takes: experts and the rest are the vendor's."""
    text, providers = demo("npu", "910b")
    assert text.endswith("579") and "npu" in providers


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
        (":MlaDecode", {"dtype": "float32"}, "computes in bfloat16 or float16, not float32"),
        (":sparse_mla", {"kv_dtype": "float8_e4m3fn"}, "pass --kv-cache-dtype auto"),
        (":MlaDecode", {"graph_capture": True}, "not safe under graph capture"),
        (":mha_prefill", {"dims": SMALL_DIMS}, "made for heads of 128 and 64 query and 128 value"),
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
    assert said == 'torch-npu is not installed: pip install "ds-runtime[npu]"'
    older = norm.refuse(facts(device=replace(here, arch="ascend310p")))
    assert older == "made for ascend910b and ascend910_93, not for ascend310p"
    elsewhere = norm.refuse(facts(device=replace(here, arch="gfx942")))
    assert elsewhere == "runs on Ascend NPUs, not on cpu"


def test_every_call_of_the_plugin_is_recorded():
    """Ops are called as npu().NAME: the names are those in the record, no more and no fewer."""
    called = set()
    for file in Path(kernels.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("npu_"):
                called.add(node.attr)
    assert called == {name.partition(":")[2] for name in records("torch_npu")}
