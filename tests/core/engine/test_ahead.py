"""Kernels that compile when they first run are compiled by other processes, beside loading."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ds_runtime.engine.device.compile_record import CompileRecord, found_in
from ds_runtime.engine.device.precompile import Ahead, divided, keep_within, tasks_of
from ds_runtime.ops.binding.by_rows import Shares
from ds_runtime.ops.contract import DeviceInfo, Kernel
from ds_runtime.ops.kernel import Compiles, RowRange
from ds_runtime.ops.table import OPS
from ds_runtime.platform.compilations import counted
from ds_runtime_kit.checks.conformance import facts_for

FACTS = facts_for(DeviceInfo("cpu", "host", "any"), "bfloat16")
CPU = torch.device("cpu")


def bound(*kernels: tuple[str, tuple[int, ...]]) -> SimpleNamespace:
    """Stands for BoundOps: `ahead` of kernels, with the shapes of their places."""
    found = [
        (Kernel(OPS["linear"], "m:k", "me", compiles=Compiles(ahead)), replace(FACTS, shape=shape))
        for ahead, shape in kernels
    ]
    return SimpleNamespace(served=lambda most: ((*one, [range(1, most + 1)]) for one in found))


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module on the path of new processes; what `compiled` was asked for lies in the folder."""
    text = f"""
import pathlib
def compiled(facts, rows):
    name = "x".join(map(str, facts.shape)) + "-" + ".".join(map(str, rows))
    (pathlib.Path({str(tmp_path)!r}) / name).touch()
def fails(facts, rows):
    raise RuntimeError("no compiler here")
"""
    (tmp_path / "compilers.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def test_each_shape_is_compiled_once_for_all_rows(compiler, capfd):
    place = "compilers:compiled"
    ops = bound((place, (64, 32)), (place, (64, 32)), ("", (9, 9)), (place, (128, 256)))
    assert [facts.shape for _, facts, _ in tasks_of(ops, 2)] == [(128, 256), (64, 32)]
    with Ahead(ops, CPU, 2):
        pass
    made = {p.name for p in compiler.iterdir() if "x" in p.name}
    assert made == {"128x256-1", "128x256-2", "64x32-1", "64x32-2"}
    assert capfd.readouterr().err == ""


def test_rows_are_cut_where_there_are_more_processes_than_tasks():
    tasks = [("a:b", FACTS, range(1, 6)), ("c:d", FACTS, range(3, 9)), ("e:f", FACTS, range(1, 2))]
    for processes in (1, 2, 3, 4, 7, 100):
        found = divided(tasks, processes)
        assert 1 <= len(found) <= processes and all(found)
        for path, _, rows in tasks:
            own = [piece for pieces in found for piece in pieces if piece[0] == path]
            assert sorted(row for *_, part in own for row in part) == list(rows)
    assert divided([], 4) == divided([], 1)
    assert len(divided(tasks, 3)) == 3 and len(divided(tasks, 7)) == 7


def test_a_kernel_compiles_for_the_rows_that_it_serves():
    def rows_of(*ranges):
        one = Kernel(OPS["linear"], "m:k", "me", compiles=Compiles("a:b"))
        held = tuple(replace(one, rows=rows) for rows in ranges)
        rest = Kernel(OPS["linear"], "m:rest", "me")
        served = [(kernel, FACTS, Shares(rest, held).rows_of(kernel, 100)) for kernel in held]
        ops = SimpleNamespace(served=lambda most: iter(served))
        return [task[2] for task in tasks_of(ops, 100)]

    assert [task[2] for task in tasks_of(bound(("a:b", (1, 1))), 100)] == [range(1, 101)]
    assert rows_of(RowRange(first=9)) == [range(9, 101)]
    assert rows_of(RowRange(below=9)) == [range(1, 9)]
    assert rows_of(RowRange(first=5, below=9)) == [range(5, 9)]
    assert rows_of(RowRange(first=5, methods=frozenset({"expand"}))) == [range(1, 101)]
    assert rows_of(RowRange(first=101)) == [], "no step has so many"
    assert rows_of(RowRange(below=9), RowRange(first=50)) == [range(1, 101)], "one compiler"


def test_one_that_fails_is_a_line_and_stops_nothing(compiler, capfd):
    with Ahead(bound(("compilers:fails", (64, 32))), CPU, 1):
        pass
    said = capfd.readouterr().err
    assert "no compiler here" in said and said.count("\n") == 1


def test_nothing_is_started_where_nothing_compiles(monkeypatch):
    monkeypatch.setattr("subprocess.Popen", None)
    with Ahead(bound(("", (64, 32))), CPU, 1), Ahead(bound(("a:b", (1, 1))), CPU, 0):
        pass


def test_processes_leave_the_memory_to_the_weights(compiler):
    """Whatever the sizes of devices are."""
    text = f"""
import pathlib, torch
class Device:
    def set_per_process_memory_fraction(self, share):
        (pathlib.Path({str(compiler)!r}) / f"share-{{share}}").touch()
torch.accelerator.set_device_index = lambda index: None
torch.get_device_module = Device
"""
    (compiler / "sitecustomize.py").write_text(text)
    for gib, share in ((141, 8 / 141), (16, 0.5), (8, 1.0), (4, 1.0)):
        with Ahead(bound(("compilers:compiled", (gib, 1))), torch.device("cuda:0"), 1, gib << 30):
            pass
        assert (compiler / f"{gib}x1-1").exists()
        (told,) = compiler.glob("share-*")
        assert float(told.name.removeprefix("share-")) == share
        told.unlink()
    with Ahead(bound(("compilers:compiled", (3, 1))), torch.device("cuda:0"), 1):
        pass
    assert not [*compiler.glob("share-*")], "its size is not known"
    keep_within(object(), 0.5)  # torch's module of a device that has no such limit


def test_an_error_while_loading_ends_them(compiler, capfd):
    (compiler / "compilers.py").write_text("import time\ndef sleeps(*_):\n    time.sleep(600)\n")
    with (
        pytest.raises(ValueError, match="damaged"),
        Ahead(bound(("compilers:sleeps", (64, 32))), CPU, 1),
    ):
        raise ValueError("damaged")
    assert capfd.readouterr().err == ""


def test_what_they_compile_is_counted_here(compiler):
    text = "from ds_runtime.api import compiled\n"
    text += "def counts(facts, rows):\n    compiled('ahead', f'kernel{len(rows)}', 0.1)\n"
    (compiler / "compilers.py").write_text(text)
    with Ahead(bound(("compilers:counts", (64, 32))), CPU, 1):
        pass
    assert counted()["ahead", "kernel1"] == 1


@pytest.fixture
def keeping(compiler: Path) -> Path:
    """The folder in which such a compiler keeps what it makes."""
    kept = compiler / "kept"
    kept.mkdir()
    text = f"""
import atexit, os, pathlib
from ds_runtime.api import compiled, kept_in
def keeps(facts, rows):
    pathlib.Path({str(kept)!r}).mkdir(exist_ok=True)
    pathlib.Path({str(kept)!r}, "kernel").touch()
    kept_in("keeping", {str(kept)!r})
    compiled("keeping", "k", 0.1)
def speaks(facts, rows):
    atexit.register(print, "a library says good-bye")
    keeps(facts, rows)
def leaves(facts, rows):
    os._exit(0)
def fails(facts, rows):
    raise RuntimeError("no compiler here")
"""
    (compiler / "compilers.py").write_text(text)
    return kept


def made(place: str) -> int:
    """How often a compiler ran in a start that has its kernel."""
    before = counted().get(("keeping", "k"), 0)
    with Ahead(bound((f"compilers:{place}", (64, 32))), CPU, 1):
        pass
    return counted().get(("keeping", "k"), 0) - before


def test_what_was_compiled_before_is_not_asked_for_again(keeping):
    assert made("keeps") == 1 and made("keeps") == 0
    keeping.rename(keeping.with_name("before"))
    assert made("keeps") == 1, "no cache"
    (keeping / "of another").touch()
    assert made("keeps") == 0
    for file in keeping.iterdir():
        file.unlink()
    assert made("keeps") == 1 and made("keeps") == 0, "an empty cache"


def test_libraries_may_speak_after_the_last_line(keeping, capfd):
    assert made("speaks") == 1 and made("speaks") == 0
    (keeping / "kernel").unlink()
    assert made("speaks") == 1, "the folder is known all the same"
    assert capfd.readouterr().err == ""


def test_a_process_that_leaves_early_has_compiled_nothing(keeping, capfd):
    for _ in range(2):
        assert made("leaves") == 0
        assert "(exit 0)" in capfd.readouterr().err


def test_what_failed_is_asked_for_again(keeping, capfd):
    for _ in range(2):
        with Ahead(bound(("compilers:fails", (64, 32))), CPU, 1):
            pass
        assert "no compiler here" in capfd.readouterr().err


def record(*tasks: object) -> CompileRecord:
    return CompileRecord(tasks, ["compilers"])


def test_a_record_is_of_its_tasks_modules_and_folders(keeping, compiler, monkeypatch):
    record("a", "b").write(found_in([keeping]))
    assert record("b", "a").holds()
    assert not record("a").holds() and not record("a", "b", "c").holds()
    other = compiler / "other"
    other.mkdir()
    other.rename(keeping)
    assert not record("a", "b").holds(), "another folder"
    record("a", "b").write(found_in([keeping]))
    with (compiler / "compilers.py").open("a") as file:
        file.write("# another version\n")
    assert not record("a", "b").holds(), "another compiler"
    record("a", "b").write({})
    assert record("a", "b").holds(), "a compiler that names no folder"
    (compiler / "compiler-1.1.dist-info").mkdir()
    assert not record("a", "b").holds(), "another version of a compiler's library"
    (compiler / "compiler-1.1.dist-info").rmdir()
    assert record("a", "b").holds()
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert not record("a", "b").holds(), "another torch"


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"/nowhere": [3, 1]}', '{"/": 3}', "[3]", "3", "\0", "\udc80"]
)
def test_a_damaged_record_skips_nothing(compiler, text):
    record("a").write({})
    (file,) = (compiler / "home/.cache/ds-runtime/compiled").iterdir()
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert not record("a").holds()


def test_nothing_is_skipped_where_nothing_can_be_written(compiler, monkeypatch):
    (compiler / "home").touch()
    record("a").write({})
    assert not record("a").holds()
