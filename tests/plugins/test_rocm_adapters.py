"""The ROCm plugin's adapters against stand-ins for AITER: conformance, engines, refusals."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from vendor_doubles import aiter, install, records
from vendor_doubles.served import INDEXED, TRUE, answers, demo, on_host, serve

from ds_runtime.api import Routing, route
from ds_runtime.ops.binding.bind import refusal
from ds_runtime.ops.contract import Dims, Offers
from ds_runtime.ops.contracts.moe import _experts_case
from ds_runtime.ops.reference.cases import Maker
from ds_runtime_bench import shapes
from ds_runtime_bench.checkpoints.checkpoint import make_checkpoint
from ds_runtime_kit.checks.conformance import (
    SMALL_DIMS,
    TRUE_DIMS,
    cases_for,
    check_case,
    check_kernel,
    facts_for,
)
from ds_runtime_kit.devices import fake
from ds_runtime_kit.models import tiny
from ds_runtime_rocm import aiter_moe, kernels, software

sys.path.append(str(Path(__file__).parents[1] / "core" / "model"))
import published_kinds

ALL = (*kernels.ATTENTION, *kernels.MOE, *kernels.TOPK, *kernels.LINEAR)
KERNELS = tuple(k for k in ALL if k.provider != "tilelang")
DEVICES = {"gfx942": "mi300x", "gfx950": "mi355x"}


@pytest.fixture(params=DEVICES)
def gfx(request, monkeypatch):
    install(monkeypatch, aiter.MODULES, aiter.ADAPTERS)
    monkeypatch.setattr(aiter, "GFX", request.param)
    return request.param


def label(kernel):
    return f"{kernel.op.name}-{kernel.fn.rpartition('.')[2]}"


@pytest.mark.parametrize("kernel", KERNELS, ids=label)
def test_an_adapter_conforms(kernel, gfx):
    info, ran = on_host("rocm", DEVICES[gfx]), 0
    for dims, page in ((SMALL_DIMS, 4), (TRUE_DIMS, 64)):
        for dtype in ("bfloat16", "float16"):
            facts = facts_for(info, dtype, dims, page)
            if kernel.refuse(facts) is not None:
                continue
            ran += len(cases_for((kernel,), facts))
            offers = Offers(tuple(k for k in KERNELS if k.op.layout), ())
            results = check_kernel(kernel, facts, offers)
            assert [r for r in results if not r.ok] == [], kernel.fn
    elsewhere = f"not for {gfx}" in (kernel.refuse(facts_for(info, "bfloat16", TRUE_DIMS)) or "")
    assert ran >= 2 or elsewhere or kernel == by_fn(":ExpertsMxfp4"), "no sample was accepted"


def test_more_tokens_than_the_library_leaves_unnormalised_go_in_parts(gfx):
    """The stand-in refuses more than 212 a compute unit without renormalising, as the library."""
    routing = Routing(2, 8, 2, 1, "sigmoid", "noaux_tc", False, 2.5)
    logits = torch.randn(212 * 256 + 1, 8, generator=torch.Generator().manual_seed(3))
    bias = torch.zeros(8)
    weights, ids = aiter_moe.route(logits, bias, routing)
    expected, same = route(logits, bias, routing)
    assert torch.equal(ids.sort(1).values, same.sort(1).values)
    torch.testing.assert_close(weights.sort(1).values, expected.sort(1).values)


ATTENTION = {"mla_decode": {"aiter.MlaDecode"}, "mha_prefill": {"aiter.mha_prefill"}}
SPARSE = {"sparse_decode": {"aiter.sparse_mla"}, "sparse_prefill": {"aiter.sparse_mla"}}
FP8 = {"gfx942": "aiter.LinearFp8", "gfx950": "aiter.LinearFp8Shuffled"}


def served(folder, model, gfx, experts, linear="rocm.LinearHipblas", attention=ATTENTION):
    """The error of an engine whose kernels are these."""
    told = serve(folder, model, "rocm", DEVICES[gfx])
    expected = {**attention, "experts": {experts}, "route": {"aiter.route"}}
    assert expected.items() <= told.kernels.items() and linear in told.kernels["linear"]
    return told.error


def test_v3_in_bfloat16(gfx, tmp_path):
    model = tiny.write_tiny(tmp_path, "v3", 3, **TRUE)
    assert served(tmp_path, model, gfx, "aiter.ExpertsDense") < 0.04


def test_v3_in_fp8(gfx, tmp_path):
    model = tiny.write_tiny_fp8(tmp_path, "v3", 3, **TRUE)
    assert served(tmp_path, model, gfx, "aiter.ExpertsFp8", FP8[gfx]) < 0.3


def test_v32_sparse(gfx, tmp_path):
    """Index scores in bfloat16 choose other tokens than in float32: the references do so, too."""
    model = tiny.write_tiny(tmp_path, "v32", 3, **INDEXED)
    error = served(tmp_path, model, gfx, "aiter.ExpertsDense", attention=SPARSE)
    pins = tuple(f"{op}=reference.sparse_mla" for op in SPARSE)
    plain = serve(tmp_path, model, "rocm", DEVICES[gfx], pin=pins)
    assert plain.kernels["sparse_decode"] == {"reference.sparse_mla"}
    assert error < 1.2 * plain.error


@pytest.mark.parametrize("gfx", ["gfx942"], indirect=True)
def test_drafts_are_verified_by_the_librarys_prefill(monkeypatch, gfx, tmp_path):
    """Answers with drafts are those without, token for token."""
    raw = {**shapes.SHAPES["tiny-v3"], **TRUE, "num_nextn_predict_layers": 1}
    monkeypatch.setattr(shapes, "SHAPES", {**shapes.SHAPES, "tiny-v3": raw})
    make_checkpoint(tmp_path, "tiny-v3", "bfloat16")
    plain, _ = answers(tmp_path, "rocm", DEVICES[gfx])
    drafted, kernels = answers(
        tmp_path, "rocm", DEVICES[gfx], speculative_algorithm="NEXTN", speculative_num_steps=2
    )
    assert drafted == plain
    assert kernels["mla_decode"] == {"aiter.MlaDecode", "aiter.MlaVerify"}


def test_v3_in_mxfp4(monkeypatch, gfx, tmp_path):
    """Where the GPU multiplies it activations are FP4, too; elsewhere weights are widened."""
    monkeypatch.setattr(published_kinds, "WIDTHS", TRUE)
    model = published_kinds.write_kind(tmp_path, "quark", 3)
    if gfx == "gfx942":
        assert served(tmp_path, model, gfx, "aiter.ExpertsDense") < 0.15
    else:
        error = served(tmp_path, model, gfx, "aiter.ExpertsMxfp4", "aiter.LinearMxfp4")
        other = tiny.make_model("v3", 4, **TRUE)
        assert error < 0.5 * serve(tmp_path, other, "rocm", DEVICES[gfx]).error


def test_fp4_experts(gfx):
    """The core's samples are narrower than what the library takes."""
    kernel, facts = by_fn(":ExpertsMxfp4"), facts_for(on_host("rocm", "mi355x"), "bfloat16")
    case = _experts_case(Maker(facts, "wide"), "wide", (3, 512, 256), "mxfp4")
    if gfx == "gfx950":
        check_case(kernel, case).raise_if_failed()
    else:
        assert "no FP4 on gfx942" in check_case(kernel, case).failure


