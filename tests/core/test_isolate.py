"""Plugins that crash or hang are sentences, and doctor says why nothing better is active."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty import install

from ds_runtime.cli.inspect import evidence
from ds_runtime.cli.inspect.doctor import _active, _Better, next_command

SEGFAULT = "import ctypes\n@hookimpl\ndef ds_platform(): ctypes.string_at(0)\n"
HANG = "import time\n@hookimpl\ndef ds_platform(): time.sleep(1000)\n"
IN_INFO = """
import os, signal
class Mine(Platform):
    name = 'mine'
    def info(self, rank=0): os.kill(os.getpid(), signal.SIGILL)
    def device(self, rank=0): raise RuntimeError
    def memory(self, rank=0): return MemoryInfo(1, 1)
@hookimpl
def ds_platform(): return Mine()
"""
FAULTS = {
    "crash": (SEGFAULT, "ds_platform crashed with SIGSEGV", "in ds_platform"),
    "hang": (HANG, "ds_platform did not end within 1 s", "in ds_platform"),
    "leave": ("import os; os._exit(7)", "import ended the process with exit code 7", ""),
    "driver": (IN_INFO, "info() crashed with SIGILL", ""),
    "unnamed": (  # Python has no name for it
        f"import os\nos.kill(os.getpid(), {signal.SIGRTMIN + 6})\n",
        f"import crashed with signal {signal.SIGRTMIN + 6:d}",
        "",
    ),
    "probe": (
        "import os\ndef PROBE(): os.abort()\n@hookimpl\ndef ds_ops(): return []\n",
        "PROBE crashed with SIGABRT",
        "in PROBE",
    ),
}
MAIN = """
import json, sys
from ds_runtime.plugins import isolate
isolate.LIMIT = 1
from ds_runtime.cli import main
raise SystemExit(main(json.loads(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sites")
    for name, (code, _, _) in FAULTS.items():
        install(root / name, None, code, name, f"{name}-dist")
    return {name: root / name for name in FAULTS}


def run(
    sites: list[Path], *args: str, begin: Callable[[], object] | None = None, **environment: str
) -> tuple[int, str, str]:
    """begin: what the process does before it is another program."""
    path = os.pathsep.join([*filter(None, sys.path), *map(str, sites)])
    done = subprocess.run(
        [sys.executable, "-c", MAIN, json.dumps(args)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=begin,
    )
    return done.returncode, done.stdout, done.stderr


def _ignores() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


@pytest.mark.parametrize("args", [("plugins", "--json"), ("plan",), ("doctor",)])
@pytest.mark.parametrize("faults", [[], ["crash", "leave", "unnamed"]])
def test_a_command_whose_parent_ignores_the_end_of_children_says_the_same(
    sites: dict[str, Path], args: tuple[str, ...], faults: list[str]
) -> None:
    """The system keeps no exit codes then, and that is inherited."""
    found = [run([sites[f] for f in faults], *args, begin=begin) for begin in (None, _ignores)]
    (code, _, err), (same, _, also) = found
    assert code == same and "Traceback" not in also
    assert [line.split(";")[0] for line in also.splitlines()] == [
        line.split(";")[0] for line in err.splitlines()
    ]


def test_whatever_ends_or_holds_the_process_is_named_with_its_stack(
    sites: dict[str, Path],
) -> None:
    code, out, _ = run([*sites.values()], "plugins", "--json")
    assert code == 0
    rows = {row["name"]: row for row in json.loads(out)}
    for name, (_, said, stack) in FAULTS.items():
        assert rows[name]["says"] == f"broken: {said}"
        assert stack in rows[name]["traceback"]
        assert not stack or f"{name}_dist_module.py" in rows[name]["traceback"]
    assert rows["cpu"]["platform"] == "cpu", "the others are there"


def test_a_start_stops_at_a_plugin_that_crashes_unless_the_user_says_more(
    sites: dict[str, Path],
) -> None:
    crash = [sites["crash"]]
    code, _, err = run(crash, "plan")
    assert code == 1
    assert err.startswith("ds-runtime: plugin crash is broken: ds_platform crashed with SIGSEGV; ")
    assert "--allow-platform-downgrade" in err and "Traceback" not in err
    for more in (["--platform", "cpu"], ["--allow-platform-downgrade"]):
        code, out, err = run(crash, "plan", *more)
        assert (code, err.count("\n")) == (0, 1)
        assert "plugin crash is left out: broken: ds_platform crashed with SIGSEGV" in err
        assert "platform cpu" in out


def test_what_asks_no_machine_tries_no_plugin(sites: dict[str, Path]) -> None:
    for args in (["serve", "--help"], ["plan", "--device", "h100"]):
        assert run([sites["crash"]], *args)[0] == 0


def test_doctor_names_it_and_where_its_stack_is(sites: dict[str, Path]) -> None:
    code, out, _ = run([sites["crash"]], "doctor")
    lines = [line.split(maxsplit=2) for line in out.splitlines()]
    assert code == 0
    assert ["plugin", "crash", "broken: ds_platform crashed with SIGSEGV"] in lines
    assert ["its", "traceback", "ds-runtime plugins --verbose (crash_dist_module)"] in lines
    assert ["not", "crash", "broken: ds_platform crashed with SIGSEGV"] in lines
    assert ["active", "platform", "cpu"] in lines
    assert out.splitlines()[-1] == "next: ds-runtime plugins --verbose"


# what doctor sees by itself


def device(root: Path, address: str, cls: str, ids: tuple[str, str], driver: str = "") -> None:
    folder = root / "sys/bus/pci/devices" / address
    folder.mkdir(parents=True)
    for name, value in (("class", cls), ("vendor", ids[0]), ("device", ids[1])):
        (folder / name).write_text(value + "\n")
    if driver:
        (root / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (folder / "driver").symlink_to(root / "drivers" / driver)


def test_devices_are_seen_on_the_bus_whether_or_not_a_plugin_knows_them(tmp_path: Path) -> None:
    assert [kind for kind, _ in evidence.pci(tmp_path)] == ["pci"]
    for i in range(2):
        device(tmp_path, f"0000:0{i}:00.0", "0x030200", ("0x1af4", "0x2330"), "acme_drv")
    device(tmp_path, "0000:09:00.0", "0x120000", ("0x1af4", "0x74a1"))
    device(tmp_path, "0000:0a:00.0", "0x020000", ("0x1af4", "0x1000"))  # a network card
    assert list(evidence.pci(tmp_path)) == [
        ("display controller", "2 × 1af4:2330, kernel driver acme_drv"),
        ("processing accelerator", "1 × 1af4:74a1, no kernel driver is bound to it"),
    ]


def test_packages_of_an_extra_that_are_missing_or_of_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "s", monkeypatch, "", "acme", "acme-dist")
    metadata = tmp_path / "s" / "acme_dist-2.5.dist-info" / "METADATA"
    lines = (
        "Requires-Dist: numpy",
        "Requires-Dist: pytest==1.0; extra == 'acme'",
        "Requires-Dist: msgspec>=0.1; extra == 'acme'",
        "Requires-Dist: acme-driver==3.1; extra == 'acme'",
        "Requires-Dist: elsewhere; extra == 'acme' and sys_platform == 'nowhere'",
    )
    metadata.write_text(metadata.read_text() + "\n".join(lines) + "\n")
    assert evidence.has_extra("acme-dist", "acme")
    assert not evidence.has_extra("acme-dist", "other") and not evidence.has_extra("none", "x")
    wrong, missing = evidence.mismatches("acme-dist", "acme")
    assert wrong.startswith("pytest is ") and wrong.endswith(", expected ==1.0")
    assert missing == "acme-driver is not installed"
    row = {"name": "acme", "distribution": "acme-dist", "says": "not installed: 8 cards"}
    better = _Better.of(row)
    assert _active(["cpu"], [better]) == [
        ("active", "platform cpu"),
        ("  not acme", "not installed: 8 cards"),
        ("  acme lacks", wrong),
        ("  acme lacks", missing),
    ]
    assert next_command(["cpu"], False, [better]) == 'pip install "acme-dist[acme]"'
    assert next_command(["cpu"], True, [better]) == "ds-runtime plugins --verbose"
