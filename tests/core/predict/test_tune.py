"""`tune`: what it refuses before it measures, and which files it leaves as they were."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime.cli import main
from ds_runtime.config import EngineConfig
from ds_runtime.measured import found
from ds_runtime.measured.costs import Costs, KernelCost, Point
from ds_runtime.platform.cores import cores
from ds_runtime_bench.ops import comm, tune
from ds_runtime_cpu.platform import CpuPlatform

CPU = ["--platform", "cpu"]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The user's file of this device, in a home of its own; nothing can be timed."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(tune.Tuning, "_group", lambda *args: None)
    monkeypatch.setattr(tune.Tuning, "_compile", lambda *args: None)
    given = {"platform": "cpu", "threads": 1}
    geometry = tune.Geometry("tiny-v3")
    device = tune.assembled(EngineConfig(**given), set(given), geometry, "bfloat16").device
    return device.name, found.own(device.name)


def good(device):
    kernels = {"a.b:apply": KernelCost("linear", "bfloat16", (Point(1, 1, 1, 1),))}
    return Costs(device, "x", "2026-01-02", {}, 1e9, {"bfloat16": 1e12}, 1.0, 1.0, 1.0, kernels)


PARTS = (["--op", "linear"], ["--rows", "1"], ["--shapes", "tiny-v3"])


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part[0])
def test_a_part_does_not_replace_the_users_file(own, capsys, part):
    device, path = own
    good(device).write(path)
    assert main(["tune", "costs", *CPU, *part]) == 1
    said = capsys.readouterr().err
    assert f"{path}: holds costs; a part of them would replace all: give --out FILE" in said
    assert Costs.read(path) == good(device)


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("flags", [["--shapes", "tiny-v3"], ["--op", "linear"]], ids=str)
def test_without_a_point_nothing_is_written(own, capsys, tmp_path, flags, exists):
    device, _ = own
    path = tmp_path / "costs.json"
    if exists:
        good(device).write(path)
    assert main(["tune", "costs", *CPU, "--rows", "1", "--out", str(path), *flags]) == 1
    assert "no kernel could be timed; nothing was written" in capsys.readouterr().err
    assert path.exists() == exists and (not exists or Costs.read(path) == good(device))


def never(*args):
    raise AssertionError("ranks were started")


@pytest.mark.parametrize("more", [1, 999, 10**9])
def test_no_more_ranks_start_than_cores(capsys, monkeypatch, more):
    monkeypatch.setattr(comm, "measure", never)
    assert main(["tune", "comm", *CPU, "--ranks", str(cores() + more)]) == 1
    said = capsys.readouterr().err
    assert f"--ranks {cores() + more}: ranks share the {cores()} cores" in said
    assert f"give at most {cores()}" in said


@pytest.mark.parametrize("ranks", [3, 999, 10**9])
def test_every_rank_has_a_device_before_one_starts(capsys, monkeypatch, ranks):
    true = CpuPlatform.info

    def info(self, rank=0):
        if rank > 1:
            raise RuntimeError("invalid device ordinal")
        return true(self, rank)

    monkeypatch.setattr(comm, "measure", never)
    monkeypatch.setattr(CpuPlatform, "own_memory", True)
    monkeypatch.setattr(CpuPlatform, "info", info)
    assert main(["tune", "comm", *CPU, "--ranks", str(ranks)]) == 1
    said = capsys.readouterr().err
    assert f"--ranks {ranks}: {ranks} devices are needed, and number 2 cannot be had" in said
    assert "invalid device ordinal" in said


@pytest.mark.parametrize("flag", [["--threads", "1"], ["--dtype", "float32"]], ids=str)
def test_comm_refuses_flags_that_say_nothing_of_collectives(capsys, monkeypatch, flag):
    monkeypatch.setattr(comm, "measure", never)
    assert main(["tune", "comm", *CPU, *flag]) == 2
    assert f"unknown flag {flag[0]}" in capsys.readouterr().err


seconds = st.floats(1e-9, 1e3)


@given(st.dictionaries(st.integers(1, 1 << 40), seconds, min_size=1, max_size=20))
def test_no_size_takes_longer_than_a_larger_one(times):
    made = comm.rising(times.items())
    assert [size for size, _ in made] == sorted(times)
    took = [one for _, one in made]
    assert took == sorted(took)
    for size, one in made:
        assert one == min(t for s, t in times.items() if s >= size)


def test_the_engines_work_is_added_to_a_file(own, capsys):
    """By engines of this machine, without a device; and other costs stay."""
    device, path = own
    good(device).write(path)
    assert main(["tune", "host", *CPU, "--requests", "1", "48"]) == 0
    made = Costs.read(path)
    assert [count for count, _ in made.host] == [1, 48] and made.kernels == good(device).kernels
    assert 0 < made.host[0][1] <= made.host[1][1]
    assert f"{path}: the engine's work on the host added" in capsys.readouterr().out
