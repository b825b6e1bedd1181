"""The commands of the distribution's tools: they are there whatever the user says of plugins."""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from faulty import install

from ds_runtime.cli import build_parser, main
from ds_runtime.plugins import manager as plugins
from ds_runtime.plugins.manager import TOOLS, load_plugins

VERBS = ("bench", "convert", "conform", "bisect", "new-plugin")
Capture = pytest.CaptureFixture[str]
verbs = pytest.mark.parametrize("verb", VERBS)

HELLO = """
@hookimpl
def ds_cli(subcommands):
    subcommands.add_parser({verb!r}, description="Not it.").set_defaults(run=lambda args: 3)
"""


@pytest.fixture
def nothing_allowed(tmp_path: Path) -> str:
    path = tmp_path / "allowed"
    path.write_text('{"format": 1, "plugins": []}')
    return str(path)


@verbs
@pytest.mark.parametrize("plugins", [None, "", "cpu", "null"])
def test_a_tool_s_command_is_there(
    verb: str,
    plugins: str | None,
    nothing_allowed: str,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    restricted = ["--plugin-allowlist", nothing_allowed]
    restricted += [] if plugins is None else [f"--plugins={plugins}"]
    assert main([verb, "--help", *restricted]) == 0
    assert f"usage: ds-runtime {verb}" in capsys.readouterr().out
    if plugins:
        monkeypatch.setenv("DS_PLUGINS", plugins)
        assert main([verb, "--help"]) == 0


def test_tools_are_no_plugins(capsys: Capture) -> None:
    """They need not be listed, and cannot be: what they bring is always there."""
    assert not TOOLS.keys() & load_plugins().reports.keys()
    assert main(["plugins"]) == 0
    assert not any(f"\n{name} " in capsys.readouterr().out for name in TOOLS)


@verbs
def test_no_plugin_takes_a_tool_s_command(
    verb: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, HELLO.format(verb=verb), "a_first", "a-first")
    assert main([verb, "--help"]) == 0
    said = capsys.readouterr()
    assert "Not it." not in said.out
    assert f"ds_cli adds {verb!r}, which is taken" in said.err


def test_a_tool_that_cannot_be_imported_costs_its_commands_alone(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "TOOLS", {**TOOLS, "bench": "ds_runtime_bench_lost"})
    assert main(["serve", "--help"]) == main(["convert", "--help"]) == 0
    assert main(["bench", "--help"]) == 2
    said = capsys.readouterr().err
    assert "plugin bench is broken: ModuleNotFoundError" in said and "left out" in said


def described(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> dict[str, str]:
    return {verb: str(parser.description) for verb, parser in subcommands.choices.items()}


def test_a_plugin_s_command_keeps_its_description(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, HELLO.format(verb="hello"), "hello", "hello-dist")
    assert main(["hello", "--help"]) == 0
    assert "Not it." in capsys.readouterr().out
    assert main(["hello"]) == 3
    assert "receipt" in described(build_parser()[1])["conform"]


@pytest.mark.parametrize("args", [["--help"], *([v, "--help"] for v in VERBS)], ids=" ".join)
def test_help_loads_no_torch(args: list[str]) -> None:
    code = "import sys; from ds_runtime.cli import main; main(sys.argv[1:]); "
    code += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, *args], check=True, timeout=60, capture_output=True)


# the promised names of the kit

PROMISED = {
    "checkpoints": ("ds_runtime_kit.loaders.checkpoints", ("write_checkpoint",)),
    "conformance": ("ds_runtime_kit.checks.conformance", ("cases_for", "check_kernel")),
    "fake": ("ds_runtime_kit.devices.fake", ("plan",)),
    "kit": ("ds_runtime_kit.kit", ("CHECKS", "check_all", "subjects")),
    "null": ("ds_runtime_kit.devices.null", ("ds_platform",)),
    "numerics": ("ds_runtime_kit.checks.numerics", ()),
    "pytest_plugin": (
        "ds_runtime_kit.pytest_plugin",
        ("conformance", "pytest_addoption", "pytest_generate_tests"),
    ),
}


@pytest.mark.parametrize("name", PROMISED)
def test_what_authors_import_is_what_the_kit_has(name: str) -> None:
    place, some = PROMISED[name]
    promised, kit = (import_module(m) for m in (f"ds_runtime.testing.{name}", place))
    public = [n for n in vars(kit) if not n.startswith("_")]
    assert {*some} <= {*public}
    assert not [n for n in public if getattr(promised, n) is not getattr(kit, n)]


def test_every_module_of_the_promise_is_held_to_it() -> None:
    import ds_runtime.testing

    folder = Path(str(ds_runtime.testing.__file__)).parent
    assert {p.stem for p in folder.glob("*.py")} - {"__init__"} == {*PROMISED}
