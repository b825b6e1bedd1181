"""The xpu plugin's adapters against stand-ins for their packages, over the conformance suite."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch.nn.functional as F
from vendor_doubles import install, xpu

from ds_runtime.ops.binding.bind import refusal
from ds_runtime.ops.contract import DeviceInfo, Dims, Offers
from ds_runtime.platform.probe import install_command
from ds_runtime.plugins.described_devices import describe
from ds_runtime.plugins.manager import load_plugins
from ds_runtime_kit.checks.conformance import (
    SMALL_DIMS,
    TRUE_DIMS,
    cases_for,
    check_kernel,
    facts_for,
)
from ds_runtime_xpu import kernels

KERNELS = (*kernels.ATTENTION, *kernels.MOE, *kernels.LINEAR)
PLUGINS = load_plugins(["xpu"])
SCALED_MM = inspect.signature(F.scaled_mm)
NAMES = [f"{k.op.name}-{k.fn.rpartition('.')[2]}" for k in KERNELS]


@pytest.fixture(autouse=True)
def doubles(monkeypatch):
    install(monkeypatch, xpu.MODULES, xpu.ADAPTERS)
    xpu.install_ops(monkeypatch)


def facts(page=64, dtype="bfloat16", dims=TRUE_DIMS, kv_dtype="", **changes):
    info = replace(describe(PLUGINS, "b60").info(), type="cpu", **changes.pop("device", {}))
    made = facts_for(info, dtype, dims, page, kv_dtype)
    return replace(made, index_dtype="float8_e4m3fn", **changes)


@pytest.mark.parametrize("kernel", KERNELS, ids=NAMES)
def test_an_adapter_conforms(kernel):
    ran = 0
    dims = Dims({**TRUE_DIMS, "heads": 8})
    for page in (64, 16) if kernel.op.layout else (64,):
        for dtype in ("bfloat16", "float16"):
            asked = facts(page, dtype, dims)
            if kernel.refuse(asked) is None:
                ran += len(cases_for((kernel,), asked))
                offers = Offers(tuple(k for k in KERNELS if k.op.layout), ())
                assert [r for r in check_kernel(kernel, asked, offers) if not r.ok] == [], kernel.fn
    assert ran, "no sample was accepted"


def test_torch_takes_what_its_stand_in_takes():
    took = inspect.signature(xpu.scaled_mm).parameters
    assert set(took) <= set(SCALED_MM.parameters)
    assert list(took)[:6] == list(SCALED_MM.parameters)[:6]


@pytest.mark.parametrize(
    ("fn", "changes", "said"),
    [
        ("sgl_kernel:MlaDecode", {"page": 4}, "page size 4, takes 16 or 32 or 64 or 128: pass"),
        ("sgl_kernel:MlaDecode", {"dims": SMALL_DIMS}, "made for 512 latent and 64 rotated"),
        ("sgl_kernel:MlaDecode", {"dtype": "float32"}, "computes in bfloat16 or float16, not"),
        ("sgl_kernel:MlaDecode", {"kv_dtype": "float8_e4m3fn"}, "pass --kv-cache-dtype auto"),
        (
            "sgl_kernel:MlaDecode",
            {"dims": Dims({**TRUE_DIMS, "heads": 192})},
            "takes at most 128 heads, not 192: raise --tp",
        ),
        ("sgl_kernel:MlaDecode", {"device": {"arch": "xe-hpc"}}, "made for xe2-hpg (Arc B-series)"),
        ("sgl_kernel:sparse_mla", {}, "takes multiples of 8 heads, not 4"),
        ("vllm_index:index_scores", {"page": 16}, "page size 16, takes 64: pass --page-size 64"),
        ("vllm_index:index_scores", {"dims": SMALL_DIMS}, "64 index heads of 128 values, not 16"),
        (
            "vllm_moe:ExpertsFp8",
            {"shape": (8, 192, 256)},
            "in multiples of 128, and 192 is none",
        ),
        ("vllm_moe:ExpertsFp8", {"device": {"arch": "xe-hpc"}}, "not for xe-hpc"),
        ("vllm_moe:ExpertsDense", {"shape": (8, 64, 33)}, "whole 16 bytes, and 33 values are none"),
        ("torch_ops:LinearScaledMm", {"shape": (24, 256)}, "a multiple of 16 outputs, not 24"),
        ("torch_ops:LinearScaledMm", {"shape": (16, 200)}, "200 are not whole groups"),
    ],
)
def test_refusals_are_sentences_with_their_reason(fn, changes, said):
    kernel = next(k for k in KERNELS if k.fn.endswith(fn))
    assert said in (refusal(kernel, facts(**changes)) or "")


@pytest.mark.parametrize("kernel", KERNELS, ids=NAMES)
def test_what_is_not_installed_is_named(kernel):
    bare = facts(device={"features": frozenset({"bf16"})})
    elsewhere = replace(bare, device=DeviceInfo("cpu", "host", "x86-64"))
    assert kernel.refuse(elsewhere) == "runs on Intel GPUs, not on CPUs"
    if kernel.name == "xpu.LinearOneDnn":
        assert kernel.refuse(bare) is None
        return
    said = kernel.refuse(bare) or ""
    names = {
        "sgl_xpu": "sglang-kernel-xpu is not installed: install a wheel of",
        "xpu": "torch is not installed: pip install torch==",
    }
    assert names.get(kernel.provider, "vllm-xpu-kernels is not installed: pip install") in said
    if kernel.provider == "xpu":
        older = facts(device={"features": frozenset({"bf16", "torch"})})
        assert "the installed torch has no scaled_mm: pip install" in (kernel.refuse(older) or "")
    if kernel.provider == "sgl_xpu":
        wrong = describe(PLUGINS, "b60").info().features - {"sgl_kernel"} | {"sgl_kernel:other"}
        said = kernel.refuse(facts(device={"features": wrong}))
        assert said.startswith(
            "the installed sgl_kernel is the build for NVIDIA GPUs: uninstall it"
        )
        older = describe(PLUGINS, "b60").info().features - {"sgl_kernel.flash_mla_decode"}
        said += kernel.refuse(facts(device={"features": older})) or ""
        assert install_command("xpu") not in said and "its releases (docs/install.md)" in said
