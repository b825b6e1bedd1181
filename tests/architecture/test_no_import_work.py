"""Importing the runtime or a plugin starts nothing, and loading plugins changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KIT = ("ds_runtime_bench", "ds_runtime_convert", "ds_runtime_kit")
IN_TREE = tuple(f"ds_runtime_{name}" for name in ("cpu", "cuda", "rocm", "npu", "xpu", "triton"))

PRELUDE = """
import importlib, json, pkgutil, sys

def modules(packages):
    for package in packages:
        module = importlib.import_module(package)
        yield package
        for info in pkgutil.walk_packages(module.__path__, package + "."):
            if not info.name.endswith("__main__"):
                yield info.name
"""

# An event counts when the nearest frame outside the standard library is ours.
AUDIT = """
import threading
EVENTS = ("socket.__new__", "socket.bind", "socket.connect", "subprocess.Popen", "os.fork",
          "os.posix_spawn", "os.exec", "os.system", "threading.Thread.start", "os.putenv",
          "os.mkdir", "os.remove", "ctypes.dlopen")
OURS = ("/ds_runtime", "/started_at_import")
seen = []

def culprit():
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "site-packages" in name and "/ds_runtime" not in name:
            return None
        if any(part in name for part in OURS):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return None

def audit(event, arguments):
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    if event in EVENTS or writes:
        where = culprit()
        if where:
            seen.append(f"{event} {arguments[:1]} at {where}")

def start(self, original=threading.Thread.start):  # not every Python audits threads
    audit("threading.Thread.start", (self.name,))
    original(self)

threading.Thread.start = start
sys.dont_write_bytecode = True
sys.addaudithook(audit)
count = 0
for name in modules(json.loads(sys.argv[1])):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as missing:  # a kernel's module may need its compiler or library
        if missing.name.startswith("ds_runtime"):
            raise
    count += 1
print(json.dumps({"seen": seen, "count": count}))
"""

SNAPSHOT = """
import types
names = list(modules(["ds_runtime"]))
for name in names:
    importlib.import_module(name)

def snapshot():
    return {
        name: {
            k: id(v) for k, v in vars(sys.modules[name]).items()
            if not isinstance(v, types.ModuleType) and k != "__builtins__"
        }
        | {
            f"{k}.{a}": id(m)
            for k, v in vars(sys.modules[name]).items()
            if isinstance(v, type) and v.__module__ == name
            for a, m in vars(v).items() if callable(m)
        }
        for name in names
    }

from ds_runtime.ops.contract import DeviceInfo, Dims, Facts
from ds_runtime.plugins.manager import load_plugins
before = snapshot()
plugins = load_plugins(extra=[importlib.import_module(n) for n in json.loads(sys.argv[1])])
platforms = plugins.platforms()
device = DeviceInfo("cpu", "any", "any")
dims = Dims({"kv_lora": 512, "qk_rope": 64, "qk_nope": 128, "v": 128, "heads": 4})
offers = plugins.offers(Facts(device, dims))
after = snapshot()
changed = [
    f"{name}.{k}" for name in names for k in before[name].keys() | after[name].keys()
    if before[name].get(k) != after[name].get(k)
]
print(json.dumps({"changed": changed, "kernels": len(offers.kernels), "modules": len(names)}))
"""


def run(code: str, *arguments: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, *(json.dumps(a) for a in arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*path, *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_imports_start_no_process_thread_or_socket_and_write_nothing() -> None:
    result = run(AUDIT, ["ds_runtime", *KIT, *IN_TREE])
    assert result["seen"] == []
    assert result["count"] > 60


@pytest.mark.parametrize(
    ("line", "event"),
    [
        ("import threading; threading.Thread(target=int).start()", "threading.Thread.start"),
        ("import subprocess; subprocess.run(['true'])", "subprocess.Popen"),
        ("import socket; socket.socket().close()", "socket.__new__"),
        ("open('made', 'w').close()", "open"),
    ],
)
def test_work_at_import_is_seen(
    line: str, event: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "started_at_import"
    package.mkdir()
    (package / "__init__.py").write_text(line + "\n")
    result = run(AUDIT, ["started_at_import"], path=(str(tmp_path),))
    assert any(s.startswith(event) for s in result["seen"]), result


def test_loading_plugins_changes_no_attribute_of_the_core() -> None:
    result = run(SNAPSHOT, _not_installed())
    assert result["changed"] == []
    assert result["kernels"] >= 20
    assert result["modules"] > 60


def _not_installed() -> list[str]:
    from ds_runtime.plugins.manager import load_plugins

    loaded = {report.module for report in load_plugins().reports.values()}
    return [name for name in IN_TREE if name not in loaded]
