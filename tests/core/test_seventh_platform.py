"""A seventh platform, from a folder of its own: selected, served with over HTTP, and broken in
every way that the kit names. The package is new-plugin's, with a score."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from vendor import command, environment, place, scored

import ds_runtime
from ds_runtime.cli import main
from ds_runtime_kit.kit import CHECKS
from ds_runtime_kit.scaffold import write_plugin

CORE = Path(ds_runtime.__file__).parent
NAME = "septima"
KERNEL = "    return silu(gate) * up\n"
GATE = ', checks.devices("septima", "Septima devices", *ARCHS))'
WEIGHT = """\
        return Packed(TAG, weight.shape, {"weight": values}, values.nbytes, restored)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(TAG)
        return functional.linear(_whole_tiles(x), packed.tensors["weight"])
"""
LAST = "        self.last = values\n" + WEIGHT.replace('packed.tensors["weight"]', "self.last")
# Question → file, what is right in it, what is wrong, the op, and what conform says.
BROKEN = {
    "samples": ("small", KERNEL, "    return silu(up) * gate\n", "silu_mul", "relative error"),
    "weights": ("linear", WEIGHT, LAST, "linear", "relative error"),
    "rows": (
        *("small", KERNEL, "    return silu(gate) * up * (1 + 1e-7 * (len(up) > 1))\n"),
        *("silu_mul", "alone differ from the same rows among others"),
    ),
    "memory": (
        *("small", KERNEL, "    return silu(gate) * up.repeat(9, 1)[: len(up)]\n"),
        *("silu_mul", "are declared"),
    ),
    "capture": (
        *("small", KERNEL, "    return silu(gate) * up * float(gate.sum() > -1e30)\n"),
        *("silu_mul", "waits for the device"),
    ),
    "honesty": ("kernels", GATE, ")", "silu_mul", "accepts a device of type"),
    "codes": (
        *("coded", "quantize(rows, x, packed)\n", "quantize(rows, x * 2, packed)\n"),
        *("experts", "codes"),
    ),
}
# Experts that take codes, which new-plugin's package has none of.
CODED = """\
from ds_runtime.ops.reference.matrices.coded_experts import Fp8W8A8Experts


class Coded(Fp8W8A8Experts):
    def quantize(self, rows, x, packed):
        return super().quantize(rows, x, packed)
"""
OFFER = """\
OFFERS += (
    septima.offer(
        "experts",
        "coded:Coded",
        RANK_SPECIALISED,
        formats={"fp8_block"},
        numerics="fp8_w8a8",
        promises=Promises(graph_safe=False, skips_absent=True, takes_codes=True),
    ),
)
"""


def written(folder: Path) -> Path:
    """The package, installed below `folder`."""
    package = write_plugin(NAME, folder)
    place(package, package / "metadata")
    scored(package)
    return package


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("vendor"))


def tree() -> dict[str, tuple[int, int]]:
    """Sizes and times of every file of the core."""
    found = ((p, p.stat()) for p in CORE.rglob("*") if p.is_file() and p.suffix != ".pyc")
    return {str(p): (s.st_size, s.st_mtime_ns) for p, s in found}


def test_it_is_selected_and_touches_nothing(installed: Path) -> None:
    before = tree()
    done = command(installed, "ds_runtime", "plan", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["platform"] == NAME
    assert {r["kernel"] for r in plan["rows"] if r["op"] == "silu_mul"} == {f"{NAME}.silu_mul"}
    for device in ("x1", "x2"):
        described = command(
            installed, "ds_runtime", "plan", "--json", "--device", f"{NAME}-{device}"
        )
        assert json.loads(described.stdout)["arch"] == f"{NAME}_{device}"
    assert tree() == before


def test_it_serves_over_http(installed: Path) -> None:
    """Nothing names the platform: its score selects it, in the server and in the engine."""
    args = ["serve", "--port", "0", "--context-length", "1024", "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "ds_runtime", *args],
        cwd=installed.parent,
        env=environment(installed),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said: list[str] = []
    try:
        url = ""
        for line in process.stdout:
            said.append(line)
            if "OpenAI base URL" in line:
                url = line.split()[-1].rstrip(")")
                break
        assert url, "".join(said)
        talk = {"messages": [{"role": "user", "content": "12+30="}], "max_tokens": 96}
        answer = httpx.post(f"{url}/chat/completions", json={"model": "demo", **talk}, timeout=60)
        plan = httpx.get(f"{url}/plan", timeout=60).json()
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert answer.json()["choices"][0]["message"]["content"].endswith("42")
    assert plan["platform"] == NAME
    chosen = {r["kernel"] for r in plan["rows"]}
    assert {f"{NAME}.silu_mul", f"{NAME}.Linear"} <= chosen


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One to edit; imported here."""
    package = written(tmp_path)
    folder = package / f"ds_runtime_{NAME}"
    (folder / "coded.py").write_text(CODED)
    with (folder / "kernels.py").open("a") as kernels:
        kernels.write(OFFER)
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.syspath_prepend(str(package / "metadata"))
    yield package
    for loaded in [m for m in sys.modules if m.startswith(f"ds_runtime_{NAME}")]:
        del sys.modules[loaded]


def conform(*args: str) -> int:
    return main(["conform", NAME, "--platform", NAME, "--recorder", *args])


def test_as_it_is_it_conforms(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert conform("--receipts", str(package)) == 0
    said = capsys.readouterr().out
    assert said.count(" conforms (signature") == 3
    (receipt,) = package.glob(f"{NAME}-{NAME}_x1.json")
    asked = [set(k["checks"]) for k in json.loads(receipt.read_text())["kernels"]]
    assert set.union(*asked) == {"signature", *CHECKS}


@pytest.mark.parametrize("question", CHECKS)
def test_broken_in_a_way_that_the_kit_names_it_is_found(
    question: str, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, right, wrong, op, says = BROKEN[question]
    path = package / f"ds_runtime_{NAME}" / f"{file}.py"
    source = path.read_text()
    assert source.count(right) == 1
    path.write_text(source.replace(right, wrong))
    assert conform("--op", op) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any("FAILED" in line and f"{NAME}." in line for line in lines)
    found = [n for n, line in enumerate(lines) if line.startswith(f"  {question}, case ")]
    ends = [n for n in found if any(says in line for line in lines[n : n + 40])]
    assert ends, "\n".join(lines)
