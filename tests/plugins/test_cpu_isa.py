"""Which variant of the native library computes, who decides it, and where that is said."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from ds_runtime.assembly.assemble import assemble
from ds_runtime.cli import main
from ds_runtime.config import EngineConfig
from ds_runtime.errors import ConfigError, UnsupportedError
from ds_runtime.platform.contract import Platform
from ds_runtime_cpu import native
from ds_runtime_cpu.isa import ISAS, missing
from ds_runtime_cpu.machine import processor
from ds_runtime_cpu.platform import CpuPlatform

RUNNABLE = native.runnable()


@pytest.fixture(autouse=True)
def leave_the_choice():
    with native.using(None):
        yield


def test_libraries_and_features_agree_on_what_runs_and_which_is_best():
    """The plan goes by the system's list of features, a library by cpuid."""
    assert RUNNABLE and RUNNABLE[-1] == "generic"
    scores = {}
    for path in native._candidates(native.library_folder()):
        found = native.open_library(path)
        score = found.score if isinstance(found, native.Library) else 0
        scores[native._isa(path)] = score
    ran = sorted((name for name, score in scores.items() if score > 0), key=lambda n: -scores[n])
    assert tuple(ran) == RUNNABLE


def test_every_variant_is_built_that_this_compiler_knows():
    """Here, where tests run; an older compiler builds fewer, and says which."""
    assert set(native.built_for()) <= set(ISAS)
    compiler = shutil.which("c++")
    if compiler is None or sys.platform != "linux" or os.uname().machine != "x86_64":
        assert "generic" in native.built_for()
        return
    flags = {"avx512": "-mavx512vnni", "avx512bf16": "-mavx512bf16", "amx": "-mamx-bf16"}
    known = {"generic", "avx2"}
    for isa, flag in flags.items():
        command = [compiler, flag, "-fsyntax-only", "-x", "c++", "/dev/null"]
        if not subprocess.run(command, capture_output=True).returncode:
            known.add(isa)
    assert set(native.built_for()) == known


@pytest.mark.parametrize("isa", RUNNABLE)
def test_the_flag_decides_the_library_and_the_facts(isa):
    platform = CpuPlatform()
    platform.configure(EngineConfig(cpu_isa=isa))
    assert native.library().isa == native.isa_in_use() == isa
    info = platform.info()
    assert info.arch == f"x86-64-{isa}" or isa == "generic"
    beyond = [name for name in ISAS if not missing(name, info.features)]
    assert beyond[0] == isa, "kernels must not see features beyond the chosen variant"
    assert ("bfloat16" in info.fast_dtypes) is ("avx512_bf16" in info.features)
    env = platform.process_env()
    assert env["ONEDNN_MAX_CPU_ISA"] == ISAS[isa].onednn


def test_auto_is_the_best_with_all_features():
    platform = CpuPlatform()
    platform.configure(EngineConfig(cpu_isa="generic"))
    platform.configure(EngineConfig())
    assert native.library().isa == RUNNABLE[0]
    assert platform.info().features == processor().features
    assert "ONEDNN_MAX_CPU_ISA" not in platform.process_env()


def test_a_plan_locked_with_the_best_by_name_is_the_one_without_a_name(tmp_path, capsys):
    named, plain = tmp_path / "named.json", tmp_path / "plain.json"
    assert main(["plan", "lock", str(plain), "--platform", "cpu"]) == 0
    assert main(["plan", "lock", str(named), "--platform", "cpu", "--cpu-isa", RUNNABLE[0]]) == 0
    assemble(EngineConfig(platform="cpu", plan=str(named)))
    assemble(EngineConfig(platform="cpu", cpu_isa=RUNNABLE[0], plan=str(plain)))


def refused(isa: str) -> str:
    with pytest.raises(ConfigError) as caught:
        CpuPlatform().configure(EngineConfig(cpu_isa=isa))
    return str(caught.value)


def test_unknown_names_are_refused_with_what_can_run():
    said = refused("axv2")
    assert said.startswith("--cpu-isa axv2: no such instruction set; ")
    for name in (*RUNNABLE, "auto"):
        assert name in said
    assert native.isa_in_use() == RUNNABLE[0]


def test_a_near_name_is_suggested():
    assert "did you mean 'generic'?" in refused("generc")


def test_a_processor_that_lacks_it_is_named(monkeypatch):
    monkeypatch.setattr(native, "runnable", lambda: ("generic",))
    monkeypatch.setattr(native, "built_for", lambda: ["generic", "avx2"])
    monkeypatch.setattr(native, "missing", lambda name, features: ["f16c", "fma"])
    assert "this processor lacks f16c, fma; this machine runs generic, auto" in refused("avx2")
    assert "has no library for it; a newer C++ compiler" in refused("avx512bf16")


def test_without_libraries_there_is_no_choice(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "library_folder", lambda: tmp_path)
    native.runnable.cache_clear()
    try:
        assert native.NOT_BUILT in refused("generic")
        assert native.isa_in_use() is None
        assert CpuPlatform().info().features == processor().features
        with pytest.raises(UnsupportedError, match="not built"):
            native.library()
    finally:
        native.runnable.cache_clear()


def test_a_platform_without_instruction_sets_refuses_the_flag():
    class Other(CpuPlatform):
        name = "other"
        configure = Platform.configure

    Other().configure(EngineConfig())
    with pytest.raises(ConfigError, match="--cpu-isa avx2: platform other has no instruction sets"):
        Other().configure(EngineConfig(cpu_isa="avx2"))


def test_the_plan_says_the_instruction_set_and_a_lock_holds_it(tmp_path, capsys):
    lock = tmp_path / "plan.json"
    assert main(["plan", "lock", str(lock), "--platform", "cpu", "--cpu-isa", "generic"]) == 0
    locked = json.loads(lock.read_text())
    assert locked["arch"] in ("x86-64", "aarch64", "aarch64-bf16")
    assemble(EngineConfig(platform="cpu", cpu_isa="generic", plan=str(lock)))
    found = assemble(EngineConfig(platform="cpu", plan=str(lock)))
    assert found.device.arch == locked["arch"] and native.library().isa == "generic"
    for other in RUNNABLE[:-1]:
        with pytest.raises(ConfigError, match=r"arch: '.*' here, 'x86-64' there"):
            assemble(EngineConfig(platform="cpu", cpu_isa=other, plan=str(lock)))
    assemble(EngineConfig(platform="cpu"))
    assert native.library().isa == RUNNABLE[0]
    capsys.readouterr()
    assert main(["plan", "--platform", "cpu", "--cpu-isa", "generic"]) == 0
    assert f"platform cpu ({locked['arch']})" in capsys.readouterr().out


def test_the_command_line_refuses_in_a_sentence(capsys):
    assert main(["plan", "--platform", "cpu", "--cpu-isa", "avx9"]) == 1
    assert "--cpu-isa avx9: no such instruction set" in capsys.readouterr().err


def test_deciding_loads_neither_torch_nor_a_library():
    code = """
import sys
from ds_runtime.assembly.assemble import assemble
from ds_runtime.config import EngineConfig
found = assemble(EngineConfig(platform="cpu", cpu_isa="generic"))
maps = open("/proc/self/maps").read() if sys.platform == "linux" else ""
assert "torch" not in sys.modules and "ds_cpu_" not in maps
print(found.device.arch)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
