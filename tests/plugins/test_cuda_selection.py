"""What `auto` binds on described GPUs: models by device, with and without libraries."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.estimate import sparse_bytes
from ds_runtime.assembly.room import reserve
from ds_runtime.config import EngineConfig
from ds_runtime.errors import ConfigError, UnsupportedError
from ds_runtime.kv.budget import Room, kv_memory
from ds_runtime.ops.binding.bind import refusal
from ds_runtime.ops.contracts.attention.index import SCORES
from ds_runtime.plugins.described_devices import described
from ds_runtime.plugins.manager import load_plugins

FIXTURES = Path(__file__).parents[1] / "core" / "model" / "fixtures"
LIBRARIES = ("deep_gemm", "flash_mla", "flashinfer", "sgl_kernel")
OPS = ("mla_decode", "mha_prefill", "linear", "experts")
FP8 = "deepseek-v3"
BF16 = "deepseek-v2-lite"
SPARSE = "deepseek-v3.2"
OPS_SPARSE = ("index_scores", "sparse_prefill", "sparse_decode")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    def make(name):
        made = tmp_path_factory.mktemp(name)
        shutil.copy(FIXTURES / f"{name}.json", made / "config.json")
        return str(made)

    return make


def bound(folder, model, device, without=(), **settings):
    """The kernels of the heavy ops, where the cuda plugin alone offers any."""
    config = EngineConfig(model=folder(model), plugins=("cuda",), **settings)
    assembly = assemble(config, tuple(settings), device=device, without=without)
    assert assembly.left_out() == []
    plan = assembly.plan
    return {op: {r.kernel for r in plan.rows if r.op == op} for op in OPS}, plan


SGL, FI, DG = "sgl_kernel", "flashinfer", "deep_gemm"
CUBLAS, GROUPED = "cuda.LinearCublas", "cuda.ExpertsGroupedMm"
FLASH, OWN, CB = "flash_mla.MlaDecode", "cuda.mha_prefill", "cuda.bindings"
TABLE = [
    (FP8, "h200", (), FLASH, OWN, f"{DG}.LinearFp8", "cuda.ExpertsGrouped"),
    (FP8, "h200", (CB,), FLASH, f"{FI}.mha_prefill", f"{DG}.LinearFp8", f"{DG}.ExpertsFp8"),
    (FP8, "h200", (CB, FI), FLASH, f"{SGL}.mha_prefill", f"{DG}.LinearFp8", f"{DG}.ExpertsFp8"),
    (FP8, "h200", ("flash_mla", FI), f"{SGL}.MlaDecode", OWN, f"{DG}.LinearFp8",
     "cuda.ExpertsGrouped"),
    (FP8, "h200", (SGL, "flash_mla", DG), f"{FI}.MlaDecode", OWN, "cuda.LinearScaledMm",
     "cuda.ExpertsGrouped"),
    (FP8, "h200", ("triton",), f"{FI}.MlaDecode", OWN, CUBLAS, "cuda.ExpertsFp8"),
    (FP8, "sm100", (), f"{FI}.MlaDecodeTrtllm", f"{FI}.mha_prefill", f"{FI}.LinearGroupwise",
     f"{FI}.ExpertsTrtllm"),
    (FP8, "sm100", ("triton",), f"{FI}.MlaDecodeTrtllm", f"{FI}.mha_prefill", f"{FI}.LinearMxfp8",
     GROUPED),
    (BF16, "h200", (), "flash_mla.MlaDecodeFewHeads", OWN, CUBLAS, GROUPED),
    (BF16, "sm100", (), f"{FI}.MlaDecodeTrtllm", f"{FI}.mha_prefill", CUBLAS, GROUPED),
    (BF16, "a100", (), f"{FI}.MlaDecode", f"{FI}.mha_prefill", CUBLAS, GROUPED),
    (BF16, "rtx4090", (), f"{FI}.MlaDecode", f"{FI}.mha_prefill", CUBLAS, GROUPED),
    (BF16, "gb10", (), f"{FI}.MlaDecode", f"{FI}.mha_prefill", CUBLAS, GROUPED),
    (BF16, "a100", LIBRARIES, "reference.ReferenceMlaDecode", "reference.mha_prefill", CUBLAS,
     GROUPED),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "device", "without", "decode", "prefill", "linear", "experts"), TABLE
)
def test_auto(folder, model, device, without, decode, prefill, linear, experts):
    found, _ = bound(folder, model, device, without)
    assert found["mla_decode"] == {decode} and found["mha_prefill"] == {prefill}
    assert linear in found["linear"] and found["experts"] == {experts}


def test_libraries_that_compile_want_nvcc(folder):
    for model, device in ((FP8, "h200"), (FP8, "sm100"), (BF16, "sm100")):
        found, plan = bound(folder, model, device, ("nvcc",))
        providers = {name.partition(".")[0] for names in found.values() for name in names}
        assert not providers & {"deep_gemm", "flashinfer"}
    (row,) = (r for r in plan.rows if r.op == "mla_decode")
    said = dict(row.refused)["flashinfer.MlaDecodeTrtllm"]
    assert said == (
        "flashinfer-python compiles its kernels by nvcc, and there is none: install a CUDA toolkit "
        "with nvcc and set CUDA_HOME to it"
    )


def test_switching_one_fusion_off_leaves_the_plugins_wish_in_force(folder):
    """TRT-LLM's experts come in fours: without the wish they would give way, unsaid."""
    found, plan = bound(folder, FP8, "sm100", fusion=("qkv_a=off",))
    assert found["experts"] == {f"{FI}.ExpertsTrtllm"}
    assert ("fusion", "('qkv_a=off',) → ('qkv_a=off', 'shared_experts=off')") in [
        c[:2] for c in plan.changes
    ]


