"""`tune`: what it refuses before it measures, and which files it leaves as they were."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime.cli import main
from ds_runtime.config import EngineConfig
from ds_runtime.errors import ConfigError
from ds_runtime.measured import found
from ds_runtime.measured.costs import KINDS, Costs, KernelCost, Point, _series
from ds_runtime.parallel.sums.kinds import ALIGNED, FAST, GATHER_LOGITS, GATHERED, GATHERED_BY
from ds_runtime.platform.cores import cores
from ds_runtime_bench.ops import comm, host_steps, tune
from ds_runtime_cpu.platform import CpuPlatform
from parts import mostly_slow

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
    assert (
        f"{path}: holds costs; a part of them would replace all: give --out FILE, or --add" in said
    )
    assert Costs.read(path) == good(device)


def test_a_part_is_added_to_what_the_file_holds(own, capsys, monkeypatch):
    """Points of the same place are replaced, and all else stays, rates and dates with it."""
    device, path = own
    made = good(device)
    made.write(path)
    new = {"a.b:apply": KernelCost("linear", "bfloat16", (Point(1, 1, 1, 2),))}
    found = replace(made, bandwidth=5.0, kernels=new)
    monkeypatch.setattr(tune.Tuning, "add", lambda *args: None)
    monkeypatch.setattr(tune.Tuning, "costs", lambda self: found)
    assert main(["tune", "costs", *CPU, "--add", "--op", "linear"]) == 0
    assert Costs.read(path) == replace(made, kernels=new)
    path.unlink()
    assert main(["tune", "costs", *CPU, "--add", "--op", "linear", "--out", str(path)]) == 1
    said = capsys.readouterr().err
    assert f"run ds-runtime tune costs --out {path} first" in said and not path.exists()


places = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=5, unique=True).map(sorted), max_size=4
)


@given(places, places)
def test_points_that_are_measured_again_are_new_and_all_others_stay(old, new):
    """A place has bytes of its own here: those of its number."""

    def kernel(series, seconds):
        points = [Point(n, at + 1, n, seconds) for at, rows in enumerate(series) for n in rows]
        cost = KernelCost("linear", "bfloat16", tuple(points), queue=seconds, lasting=seconds)
        return {"a:b": cost} if points else {}

    before = replace(good("x"), kernels=kernel(old, 1.0))
    after = before.with_kernels(kernel(new, 2.0)).kernels
    if not new:
        assert after == before.kernels
        return
    want = {(n, at): 1.0 for at, rows in enumerate(old) for n in rows}
    want |= {(n, at): 2.0 for at, rows in enumerate(new) for n in rows}
    points = after["a:b"].points
    assert len(points) == len(want)
    assert {(p.rows, int(p.nbytes) - 1): p.seconds for p in points} == want


def test_added_rows_do_not_join_another_place():
    """Places of one kernel end at 512 rows; two are measured at 1,024. What a part does not measure
    is kept."""
    ladder, wide, narrow = (1, 64, 512), 3.0, 2.0

    def cost(points, queue=None, lasting=None):
        return {"a:b": KernelCost("linear", "bfloat16", tuple(points), queue, lasting)}

    old = [Point(n, n * width, n, 1.0) for width in (wide, narrow) for n in ladder]
    new = [Point(1024, 1024 * width, 1024, 1.0) for width in (wide, narrow)]
    before = replace(good("x"), kernels=cost(old, 1e-6, 1.3))
    after = before.with_kernels(cost(new)).kernels["a:b"]
    assert (after.queue, after.lasting) == (1e-6, 1.3)
    places = [{p.nbytes / p.rows for p in one} for one in _series(after.points)]
    assert sorted(map(len, places)) == [1, 1, 1, 1] and len(after.points) == 8
    other = {"a:b": replace(cost(new)["a:b"], arithmetic="float32")}
    with pytest.raises(ConfigError, match="multiply in bfloat16, and the new ones in float32"):
        before.with_kernels(other)


@pytest.mark.parametrize(
    ("flags", "exists"),
    mostly_slow(
        [
            (["--op", "linear"], True),
            (["--op", "linear"], False),
            (["--shapes", "tiny-v3"], True),
            (["--shapes", "tiny-v3"], False),
        ],
        1,
    ),
)
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


KINDS_AND_SIZES = ("one_shot", "two_shot", "all_reduce", "all_gather")


def curves(ranks, kinds=KINDS_AND_SIZES, seconds=1e-5):
    return {kind: dict.fromkeys(ranks, ((4096, seconds), (8192, seconds))) for kind in kinds}


@pytest.mark.parametrize("brought", [(), ("two_shot",), ("one_shot", "two_shot")])
@pytest.mark.parametrize("others", [(), (3, 4)])
def test_comm_drops_kinds_that_ranks_have_no_more(own, monkeypatch, capsys, brought, others):
    """Those of as many ranks, which a device or a driver had, and no others."""
    device, path = own
    good(device).with_collectives(curves((2, *others), seconds=9e-5)).write(path)
    new = curves((2,), ("all_reduce", *brought))
    monkeypatch.setattr(comm, "measure", lambda platform, ranks: new)
    monkeypatch.setattr("ds_runtime_bench.ops.devices.check_room", lambda *args: None)
    assert main(["tune", "comm", *CPU, "--ranks", "2"]) == 0
    made, old = Costs.read(path).collectives, curves((2, *others), seconds=9e-5)
    assert made["all_reduce"][2] == new["all_reduce"][2]
    assert made["all_gather"] == old["all_gather"]  # which is served as it was
    for kind in ("one_shot", "two_shot"):
        wanted = {n: old[kind][n] for n in others} | new.get(kind, {})
        assert made.get(kind, {}) == wanted
    said = capsys.readouterr().out
    assert ("has the library's all-reduce alone" in said) == (not brought)


@pytest.mark.parametrize("command", [["comm", "--ranks", "2"], ["host", "--requests", "1"]])
def test_costs_that_a_plugin_ships_are_added_to(own, monkeypatch, capsys, command):
    """In a file of the user's own; a file that is named is there, or refused."""
    device, path = own
    monkeypatch.setattr(comm, "measure", lambda *args: curves((2,)))
    monkeypatch.setattr(host_steps, "measure", lambda *args: ((1, 1e-3),))
    monkeypatch.setattr("ds_runtime_bench.ops.devices.check_room", lambda *args: None)
    for more, remedy in ([], ""), (["--out", str(path)], f" --out {path}"):
        assert main(["tune", *command, *CPU, *more]) == 1
        said = capsys.readouterr().err
        assert f"costs {path}: cannot be read: " in said
        assert f"run ds-runtime tune costs{remedy} first" in said and not path.exists()
    monkeypatch.setattr(found, "_shipped", lambda *args: good(device))
    assert main(["tune", *command, *CPU]) == 0
    made = Costs.read(path)
    assert made.kernels == good(device).kernels and (made.collectives or made.host)