@pytest.mark.parametrize("gfx", ["gfx950"], indirect=True)
def test_the_demo_model_adds(gfx):
    """Its heads are narrower than what attention takes: experts and the rest are the vendor's."""
    text, providers = demo("rocm", DEVICES[gfx])
    assert text.endswith("579") and "aiter" in providers


def by_fn(name):
    return next(k for k in ALL if k.fn.endswith(name))


def facts(device="mi355x", **changes):
    return replace(facts_for(on_host("rocm", device), "bfloat16", TRUE_DIMS, 64), **changes)


@pytest.mark.parametrize(
    ("name", "device", "changes", "said"),
    [
        ("MlaDecode", "mi300x", {"dims": SMALL_DIMS}, "made for 512 latent and 64 rotated"),
        ("MlaDecode", "mi300x", {"dims": Dims({**TRUE_DIMS, "heads": 160})}, "at most 128 heads"),
        ("MlaDecode", "mi300x", {"dtype": "float16"}, "computes in bfloat16, not float16"),
        ("MlaDecode", "mi300x", {"kv_dtype": "float8_e4m3fn"}, "pass --kv-cache-dtype auto"),
        ("MlaVerify", "mi300x", {"dims": Dims({**TRUE_DIMS, "heads": 32})}, "or 128, not 32"),
        ("MlaVerify", "mi300x", {"phase": "decode"}, "does not serve the decode phase"),
        ("mha_prefill", "mi300x", {"dims": SMALL_DIMS}, "made for heads of 128 + 64 and 128 dims"),
        ("ExpertsFp8", "mi300x", {"shape": (8, 192, 256)}, "multiples of 128, and 192 is none"),
        ("ExpertsMxfp4", "mi300x", {}, "made for gfx950, not for gfx942"),
        ("LinearMxfp4", "mi355x", {"shape": (512, 80)}, "groups of 128 inputs, and 80 are not"),
        ("LinearFp8", "mi300x", {"shape": (12, 256)}, "a multiple of 16 outputs, not 12"),
        ("LinearFp8", "mi355x", {}, "made for gfx942, not for gfx950"),
        ("tilelang_dsa:sparse_mla", "mi355x", {}, "tilelang is not installed: pip install"),
    ],
)
def test_refusals_are_sentences_with_their_reason(name, device, changes, said):
    format_ = {"weight_format": min(by_fn(name).formats)} if by_fn(name).formats else {}
    sentence = refusal(by_fn(name), facts(device, **format_ | changes))
    assert sentence is not None and said in sentence