def test_fp8_weights_that_become_bfloat16_are_said_and_strictly_refused(folder):
    """An A100 multiplies no FP8: what its kernels hold is twice as large."""
    config = EngineConfig(model=folder(FP8), plugins=("cuda", "triton"))
    plan = assemble(config, (), device="a100").plan
    rows = [r for r in plan.rows if r.op in ("linear", "experts") and r.provider != "reference"]
    said = {r.converts for r in rows if "lm_head" not in r.sites and "gate" not in str(r.sites)}
    assert "fp8_block → dense (8 → 16 bits per weight; exact to the compute dtype)" in said
    with pytest.raises(UnsupportedError, match="--strict-ops: weights would be converted"):
        assemble(replace(config, strict_ops=True), (), device="a100")


def test_pages_of_64_are_wished_for_and_16_costs_the_page_kernels(folder):
    _, plan = bound(folder, FP8, "h200")
    assert plan.page_size == 64
    found, plan = bound(folder, FP8, "sm100", page_size=16)
    assert plan.page_size == 16 and found["mla_decode"] == {"flashinfer.MlaDecode"}
    (row,) = (r for r in plan.rows if r.op == "mla_decode")
    said = dict(row.refused)
    assert said["flashinfer.MlaDecodeTrtllm"] == "page size 16, takes 32 or 64: pass --page-size 64"


def test_the_head_and_the_router_stay_dense(folder):
    _, plan = bound(folder, FP8, "h200")
    (dense,) = (r for r in plan.rows if r.op == "linear" and r.kernel == "cuda.LinearCublas")
    assert dense.sites == ("lm_head",)


def test_what_lacks_captures_is_said(folder):
    _, plan = bound(folder, BF16, "a100", LIBRARIES)
    (change,) = (c for c in plan.changes if c[0] == "disable_graph")
    assert "mla_decode (reference.ReferenceMlaDecode)" in change[3]


@pytest.mark.parametrize("device", ["a100", "l40s", "rtx5090", "gb10"])
def test_a_grouped_matmul_that_waits_for_the_host_is_not_captured(folder, device):
    """torch has one of its own for 9.0 and 10; elsewhere it reads where groups end on the host."""

    def said(device, captured):
        assembly = assemble(EngineConfig(model=folder(BF16)), (), device=device)
        (kernel,) = (k for k in assembly.offers.kernels if k.name == GROUPED)
        facts = replace(assembly.facts, weight_format="dense", shape=(64, 1408, 2048))
        return refusal(kernel, replace(facts, graph_capture=captured))

    arch = {"a100": "sm80", "l40s": "sm89", "rtx5090": "sm120", "gb10": "sm121"}[device]
    wanted = f"waits for the host on {arch}, which no capture can: pass --disable-graph"
    assert str(said(device, True)) == wanted
    assert said(device, False) is None
    for other in ("h200", "b200", "b300"):
        assert said(other, True) is None


def test_devices_are_well_formed():
    found = {name: p.info() for name, p in described(load_plugins(["cuda"]))}
    assert {"a100", "h100", "h200", "b200"} <= found.keys()
    assert all(info.type == "cuda" and info.arch.startswith("sm") for info in found.values())


def test_described_software_is_all_that_kernels_look_for():
    """No kernel of the plugin waits for a function that the described software lacks."""
    file = Path(__import__("ds_runtime_cuda").__file__).with_name("devices.json")
    installed = set(json.loads(file.read_text())["installed"])
    from ds_runtime_cuda import kernels

    every = (*kernels.ATTENTION, *kernels.MOE, *kernels.LINEAR)
    others = [k.fn for k in every if k.provider != "cuda"]
    modules = {fn.partition(".")[2].partition(":")[0] for fn in others}
    assert modules | {"cuda.bindings"} <= installed


