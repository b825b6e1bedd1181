"""The CUDA plugin's adapters against stand-ins for their libraries, over the conformance suite."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from vendor_doubles import cuda, install
from vendor_doubles.compiled import standing_in

from ds_runtime import api
from ds_runtime.ops.binding.bind import refusal
from ds_runtime.ops.contract import FP8_GROUPS, DeviceInfo, Dims
from ds_runtime.platform.probe import install_command
from ds_runtime.plugins.described_devices import describe
from ds_runtime.plugins.manager import load_plugins
from ds_runtime_cuda import blackwell, gates, kernels
from ds_runtime_kit.checks.conformance import (
    SMALL_DIMS,
    TRUE_DIMS,
    cases_for,
    check_kernel,
    facts_for,
)
from ds_runtime_kit.kit import Subject, check_codes

KERNELS = (*kernels.ATTENTION, *kernels.MOE, *kernels.LINEAR, *blackwell.ALL)
PLUGINS = load_plugins(["cuda"])


@pytest.fixture(autouse=True)
def doubles(monkeypatch):
    install(monkeypatch, cuda.MODULES, cuda.ADAPTERS)
    monkeypatch.setattr(torch, "_scaled_mm", cuda._scaled_mm)
    with standing_in(monkeypatch):
        yield


def device(arch: str, **changes) -> DeviceInfo:
    """A described GPU that computes on the host."""
    return replace(describe(PLUGINS, arch).info(), type="cpu", **changes)


MANY_HEADS = Dims({**TRUE_DIMS, "heads": 32})
ALL_HEADS = Dims({**TRUE_DIMS, "heads": 128})
CACHES = ("", "float8_e4m3fn", FP8_GROUPS)


def arch_of(kernel) -> str:
    """A device on which the kernel serves."""
    asked = product((TRUE_DIMS, MANY_HEADS), CACHES)
    kinds = [facts_for(device("sm90"), "bfloat16", dims, 64, kv) for dims, kv in asked]
    return "sm90" if any(kernel.refuse(facts) is None for facts in kinds) else "sm100"


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: f"{k.op.name}-{k.fn.rpartition('.')[2]}")
def test_an_adapter_conforms(kernel):
    info, ran = device(arch_of(kernel)), 0
    if kernel.fn.endswith("LinearDense12"):  # samples are smaller than what it is meant for
        checks = (c for c in kernel.refuse.checks if c is not gates.large)
        kernel = replace(kernel, refuse=api.gates(*checks, gates.not_large))
    for dims, page in ((SMALL_DIMS, 4), (TRUE_DIMS, 64), (MANY_HEADS, 64), (ALL_HEADS, 64)):
        if ran and dims in (MANY_HEADS, ALL_HEADS):
            break
        for dtype, kv in product(("bfloat16", "float16", "float32"), CACHES):
            facts = facts_for(info, dtype, dims, page, kv)
            if kernel.refuse(facts) is not None:
                continue
            ran += len(cases_for((kernel,), facts))
            results = check_kernel(kernel, facts, load_plugins(()).offers(facts))
            assert [r for r in results if not r.ok] == [], kernel.fn
    assert ran >= 2, "no sample was accepted"


@pytest.mark.parametrize(
    "kernel", [k for k in KERNELS if k.promises.takes_codes], ids=lambda k: k.fn
)
def test_codes_in_place_of_rows_give_the_same_bits(kernel):
    facts = facts_for(device(arch_of(kernel)), "bfloat16")
    found = check_codes(Subject(kernel, facts, load_plugins(()).offers(facts), "small"))
    assert found and [r for r in found if not r.ok] == []


def test_every_offer_is_told_apart():
    names = [(k.op.name, k.fn) for k in KERNELS]
    assert len(set(names)) == len(names)
    assert len({(k.op.name, k.name) for k in KERNELS}) == len(KERNELS)
    providers = {"cuda", "deep_gemm", "flash_mla", "flashinfer", "flashinfer_cutlass", "sgl_kernel"}
    assert {k.provider for k in KERNELS} == providers


def facts(arch="sm90", page=64, **changes):
    base = facts_for(device(arch), "bfloat16", TRUE_DIMS, page)
    return replace(base, **changes)


def by_fn(fn):
    return next(k for k in KERNELS if k.fn.endswith(fn))


@pytest.mark.parametrize(
    ("fn", "changes", "said"),
    [
        ("flash_mla:MlaDecode", {"page": 16}, "page size 16, takes 64: pass --page-size 64"),
        ("flash_mla:MlaDecode", {"arch": "sm100"}, "made for sm90, not for sm100"),
        ("flash_mla:MlaDecode", {"kv_dtype": "float8_e4m3fn"}, "reads a cache of the compute"),
        ("flash_mla:MlaDecode", {"dtype": "float32"}, "computes in bfloat16 or float16"),
        ("flash_mla:MlaDecode", {"dims": SMALL_DIMS}, "made for 512 latent and 64 rotated"),
        (
            "deep_gemm:LinearFp8",
            {"shape": (512, 200)},
            "groups of 128 inputs, and 200 are not",
        ),
        ("deep_gemm:index_scores", {}, "scores float8_e4m3fn keys, not bfloat16"),
        (
            "deep_gemm:index_scores",
            {"index_dtype": "float8_e4m3fn", "dims": Dims({"index_heads": 128, "index_dim": 128})},
            "up to 64 index heads of 32, 64 or 128 values, not 128 of 128",
        ),
        ("flash_mla:scaled_sparse_mla", {}, "reads a cache of fp8_groups, not of bfloat16"),
        ("flash_mla:sparse_mla", {"dtype": "float16"}, "computes in bfloat16, not float16"),
        ("deep_gemm:LinearFp8", {"shape": (12, 256)}, "a multiple of 8 outputs, not 12"),
        (
            "deep_gemm:ExpertsFp8",
            {"shape": (8, 192, 256)},
            "in multiples of 128, and 192 is none",
        ),
        (
            "grouped_fp8:ExpertsGrouped",
            {"shape": (8, 256, 640)},
            "writes 256 columns at a time, and 640 are not",
        ),
        (
            "experts_streaming:ExpertsBlock7",
            {"shape": (8, 2048, 7168)},
            "slower than portable kernels where tokens share few experts, as 8",
        ),
        ("flashinfer:MlaDecodeTrtllm", {}, "made for sm100 and sm103, not for sm90"),
        ("sgl_kernel:mha_prefill", {"dims": SMALL_DIMS}, "made for heads of 128 + 64 and 128 dims"),
        ("torch_ops:ExpertsGroupedMm", {"shape": (8, 64, 33)}, "whole 16 bytes, and 33 values"),
    ],
)
def test_refusals_are_sentences_with_their_reason(fn, changes, said):
    sentence = refusal(by_fn(fn), facts(**changes))
    assert sentence is not None and said in sentence


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: f"{k.op.name}-{k.fn.rpartition('.')[2]}")
def test_what_is_not_installed_is_named(kernel):
    arch = arch_of(kernel)
    bare = replace(facts(arch), device=device(arch, features=frozenset({"bf16", "fp8"})))
    own_source = kernel.provider == "cuda" and ".torch_ops:" not in kernel.fn
    module = "cuda.bindings" if own_source else kernel.provider.removesuffix("_cutlass")
    said = kernel.refuse(bare)
    if module == "cuda":
        assert said is None
        return
    names = {"deep_gemm": "sgl-deep-gemm", "flash_mla": "sgl-flash-mla"}
    names |= {"flashinfer": "flashinfer-python", "sgl_kernel": "sglang-kernel"}
    names |= {"cuda.bindings": "cuda-bindings"}
    assert said == f"{names[module]} is not installed: {install_command('cuda')}"
    empty = device(arch, features=frozenset({"bf16", "fp8", module}))
    refused = kernel.refuse(replace(bare, device=empty)) or ""
    assert own_source or f"the installed {module} has no " in refused
    mixed = device(arch, features=describe(PLUGINS, arch).info().features | {f"{module}:mixed"})
    assert "two packages" in (kernel.refuse(replace(bare, device=mixed)) or "")
    elsewhere = replace(bare, device=DeviceInfo("cpu", "host", "x86-64"))
    assert kernel.refuse(elsewhere) == "runs on NVIDIA GPUs, not on CPUs"
