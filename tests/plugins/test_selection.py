"""Selection on every device that plugins describe: a golden table, reviewed as a diff."""

from __future__ import annotations

from pathlib import Path

import pytest

import gen_selection
from ds_runtime.errors import ConfigError
from ds_runtime.plugins.manager import load_plugins
from ds_runtime_cpu import isa, machine
from ds_runtime_kit.devices import fake
from parts import mostly_slow

ROOT = Path(__file__).parents[2]
NAMED = (
    "a100 rtx4090 l40s h100 h200 b200 b300 rtx5090 gb10 mi300x mi355x 910b 910c max1550 b580 b60 "
    "epyc-9755 graviton4"
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "device", mostly_slow(["h200", "mi300x", "910b", "b580", "epyc-9755", "b200", None], 6)
)
def test_the_table_is_as_written(device):
    """A device of each platform; all of them take minutes."""
    changed = "\n".join(gen_selection.difference(device))
    assert not changed, f"run tools/gen_selection.py and review the diff:\n{changed}"


def test_a_section_that_differs_is_told(monkeypatch, tmp_path):
    other = tmp_path / "selection.txt"
    text = gen_selection.TABLE.read_text()
    begin = text.index("\n## graviton4:")
    other.write_text(text[:begin] + text[begin:].replace("cpu.", "gpu.", 1))
    monkeypatch.setattr(gen_selection, "TABLE", other)
    assert [line for line in gen_selection.difference("graviton4") if line.startswith("-  ")]


def test_every_plugin_with_a_platform_describes_devices():
    found = fake.devices()
    assert set(NAMED.split()) <= found.keys()
    assert {p.name for p in found.values()} == {"cuda", "rocm", "npu", "xpu", "cpu"}
    for name, platform in found.items():
        info = platform.info()
        assert fake.device(name) == info
        assert info.memory > 4e9 and info.cores > 1 and "float32" in info.fast_dtypes
        # An FP8 matmul is one of the device's type, not of another vendor's encoding.
        assert ("fp8" in info.features) == ("float8_e4m3fn" in info.fast_dtypes)


def test_what_nothing_has_run_on_is_marked():
    """README.md says where something has; of accelerators, on two."""
    found = fake.devices()
    run = {name for name, p in found.items() if p.name != "cpu" and not p.unrun}
    assert run == {"h100", "h200"}
    assert {n for n in NAMED.split() if found[n].unrun} == set(NAMED.split()) - run - {
        "epyc-9755",
        "graviton4",
    }
    page = (ROOT / "docs/support.md").read_text()
    for name, platform in found.items():
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {name} | "))
        assert line.endswith(", *unrun* |") == platform.unrun


FAMILIES = {
    "cuda": "NVIDIA GPUs",
    "rocm": "AMD Instinct",
    "npu": "Ascend NPUs",
    "xpu": "Intel GPUs",
    "cpu": "CPUs",
}


@pytest.mark.parametrize("device", NAMED.split())
def test_refusals_name_the_family_of_the_device_and_not_torchs_type(device):
    """torch's type of NVIDIA's and of AMD's devices is the same."""
    info = fake.device(device)
    assert info.family == FAMILIES[fake.devices()[device].name]
    said = set()
    for model in ("demo", "demo-v32"):
        for row in fake.plan(model, device).plan.rows:
            said |= {s for _, s in row.refused if "runs on " in s}
    others = [f for f in FAMILIES.values() if f != info.family]
    assert said == {f"runs on {other}, not on {info.family}" for other in others}


@pytest.mark.parametrize("device", ["rtx4090", "l40s", "rtx5090", "gb10"])
@pytest.mark.parametrize("model", ["deepseek-v3", "deepseek-v3.2", "deepseek-v2-lite", "demo-v32"])
def test_nothing_made_for_another_capability_serves_on_8_9_and_12(tmp_path, model, device):
    """Neither Hopper's nor capability 10's matrix instructions are there: portable kernels serve,
    and each that is made for others says for which."""
    path = model
    if model != "demo-v32":
        path = str(tmp_path)
        config = ROOT / f"tests/core/model/fixtures/{model}.json"
        (tmp_path / "config.json").write_text(config.read_text())
    assembly = fake.plan(path, device)
    rows = assembly.plan.rows
    assert {row.provider for row in rows if row.kernel != "composed"} == {"triton"}
    assert "disable_graph" not in {change[0] for change in assembly.plan.changes}
    arch = fake.device(device).arch
    made = {"cuda", "deep_gemm", "flash_mla", "sgl_kernel"}
    refused = {s for r in rows for k, s in r.refused if k.partition(".")[0] in made}
    for_others = {s for s in refused if s.startswith("made for sm")}
    assert for_others and all(s.endswith(f", not for {arch}") for s in for_others)