def having(*features, **changes):
    device = replace(on_host("rocm", "mi300x"), features=frozenset({"bf16", *features}), **changes)
    return replace(facts(), device=device)


def test_what_is_not_installed_or_too_old_is_named():
    decode = by_fn(":MlaDecode")
    assert "amd-aiter is not installed: install amd-aiter from source" in decode.refuse(having())
    assert "the installed aiter has no mla.mla_decode_fwd" in decode.refuse(having("aiter"))
    assert "PyPI's, an async iterator: pip uninstall aiter" in decode.refuse(having("aiter:other"))
    assert "gfx942 and gfx950, not for gfx1100" in decode.refuse(having(arch="gfx1100"))
    elsewhere = replace(facts(), device=fake.device("h200"))
    assert decode.refuse(elsewhere) == "runs on AMD Instinct, not on NVIDIA GPUs"


def test_installed_functions_are_found_without_an_import(tmp_path):
    files = {
        "mla.py": "def mla_decode_fwd(): ...",
        "ops/quant.py": "def per_group_quant_hip(): ...",
    }
    files["__init__.py"] = "if A:\n    pass\nelse:\n    from .ops.quant import *\n"
    (tmp_path / "ops").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = set(software.AITER.find({"aiter": tmp_path}.get))
    assert found == {"aiter", "aiter.mla.mla_decode_fwd", "aiter.per_group_quant_hip"}
    (tmp_path / "mla.py").unlink()
    assert set(software.AITER.find({"aiter": tmp_path}.get)) == {"aiter:other"}


def test_every_call_of_the_plugin_is_recorded():
    """What gates look for, and what devices.json says is installed, are recorded functions."""
    file = Path(kernels.__file__).with_name("devices.json")
    installed = {n for n in json.loads(file.read_text())["installed"] if n.startswith("aiter.")}
    recorded = {name.replace(":", ".") for name in records("aiter")}
    assert installed == recorded