@pytest.mark.skipif(find_spec("triton") is None, reason="portable kernels want Triton installed")
@pytest.mark.parametrize(
    ("model", "device", "without", "decode", "linear", "experts"),
    [
        (FP8, "h200", (), FLASH, f"{DG}.LinearFp8", "triton.experts_fp8"),
        (FP8, "h200", LIBRARIES, "triton.mla_decode", "cuda.LinearScaledMm", "triton.experts_fp8"),
        (FP8, "sm100", (), f"{FI}.MlaDecodeTrtllm", f"{FI}.LinearGroupwise", f"{FI}.ExpertsTrtllm"),
        (FP8, "sm100", LIBRARIES, "triton.mla_decode", "triton.linear_fp8", "triton.experts_fp8"),
        (BF16, "h200", (), "triton.mla_decode", "triton.linear_dense", "triton.experts_dense"),
        (BF16, "a100", (), "triton.mla_decode", "triton.linear_dense", "triton.experts_dense"),
    ],
)
def test_auto_with_portable_kernels(folder, model, device, without, decode, linear, experts):
    """No op on the reference, and decode steps are captured."""
    config = EngineConfig(model=folder(model), plugins=("cuda", "triton"), strict_ops=True)
    assembly = assemble(config, (), device=device, without=without)
    found = {op: {r.kernel for r in assembly.plan.rows if r.op == op} for op in OPS}
    assert found["mla_decode"] == {decode} and found["mha_prefill"] == {
        OWN if device == "h200" else "triton.mha_prefill"
    }
    assert linear in found["linear"] and found["experts"] == {experts}
    assert assembly.facts.graph_capture and not assembly.config.disable_graph
    assert {r.provider for r in assembly.plan.rows} & {"reference"} == set()


@pytest.mark.skipif(find_spec("triton") is None, reason="portable kernels want Triton installed")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_sparse_attention_is_captured(folder, kv_cache_dtype):
    """No op of V3.2 is on the reference, and what choosing tokens holds is kept free."""
    config = EngineConfig(
        model=folder(SPARSE),
        plugins=("cuda", "triton"),
        strict_ops=True,
        kv_cache_dtype=kv_cache_dtype,
    )
    assembly = assemble(config, (), device="h200")
    assert assembly.facts.graph_capture and not assembly.config.disable_graph
    assert {r.provider for r in assembly.plan.rows} & {"reference"} == set()
    bound = {op: {r.kernel for r in assembly.plan.rows if r.op == op} for op in OPS_SPARSE}
    flash = "flash_mla.scaled_sparse_mla" if kv_cache_dtype == "fp8" else "flash_mla.sparse_mla"
    assert bound["index_scores"] == {"deep_gemm.index_scores"}
    assert bound["sparse_decode"] == bound["sparse_prefill"] == {flash}
    assert assembly.plan.kv_layout.startswith(
        "latent_fp8" if kv_cache_dtype == "fp8" else "latent_p"
    )
    assert sparse_bytes(assembly) > 4 * SCORES - 4 * 163840  # whole rows of scores
    total = 40 << 30  # so that nine tenths are not what limits the cache
    found = kv_memory(assembly, Room(total, total, 30 << 30), 163840)
    left = (30 << 30) - reserve(assembly).total
    assert found.total <= left < found.total + found.sizes.page
    assert reserve(assembly).activations > sparse_bytes(assembly)


@pytest.mark.parametrize(
    ("device", "flags", "op", "kernel"),
    [
        ("h200", {"nsa_prefill_backend": "fa3"}, "sparse_prefill", "sgl_kernel.sparse_mla"),
        ("h200", {"nsa_decode_backend": "fa3"}, "sparse_decode", "sgl_kernel.sparse_mla"),
        ("h200", {"nsa_topk_backend": "flashinfer"}, "index_topk", "flashinfer.index_topk"),
        ("b200", {"nsa_topk_backend": "flashinfer"}, "index_topk", "flashinfer.index_topk"),
        ("h200", {"nsa_topk_backend": "torch"}, "index_topk", "torch.topk"),
        ("mi300x", {"nsa_topk_backend": "torch"}, "index_topk", "torch.topk"),
    ],
)
def test_names_of_sparse_kernels_bind_them_in_captured_steps(folder, device, flags, op, kernel):
    config = EngineConfig(model=folder(SPARSE), tp=8, attention_backend="nsa", **flags)
    assembly = assemble(config, ("tp", "attention_backend", *flags), device=device)
    found = {d.kernel for d in assembly.binding.decisions if d.op == op}
    assert found == {kernel} and assembly.facts.graph_capture


def test_cutlass_mla_is_for_all_heads_on_capability_10(folder):
    given = {"attention_backend": "cutlass_mla", "tp": 8, "enable_dp_attention": True}
    config = EngineConfig(model=folder(FP8), **given)
    assembly = assemble(config, tuple(given), device="b200")
    found = {d.kernel for d in assembly.binding.decisions if d.op == "mla_decode"}
    assert found == {"flashinfer_cutlass.MlaDecode"} and assembly.facts.graph_capture
    config = replace(config, enable_dp_attention=False)
    with pytest.raises(ConfigError, match=r"128 heads of a rank, not 16: pass --enable-dp-att"):
        assemble(config, ("attention_backend", "tp"), device="b200")
    with pytest.raises(ConfigError, match=r"'cutlass_mla': refused .*sm90"):
        assemble(config, ("attention_backend", "tp"), device="h200")


def test_nsa_is_no_name_of_dense_attention(folder):
    config = EngineConfig(model=folder(BF16), attention_backend="nsa")
    with pytest.raises(ConfigError, match=r"--attention-backend 'nsa': .* its attention is dense"):
        assemble(config, ("attention_backend",), device="h200")