@pytest.mark.parametrize("device", ["mi300x", "mi355x", "910b", "max1550", "b60", "b200", "a100"])
@pytest.mark.parametrize("model", ["demo", "demo-v32"])
def test_no_op_of_the_demo_is_left_to_a_reference(model, device):
    """Sizes of heads and indexers that vendors' kernels are not made for: portable ones serve."""
    rows = fake.plan(model, device).plan.rows
    assert [row.op for row in rows if row.provider == "reference"] == []


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("device", ["mi300x", "910b", "910c", "max1550", "a100"])
def test_index_keys_follow_the_dtype_where_nothing_multiplies_fp8(device, dtype):
    plan = fake.plan("demo-v32", device, dtype=dtype).plan
    assert [row.op for row in plan.rows if row.provider == "reference"] == []
    assert "disable_graph" not in {change[0] for change in plan.changes}


@pytest.mark.parametrize("model", ["demo", "demo-v32"])
@pytest.mark.parametrize(
    ("device", "providers", "said"),
    [
        ("mi300x", {"aiter", "tilelang"}, "gfx942 multiplies e4m3fnuz, and FP8 latents are e4m3fn"),
        ("910b", {"npu"}, "Ascend 910 multiplies no FP8, and its cache holds no FP8 latents"),
        ("b60", {"sgl_xpu"}, "xe2-hpg multiplies no FP8, and nothing here reads FP8 latents"),
        ("max1550", {"sgl_xpu"}, "xe-hpc multiplies no FP8, and nothing here reads FP8 latents"),
    ],
)
def test_fp8_latents_are_refused_by_the_plugin_with_what_to_pass(device, providers, said, model):
    """Each of its kernels over the cache says so, whatever layout the references agree on."""
    rows = fake.plan(model, device, kv_cache_dtype="fp8").plan.rows
    ops = {"mla_decode", "sparse_decode", "sparse_prefill"} | {"cache_write", "cache_gather"}
    found = [
        sentence
        for row in rows
        if row.op in ops
        for kernel, sentence in row.refused
        if kernel.partition(".")[0] in providers and "phase" not in sentence
    ]
    assert found and set(found) == {f"{said}: pass --kv-cache-dtype auto"}


@pytest.mark.parametrize("page", [16, 24, 32, 64, 128])
def test_index_keys_follow_the_page_size_of_the_user(tmp_path, page):
    """The library that scores FP8 keys reads pages of 64 tokens."""
    config = ROOT / "tests/core/model/fixtures/deepseek-v3.2.json"
    (tmp_path / "config.json").write_text(config.read_text())
    plan = fake.plan(str(tmp_path), "b60", page_size=page).plan
    assert [row.op for row in plan.rows if row.provider == "reference"] == []
    why = [c[3] for c in plan.changes if c[0] == "index_cache_dtype"]
    if page == 64:
        assert not why
    else:
        assert f"page size {page}, takes 64" in why[0]


V4_ON_DEVICES = {
    *("compress_windows", "index_encode", "grouped_linear"),
    *("experts_limited", "silu_mul_limited", "route_softplus"),
    *("hc_pre", "hc_post", "hc_head", "norm_rope", "rope_back", "window_prefill", "window_decode"),
}


def test_no_op_of_a_published_model_is_left_to_a_reference_on_a_device():
    """Every model in every format, as in the table: on processors alone two ops have no other, and
    DeepSeek-V4 needs neither. Elsewhere those of its ops that have no kernel yet are named here."""
    kinds = {}
    for line in (ROOT / "tests/golden/selection.txt").read_text().splitlines():
        if line.startswith("## "):
            kind = line.rpartition("(")[2].partition(",")[0]
        elif line and not line.startswith(" "):
            is_v4 = line.startswith("deepseek-v4")
        elif "reference." in line and (op := line.split()[0]) != "disable_graph:":
            kinds.setdefault((kind, is_v4), set()).add(op)
    assert kinds.pop(("cpu", False)) == {"merge_state", "cache_gather"}
    assert kinds.pop(("xpu", True)) == V4_ON_DEVICES | {"index_scores"}
    assert kinds == {(kind, True): V4_ON_DEVICES for kind in ("cuda", "rocm", "npu")}


def test_described_processors_say_what_the_machine_would():
    for name, platform in fake.devices(load_plugins(["cpu"])).items():
        info = platform.info()
        features = info.features - {machine.DESCRIBED, machine.NATIVE}
        assert features <= machine.FEATURES, name
        best = isa.usable(list(isa.ISAS), features)[0]
        kind = "aarch64" if info.arch.startswith("aarch64") else "x86_64"
        assert info.arch == machine.arch(best, features, kind), name
        assert info.fast_dtypes == machine.fast_dtypes(features), name


def test_a_described_processor_is_planned_for_whatever_this_machine_has():
    with_library = fake.plan("demo", "epyc-9755").plan
    without = fake.plan("demo", "epyc-9755", without=["native"]).plan
    kernels = [{r.op: r.kernel for r in plan.rows} for plan in (with_library, without)]
    assert [k["rms_norm"] for k in kernels] == ["cpu.rms_norm", "reference.rms_norm"]
    (row,) = (r for r in without.rows if r.op == "rms_norm")
    assert dict(row.refused)["cpu.rms_norm"].startswith("native library not built")


def test_a_fake_device_that_nobody_describes():
    with pytest.raises(ConfigError, match="'h20O': no plugin describes it; did you mean 'h200'"):
        fake.device("h20O")