@given(
    st.sampled_from(KINDS),
    st.integers(2, 8),
    st.sampled_from(comm.SIZES) | st.integers(1 << 8, 1 << 16).map(lambda n: 16 * n),
)
def test_inputs_of_collectives_are_as_large_as_they_say(kind, ranks, size):
    """Of all ranks together where each brings a share. All-reduces, whose fast kinds sum whole 16
    bytes, are of that size itself."""
    member = SimpleNamespace(size=ranks, rank=0)
    x = comm._input(SimpleNamespace(device=lambda rank: "cpu"), member, kind, size)
    nbytes = x.numel() * x.element_size()
    if kind in ("all_reduce", *FAST):
        assert nbytes == size and nbytes % ALIGNED == 0
        return
    if kind == "reduce_scatter":
        assert len(x) % ranks == 0
    gathers = (GATHERED, GATHER_LOGITS)
    whole = nbytes * (ranks if kind in (*gathers, "gather_rows") else 1)
    lost = 2 * ranks * (max(1, size >> 18) if kind in gathers else 1)  # what does not divide
    if kind == GATHER_LOGITS:
        assert x.shape[1] % GATHERED_BY == 0
        lost *= GATHERED_BY
    assert size - lost < whole <= size


def dies(model, count, steps):
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_engine_that_is_killed_ends_tune_host_with_an_error(own, capsys, monkeypatch):
    """As the kernel does where memory runs out: nobody waits for it, and nothing is written."""
    device, path = own
    good(device).write(path)
    monkeypatch.setattr(host_steps, "_one", dies)
    assert main(["tune", "host", *CPU, "--requests", "7"]) == 1
    said = capsys.readouterr().err
    assert "tune host: the engine of 7 requests was killed" in said
    assert Costs.read(path) == good(device)
