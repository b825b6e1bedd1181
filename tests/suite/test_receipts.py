"""Receipts: what makes one stale, what is drawn, and what a run must find."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

import receipts


@pytest.fixture
def tree(tmp_path):
    for path in receipts.sources():
        target = tmp_path / path.relative_to(receipts.ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return tmp_path


def test_the_sources_are_kernels_flags_and_their_tests():
    names = {p.relative_to(receipts.ROOT).as_posix() for p in receipts.sources()}
    assert {"CMakeLists.txt", "plugins/cpu/csrc/linear.cpp", "plugins/cpu/csrc/attend.h"} <= names
    assert {"tests/native/driver.cpp", "tests/plugins/test_cpu_matmul.py"} <= names
    assert "tools/check_native.py" in names
    for pattern in receipts.SOURCES:
        assert list(receipts.ROOT.glob(pattern)), f"{pattern} names nothing"


def test_any_change_of_a_source_changes_the_digest(tree):
    before = receipts.digest(tree)
    assert before == receipts.digest()
    seen = {before}
    for path in receipts.sources(tree):
        old = path.read_bytes()
        path.write_bytes(old + b"\n")
        seen.add(receipts.digest(tree))
        path.write_bytes(old)
    (tree / "plugins/cpu/csrc/new.cpp").write_text("")
    seen.add(receipts.digest(tree))
    assert len(seen) == 1 + len(receipts.sources()) + 1
    (tree / "plugins/cpu/csrc/new.cpp").unlink()
    (tree / "README.md").write_text("no source")
    assert receipts.digest(tree) == before


def test_a_tenth_is_drawn_and_a_seed_repeats_it():
    names = [f"tests/x.py::test[{i}]" for i in range(2000)]
    one, other = ({n for n in names if receipts.drawn(s, n)} for s in ("1", "2"))
    assert 140 < len(one) < 260 and one != other
    assert one == {n for n in reversed(names) if receipts.drawn("1", n)}


def test_the_best_set_is_always_there(monkeypatch):
    every = ["amx", "avx512", "avx2", "generic"]
    assert receipts.instruction_sets(every, None) == every
    monkeypatch.setattr(receipts, "covered", lambda check: frozenset({"amx", "avx2", "generic"}))
    found = [receipts.instruction_sets(every, str(seed)) for seed in range(200)]
    assert all("avx512" in f for f in found)  # no receipt is of it
    assert all(f[0] == "amx" for f in found)
    for other in ("avx2", "generic"):
        assert 0.05 < sum(other in f for f in found) / len(found) < 0.2


def test_a_run_is_held_against_the_receipt(tmp_path, monkeypatch, capsys):
    receipt = tmp_path / "tests/native/receipts.json"
    monkeypatch.setattr(receipts, "RECEIPT", receipt)
    monkeypatch.setattr(receipts, "ROOT", tmp_path)
    monkeypatch.setattr(receipts, "digest", lambda: "of the tree")
    receipt.parent.mkdir(parents=True)

    def run(action):
        monkeypatch.setattr(sys, "argv", ["receipts", action, str(tmp_path / "run")])
        return receipts.main(), capsys.readouterr().out

    assert run("state")[0] == 1
    receipt.write_text("<<<<<<< a conflict")
    assert run("state")[0] == 1
    for check in receipts.CHECKS:
        with pytest.raises(SystemExit, match=f"no outcomes of .*{receipts.CHECKS[-1]}"):
            run("write")
        receipts.save(tmp_path / f"run/{check}.json", {"generic": ["x"]})
    receipts.save(tmp_path / "run/isas.json", {"avx2": ["b passed", "a passed"], "generic": ["c"]})
    assert run("compare")[0] == 1
    assert "--receipts" in run("compare")[1]
    assert run("write")[0] == 0 and run("state")[0] == 0 and run("compare")[0] == 0
    receipts.save(tmp_path / "run/isas.json", {"avx2": ["a passed", "b passed"], "amx": ["new"]})
    assert run("compare")[0] == 0  # another order, another machine
    receipts.save(tmp_path / "run/isas.json", {"avx2": ["a passed"]})
    status, said = run("compare")
    assert status == 1 and "isas, avx2" in said
    receipt.write_text(json.dumps({**json.loads(receipt.read_text()), "sources": "older"}))
    assert run("compare")[0] == 1 and run("state")[0] == 1


CASES = """
import pytest
@pytest.mark.parametrize("isa", {isas!r})
@pytest.mark.parametrize("i", range(50))
def test_case(isa, i): pass
def test_other(): pass
"""
PLUGIN = """
import receipts
from ds_runtime_cpu import native
native.runnable = lambda: ("amx", "avx2", "generic")
receipts.is_current = lambda: {current}
receipts.covered = lambda check: frozenset(native.runnable())
pytest_plugins = ["matrix", "report"]
"""


def matrix(folder, *options, current=True):
    """(passed by instruction set, output) of a run over a matrix of three sets."""
    (folder / "tests/plugins").mkdir(parents=True, exist_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "conftest.py").write_text(PLUGIN.format(current=current))
    text = CASES.format(isas=["amx", "avx2", "generic"])
    (folder / "tests/plugins/test_cpu_x.py").write_text(text)
    path = [str(receipts.ROOT / name) for name in ("tests", "tools")]
    code = f"import sys, pytest; sys.path[:0] = {path}; sys.exit(pytest.main(sys.argv[1:]))"
    alone = ["-p", "no:cacheprovider", "-p", "xdist"]  # and no other plugin: each takes long
    command = [sys.executable, "-c", code, "-v", *alone, *options]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "DS_MATRIX"))}
    environment = {**kept, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if "PASSED" in line]
    sets = ("amx", "avx2", "generic")
    count = {isa: sum(f"-{isa}]" in line for line in lines) for isa in sets}
    return count, done


def test_the_matrix_is_drawn_while_the_receipt_is_of_these_sources(tmp_path):
    count, done = matrix(tmp_path, "--matrix-seed", "7")
    assert count["amx"] == 50 and 0 < count["avx2"] < 20 and 0 < count["generic"] < 20
    assert matrix(tmp_path, "--matrix-seed", "7", "-n", "2")[0] == count
    assert done.returncode == 0
    full = {"amx": 50, "avx2": 50, "generic": 50}
    assert matrix(tmp_path, "-n", "2", current=False)[0] == full
    assert matrix(tmp_path, "--every-isa")[0] == full
    assert matrix(tmp_path, "-k", "avx2")[0]["avx2"] == 50
    assert matrix(tmp_path, "tests/plugins/test_cpu_x.py::test_case")[0] == full


def test_outcomes_are_those_of_the_matrix(tmp_path):
    out = tmp_path / "out.json"
    matrix(tmp_path, "--every-isa", "--outcomes", str(out), "-n", "2")
    found = json.loads(out.read_text())
    assert {isa: f["count"] for isa, f in found.items()} == {"amx": 50, "avx2": 50, "generic": 50}
    before = out.read_text()
    matrix(tmp_path, "--every-isa", "--outcomes", str(out))
    assert out.read_text() == before
    matrix(tmp_path, "--outcomes", str(out))  # a draw is nothing to make a receipt of
    assert not out.exists()


def test_what_must_run_has_run(tmp_path):
    listed = tmp_path / "always.txt"
    listed.write_text("# why\ntests/plugins/test_cpu_x.py::test_other\n")
    assert matrix(tmp_path, "--must-run", str(listed), "-n", "2")[1].returncode == 0
    listed.write_text("tests/plugins/test_cpu_x.py::test_gone  # why\n")
    done = matrix(tmp_path, "--must-run", str(listed))[1]
    assert done.returncode == 9 and "test_gone must run in every run" in done.stdout
