"""Wheels from this checkout: with a compiler, without one, and with one required."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def build(out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "-q", "-w", str(out)]
    env = {k: v for k, v in os.environ.items() if k != "DS_REQUIRE_NATIVE"}
    return subprocess.run(command, env={**env, **environment}, capture_output=True, text=True)


def wheel(out: Path) -> Path:
    (found,) = out.glob("*.whl")
    return found


def names(path: Path) -> list[str]:
    return zipfile.ZipFile(path).namelist()


def test_a_wheel_has_libraries_demo_and_licence(tmp_path):
    assert shutil.which("c++") or shutil.which("g++"), "this test needs a C++ compiler"
    built = build(tmp_path, DS_REQUIRE_NATIVE="1")
    assert built.returncode == 0, built.stderr
    path, held = wheel(tmp_path), names(wheel(tmp_path))
    assert "-py3-none-" in path.name and not path.name.endswith("-any.whl")
    assert any("ds_runtime_cpu/_lib/" in n and "ds_cpu_generic" in n for n in held)
    assert any(n.startswith("ds_runtime/demo/") and n.endswith(".safetensors") for n in held)
    assert any(n.startswith("ds_runtime/demo/") and n.endswith("config.json") for n in held)
    for sibling in ("demo_v32", "demo_v4"):
        files = ("config.json", "model.safetensors")
        assert {f"ds_runtime/{sibling}/{n}" for n in files} <= set(held)
    assert any(n.endswith("licenses/LICENSE") for n in held)
    for plugin in ("cpu", "cuda", "rocm", "npu", "xpu", "triton"):
        assert f"ds_runtime_{plugin}/__init__.py" in held
        assert f"ds_runtime_{plugin}/py.typed" in held
    for tool in ("bench", "convert", "kit"):
        assert {f"ds_runtime_{tool}/__init__.py", f"ds_runtime_{tool}/py.typed"} <= set(held)
    assert "ds_runtime/testing/pytest_plugin.py" in held
    sources = ("experts_streaming.cu", "attention.cu", "hopper.cuh")  # compiled where they run
    assert {f"ds_runtime_cuda/csrc/{n}" for n in sources} <= set(held)
    assert "ds_runtime_kit/templates/platform/tests/test_acme.py.tmpl" in held
    assert "ds_runtime_kit/templates/loader/ds_runtime_acme/loader.py.tmpl" in held
    outside = ("tests/", "csrc/", "kit/", "benchmarks/", "tools/")
    assert not [n for n in held if n.startswith(outside) or n.endswith(".cpp")]
    (metadata,) = [n for n in held if n.endswith(".dist-info/METADATA")]
    text = zipfile.ZipFile(path).read(metadata).decode()
    from ds_runtime import __version__

    assert f"\nVersion: {__version__}\n" in text


def test_without_a_compiler_the_wheel_is_pure(tmp_path):
    built = build(tmp_path, CC="/bin/false", CXX="/bin/false")
    assert built.returncode == 0, built.stderr
    assert wheel(tmp_path).name.endswith("-py3-none-any.whl")
    assert not [n for n in names(wheel(tmp_path)) if "ds_runtime_cpu/_lib/" in n]


def test_a_required_native_build_fails_without_a_compiler(tmp_path):
    built = build(tmp_path, CC="/bin/false", CXX="/bin/false", DS_REQUIRE_NATIVE="1")
    assert built.returncode != 0
    assert not list(tmp_path.glob("*.whl"))
