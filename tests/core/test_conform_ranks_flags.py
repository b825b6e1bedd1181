"""What `ds-runtime conform --ranks N` refuses before a rank starts."""

from __future__ import annotations

import argparse

import pytest

from ds_runtime.cli import main
from ds_runtime.platform.cores import cores
from ds_runtime_cpu.platform import CpuPlatform
from ds_runtime_kit.cli import conform
from ds_runtime_kit.ranks import runs


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "1"], "--ranks 1: a group has at least 2 ranks"),
        (
            ["cpu", "--ranks", "2"],
            '"cpu" with --ranks 2: only a platform\'s communicator is tested; give --platform cpu',
        ),
        (
            ["cpu", "triton", "--ranks", "2"],
            '"cpu triton" with --ranks 2: only a platform\'s communicator is tested; '
            "give --platform X",
        ),
        (
            ["--ranks", "2", "--platform", "nowhere"],
            "ds-runtime: --platform 'nowhere': no such platform",
        ),
    ],
)
def test_bad_input(capsys, words, said):
    assert main(["conform", *words]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [
        ["--mode", "perf"],
        ["--mode", "support"],
        ["--op", "linear"],
        ["--kernel", "a", "b"],
        ["--check", "rows"],
        ["--case", "file.json"],
        ["--receipts", "folder"],
        ["--recorder"],
    ],
    ids=" ".join,
)
def test_what_says_nothing_of_ranks_is_refused_by_name(capsys, monkeypatch, given):
    monkeypatch.setattr(runs, "check_ranks", never)
    assert main(["conform", "--ranks", "3", *given]) == 1
    said = capsys.readouterr().err
    assert f"{' '.join(given)} with --ranks 3: only a platform's communicator is tested" in said
    assert f"leave {'it' if given == ['--recorder'] else given[0]} out" in said


def test_every_flag_of_conform_is_taken_with_ranks_or_refused():
    """A flag that is added belongs to one of them."""
    parser = argparse.ArgumentParser()
    conform.add(parser.add_subparsers())
    flags = {*vars(parser.parse_args(["conform"]))} - {"run", "looks"}
    taken = {"ranks", "platform", "plugins", "json"}
    refused = {"plugin", "mode", "op", "kernel", "check", "case", "receipts", "recorder"}
    assert flags == taken | refused


def never(*args):
    raise AssertionError("ranks were started")


@pytest.mark.parametrize("more", [1, 999, 10**9])
def test_no_more_ranks_start_than_cores_bear(capsys, monkeypatch, more):
    monkeypatch.setattr(runs, "check_ranks", never)
    most = 4 * cores()
    assert main(["conform", "--platform", "cpu", "--ranks", str(most + more)]) == 1
    said = capsys.readouterr().err
    assert f"--ranks {most + more}: ranks share the {cores()} cores of this host" in said
    assert f"give at most {most}" in said
    monkeypatch.setattr(runs, "check_ranks", lambda *given: iter(()))
    assert main(["conform", "--platform", "cpu", "--ranks", str(most)]) == 0


@pytest.mark.parametrize("ranks", [3, 999, 10**9])
def test_every_rank_has_a_device_before_one_starts(capsys, monkeypatch, ranks):
    true = CpuPlatform.info

    def info(self, rank=0):
        if rank > 1:
            raise RuntimeError("invalid device ordinal")
        return true(self, rank)

    monkeypatch.setattr(runs, "check_ranks", never)
    monkeypatch.setattr(CpuPlatform, "own_memory", True)
    monkeypatch.setattr(CpuPlatform, "info", info)
    assert main(["conform", "--platform", "cpu", "--ranks", str(ranks)]) == 1
    said = capsys.readouterr().err
    assert f"--ranks {ranks}: {ranks} devices are needed, and number 2 cannot be had" in said
    assert "invalid device ordinal" in said
