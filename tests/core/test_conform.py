"""`ds-runtime conform`: verdicts, receipts that `plan` shows, the support matrix, and bad input."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from ds_runtime.api import OPS, Facts, Kernel, hookimpl
from ds_runtime.assembly import receipts
from ds_runtime.assembly.assemble import assemble
from ds_runtime.cli import main
from ds_runtime.config import EngineConfig
from ds_runtime.ops.contract import DeviceInfo
from ds_runtime.ops.reference.activation import silu_mul
from ds_runtime.plugins.manager import load_plugins
from ds_runtime_cpu.platform import CpuPlatform
from ds_runtime_kit import conform
from ds_runtime_kit.cli.conform import _line
from ds_runtime_kit.kit import subjects

HOST = DeviceInfo("cpu", "host", "any")


def half(gate_up: Tensor) -> Tensor:
    return silu_mul(gate_up) / 2


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A plugin with a wrong silu_mul and one that serves nothing here."""
    made = ModuleType("ds_runtime_wrong")

    def ds_ops(facts: Facts) -> list[Kernel]:
        def only_cpu(f: Facts) -> str | None:
            return None if f.device.type == "cpu" else "no cpu"

        mine = Kernel(OPS["silu_mul"], "ds_runtime_wrong:half", "wrong", 99, only_cpu)
        never = Kernel(OPS["embed"], "ds_runtime_wrong:x", "wrong", 99, lambda f: "the moon is new")
        return [mine, never]

    made.ds_ops = hookimpl(ds_ops)  # type: ignore[attr-defined]
    made.half = half  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ds_runtime_wrong", made)
    return made


def test_a_wrong_kernel_fails_and_one_that_is_not_for_here_says_why(wrong: ModuleType) -> None:
    plugins = load_plugins((), extra=[wrong])
    wanted = conform.Wanted(checks=("samples",))
    found = list(conform.verdicts(plugins, HOST, wrong.__name__, wanted))
    bad, never = found
    assert bad.failures and "FAILED" in _line(bad) and "relative error 0.5" in _line(bad)
    assert never.skipped == "the moon is new" and "not here: the moon is new" in _line(never)
    entry = bad.to_dict()
    assert entry["checks"]["samples"]["failed"] == len(bad.failures)
    assert entry["failures"][0].startswith("samples: ")


