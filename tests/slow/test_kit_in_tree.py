"""The vendor kit's other questions, asked of every kernel of this repository in one dtype."""

from __future__ import annotations

import pytest

from ds_runtime.cli import main
from ds_runtime.ops.contract import DeviceInfo
from ds_runtime.plugins.manager import load_plugins
from ds_runtime_kit.kit import Subject, by_kernel, check_all, subjects

pytestmark = pytest.mark.slow
HOST = DeviceInfo("cpu", "host", "any")
SMALL = by_kernel(
    s
    for s in subjects(load_plugins(), HOST)
    if s.width == "small" and s.facts.dtype == s.facts.kv_dtype == "bfloat16"
)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("mine", SMALL.values(), ids=["-".join(k) for k in SMALL])
def test_kernel_is_honest_and_reads_any_weight(mine: list[Subject]) -> None:
    found = list(check_all(mine, checks=("weights", "rows", "memory", "honesty")))
    failures = [f"{r.check}: {r.case}: {r.failure}" for r in found if not r.ok]
    assert not failures, "\n".join(failures)


def test_perf_mode_times_the_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "cpu", "--mode", "perf", "--op", "silu_mul", "--platform", "cpu"]) == 0
    assert "cpu.silu_mul" in capsys.readouterr().out