def test_the_command_tests_names_and_writes_no_receipt_of_a_part(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = ["conform", "cpu", "--platform", "cpu", "--receipts", str(tmp_path)]
    assert main([*base, "--op", "silu_mul", "--check", "samples"]) == 0
    assert "cpu.silu_mul" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert main([*base, "--op", "silu_mul", "--json"]) == 0
    (receipt,) = json.loads(capsys.readouterr().out)
    assert receipt["not_asked"] == []
    monkeypatch.setattr(CpuPlatform, "captures", False)
    assert main([*base, "--op", "silu_mul", "--json"]) == 0
    (receipt,) = json.loads(capsys.readouterr().out)
    assert receipt["not_asked"] == ["capture"]
    assert main([*base, "--op", "silu_mul", "--check", "weights"]) == 0
    said = capsys.readouterr().out
    assert "has nothing that this would ask" in said and "conforms" not in said
    assert main([*base, "--op", "silu_mul", "--recorder", "--check", "capture"]) == 1
    assert "(recorded were torch's ops alone)" in capsys.readouterr().out
    base[1] = "reference"
    assert main([*base, "--op", "rope", "--recorder", "--check", "capture"]) == 0
    assert "reference.rope               conforms (capture" in capsys.readouterr().out
    assert receipt["plugin"] == "cpu" and receipt["digest"].startswith("sha256:")
    assert {k["op"] for k in receipt["kernels"]} == {"silu_mul"}


def test_a_platform_without_captures_is_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuPlatform, "captures", False)
    asked = ["--platform", "cpu", "cpu", "--op", "silu_mul", "--check", "capture"]
    assert main(["conform", *asked]) == 1
    assert "--recorder records torch's ops" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["cpu", "--op", "silu"], "--op 'silu'"),
        (["cpu", "--check", "luck"], "--check 'luck'"),
        (["nobody"], "no such plugin"),
        (["cpu", "--kernel", "cpu.nothing"], "no such kernel"),
        (["--mode", "perf", "nobody"], "no such plugin"),
        (["--mode", "perf", "--op", "silu"], "--op 'silu'"),
        (["--mode", "support", "nobody"], "no such plugin"),
        (["--mode", "support", "--op", "silu"], "--op 'silu'"),
        (
            ["--mode", "support", "npu", "--op", "sample"],
            "no such kernel serves a described device",
        ),
        (["--case", "/nowhere"], "cannot be read: No such file"),
    ],
)
def test_bad_input_is_a_sentence(
    args: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conform", "--platform", "cpu", *args]) == 1
    assert says in capsys.readouterr().err


def test_subjects_name_themselves() -> None:
    every = subjects(load_plugins(()), HOST, ["reference"])
    first = next(s for s in every if s.kernel.op.name == "mha_prefill")
    assert str(first) == "mha_prefill-reference.mha_prefill-float32-small"


def assembled() -> Any:
    return assemble(EngineConfig(plugins=("cpu",), platform="cpu", dtype="float32"))


def test_the_plan_says_what_a_receipt_covers(tmp_path: Path) -> None:
    assembly = assembled()
    (line,) = receipts.standing(assembly, ())
    assert line == "receipt  cpu: none for this device; ds-runtime conform makes one"
    used = {(r.op, r.kernel) for r in assembly.plan.rows if r.provider == "cpu"}
    kernels = [k for k in assembly.offers.kernels if (k.op.name, k.name) in used]
    report = assembly.plugins.reports["cpu"]
    found = [conform.Verdict(k) for k in kernels]
    whole = conform.receipt(report, assembly.platform, assembly.device, found)
    path = tmp_path / "receipts" / "cpu.json"
    receipts.write(whole, path)
    (path.parent / "rubbish.json").write_text("{")

    def says(**changed: Any) -> str:
        path.write_text(json.dumps({**whole, **changed}))
        (said,) = receipts.standing(assembly, receipts.read_all(path.parent))
        return said

    assert f"{len(used)} of {len(used)} kernels conform (0 cases, " in says()
    assert "is of other code" in says(digest="sha256:0")
    assert "none for this device" in says(arch="elsewhere")
    assert f"not covered: {kernels[0].op.name}" in says(kernels=whole["kernels"][1:])
    older = [{**whole["kernels"][0], "contract": 0}, *whole["kernels"][1:]]
    assert f"not covered: {kernels[0].op.name}" in says(kernels=older)
    skipped = [{**whole["kernels"][0], "skipped": "x"}, *whole["kernels"][1:]]
    assert f"not covered: {kernels[0].op.name}" in says(kernels=skipped)
    assert says(not_asked=["capture"]).endswith("; not asked: capture")
    failed = [{**whole["kernels"][0], "failures": ["x"]}, *whole["kernels"][1:]]
    assert f"FAILED: {kernels[0].op.name}" in says(kernels=failed)


def test_plan_shows_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", "--platform", "cpu", "--receipts", str(tmp_path)]) == 0
    assert "receipt  cpu: none for this device" in capsys.readouterr().out


def test_the_digest_is_of_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "ds_runtime_digested"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "lib.so").write_bytes(b"1")
    monkeypatch.syspath_prepend(str(tmp_path))
    first = receipts.code_digest("ds_runtime_digested.sub")
    (package / "lib.so").write_bytes(b"2")
    assert receipts.code_digest("ds_runtime_digested") != first
    assert receipts.code_digest("ds_runtime_nowhere") == ""


def test_support_is_a_matrix_over_described_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "--mode", "support", "--op", "linear", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {r["op"] for r in rows} == {"linear"}
    mine = {r["format"] for r in rows if r["kernel"] == "reference.Fp8W8A8Linear"}
    assert mine == {"fp8_block"}
    assert main(["conform", "--mode", "support", "--op", "rms_norm"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("# Which kernel runs where") and "| h100 | NVIDIA H100" in page
    *_, heading = headings = re.findall("^## .*", page, re.MULTILINE)
    assert headings[:-1] == ["## What does not go together", "## Devices"]
    assert heading == "## rms_norm"
    assert "| reference.rms_norm | – | all | all | all |" in page
