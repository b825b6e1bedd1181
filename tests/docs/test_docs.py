"""The documents say what is so: links lead somewhere, flags exist, and the plugin shown works."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import gen_docs
import mutate
from ds_runtime.assembly.assemble import assemble
from ds_runtime.cli import build_parser
from ds_runtime.config import EngineConfig
from ds_runtime.ops.binding.backends import NAMES
from ds_runtime_kit.scaffold import files
from flags_page import own_hooks

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])


def label(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


page = pytest.mark.parametrize("page", PAGES, ids=label)
PATH_IN_CODE = re.compile(r"\b(?:docs|benchmarks|tests|tools|plugins)/[\w./-]+\.(?:md|py|cpp|h)\b")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def test_generated_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "gen_docs.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def named_tests(source: str) -> Iterator[tuple[str, ...]]:
    """What pytest can run by name in a file: functions, classes, their methods, and machines.

    A state machine's tests are `TestName = Machine.TestCase`.
    """
    for node in ast.parse(source).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield (name,)
            case ast.ClassDef(name=name):
                yield (name,)
                methods = (m for m in node.body if isinstance(m, ast.FunctionDef))
                yield from ((name, m.name) for m in methods)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute(attr="TestCase")):
                yield (name,)


def test_tests_are_found_by_their_whole_names() -> None:
    source = """
def test_a(): ...
class TestB:
    def test_c(self): ...
TestD = Machine.TestCase
TestE = Machine
TestD.settings = settings()
# def test_f(): TestG = Machine.TestCase
"""
    assert [*named_tests(source)] == [("test_a",), ("TestB",), ("TestB", "test_c"), ("TestD",)]


def test_every_named_fault_has_its_place() -> None:
    """The slow suite runs them; a change of the code that they name shows here already."""
    for fault in mutate.FAULTS:
        mutate.check_text(fault)
        for test in fault.tests:
            path, *of = test.split("::")
            assert not of or tuple(of) in named_tests((ROOT / path).read_text()), test
    with pytest.raises(mutate.MutationError, match="0 times"):
        mutate.check_text(mutate.FAULTS[0].__class__("x", "README.md", "no such text", "", ()))


def test_a_stale_page_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gen_docs, "DOCS", tmp_path)
    assert len(gen_docs.stale()) == len(gen_docs.pages())
    for path, text in gen_docs.pages().items():
        path.write_text(text)
    assert gen_docs.stale() == []
    (tmp_path / "hooks.md").write_text("old")
    assert gen_docs.stale() == [tmp_path / "hooks.md"]


@page
def test_links_lead_to_files(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@page
def test_paths_in_the_text_exist(page: Path) -> None:
    roots = ("core/", "kit/", "plugins/", "tests/", "tools/", "docs/", "benchmarks/", "examples/")
    written = dict(files("acme")) | dict(files("acme", "loader"))
    for word in re.findall(r"`([\w./-]+\.(?:py|md|cpp|h|jsonl|toml))`", page.read_text()):
        if word.startswith(roots) and word not in written:
            assert (ROOT / word).exists(), f"{page.name} names {word}"


def test_paths_in_sentences_of_the_code_exist() -> None:
    """A refusal that sends its reader to a page must not send him nowhere."""
    named = []
    below = ("core/ds_runtime", "kit/*/*", "plugins/*/*")
    for source in (file for folder in below for file in ROOT.glob(f"{folder}/**/*.py")):
        named += [(source, p) for p in PATH_IN_CODE.findall(source.read_text())]
    assert ("rocm", "docs/install.md") in {(s.parts[-3], p) for s, p in named}
    for source, path in named:
        assert (ROOT / path).exists(), f"{source.relative_to(ROOT)} names {path}"


def test_the_table_of_extras_is_that_of_the_package() -> None:
    """Every extra has its row, with every exact pin in it; the two without torch say why."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "install.md").read_text()
    rows = {m[1]: m[0] for m in re.finditer(r"^\| `(\w+)` \|.*$", page, re.MULTILINE)}
    assert rows.keys() == extras["optional-dependencies"].keys()
    for extra, wanted in extras["optional-dependencies"].items():
        pins = re.findall(r"([\w.-]+)==([\w.]+)", " ".join(wanted))
        assert all(f"{package} {version}" in rows[extra] for package, version in pins)
        if not any(re.match(r"torch\b(?!-)", w) for w in wanted):
            assert "--extra-index-url" in rows[extra]
            assert extra in page.partition("## Why")[2].splitlines()[0]


def test_torch_has_an_upper_bound_wherever_it_is_asked_for() -> None:
    """The base takes what an extra pins; what the tests run with is one release older."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert "torch>=2.11,<2.15" in project["dependencies"]
    assert "torch<2.14" in extras["cpu"] and "torch<2.14" in extras["dev"]
    page = (ROOT / "docs" / "install.md").read_text()
    assert "torch 2.11 or newer, below 2.15" in page


def known_flags() -> set[str]:
    """Every flag of every verb and of their kinds, and those that plugins name."""
    todo, found = [build_parser()[0]], {"--extra-index-url", "--index-url", "--no-build-isolation"}
    found |= {"--no-index", "--find-links", "--no-deps", "--wheel-dir"}  # of pip
    for plugin in ("cuda", "npu", "rocm", "triton"):
        found |= set(own_hooks(plugin).FLAGS)
    found |= {"--ds-platform", "--dist"}  # of pytest
    found.add("--nproc-per-node")  # of torchrun
    while todo:
        parser = todo.pop()
        found |= set(parser._option_string_actions)
        for action in parser._actions:
            if isinstance(action.choices, dict):
                todo += action.choices.values()
    return found


def tool_flags() -> set[str]:
    """Flags of the project's own scripts, of its pytest plugins and of .ci/run."""
    sources = [p for name in ("tools", "benchmarks", "tests") for p in ROOT.glob(f"{name}/*.py")]
    sources += ROOT.glob("tests/*/conftest.py")
    found = {f for s in sources for f in re.findall(r'"(--[a-z-]+)"', s.read_text())}
    usage = re.findall(r"^# \.ci/run (--[a-z]+)", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    return found | set(usage)


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=label)
def test_flags_in_the_text_exist(page: Path) -> None:  # a changelog names flags that are gone
    known = known_flags() | tool_flags()
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+", page.read_text()))
    assert named <= known


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_no_two_headings_of_a_page_are_one(page: Path) -> None:
    """A link leads to the first of them alone."""
    said = re.findall(r"^## .*", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    assert len(said) == len(set(said))


def test_known_flags_mark_every_value_that_ends_the_start() -> None:
    tables = [getattr(own_hooks(n), "BACKENDS", {}) for n in ("cuda", "rocm", "npu", "xpu")]
    ends = [
        f"| `{word}` | refused: {meant.says} |"
        for named in (NAMES, *tables)
        for words in named.values()
        for word, meant in words.items()
        if not isinstance(meant, str) and meant.refused
    ]
    page = (ROOT / "docs" / "known-flags.md").read_text()
    assert ends and not [row for row in ends if row not in page]


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("name", ["README.md", "docs/writing-a-plugin.md"])
def test_python_in_the_text_compiles(name: str) -> None:
    blocks = code_blocks(ROOT / name, "python")
    assert blocks
    for block in blocks:
        compile(block, name, "exec")


def test_the_loader_of_the_page_is_the_one_that_new_plugin_writes() -> None:
    """tests/core/test_new_plugin.py runs its tests."""
    page = (ROOT / "docs" / "writing-a-plugin.md").read_text()
    shown = re.findall(r"^#### `([\w./]+)`\n\n```\w+\n(.*?)```", page, re.DOTALL | re.MULTILINE)
    written = dict(files("acme", "loader"))
    assert [path for path, _ in shown] == [
        f"ds_runtime_acme/{n}.py" for n in ("__init__", "loader")
    ]
    for path, text in shown:
        assert text == written[path], f"{path} differs from what ds-runtime new-plugin writes"


def test_the_package_of_the_page_is_the_one_that_new_plugin_writes() -> None:
    """tests/core/test_seventh_platform.py selects, serves and breaks that one."""
    page = (ROOT / "docs" / "writing-a-plugin.md").read_text()
    shown = re.findall(r"^### `([\w./]+)`\n\n```\w+\n(.*?)```", page, re.DOTALL | re.MULTILINE)
    written = dict(files("acme"))
    assert len(shown) == 9
    for path, text in shown:
        assert text == written[path], f"{path} differs from what ds-runtime new-plugin writes"
    code = {p for p, text in written.items() if p.endswith((".py", ".toml", ".json")) and text}
    assert code == {path for path, _ in shown}


def test_the_plugin_shown_wins_its_op_and_conforms(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Path
) -> None:
    (source,) = (b for b in code_blocks(ROOT / "README.md", "python") if "# acme.py" in b)
    assert source == (ROOT / "examples/plugin/acme.py").read_text()
    lines = [line for line in source.splitlines() if line and not line.startswith("#")]
    assert len(lines) == 7 and "## A plugin in seven lines\n" in (ROOT / "README.md").read_text()
    made = types.ModuleType("acme")
    monkeypatch.setitem(sys.modules, "acme", made)
    exec(compile(source, "acme", "exec"), made.__dict__)
    config = EngineConfig(model=str(tiny_folder), plugins=("cpu",))
    found = assemble(config, extra_plugins=[sys.modules["acme"]])
    mine = [d for d in found.binding.decisions if d.op == "silu_mul"]
    assert mine and {d.kernel for d in mine} == {"acme.silu_mul"}

    import torch

    from ds_runtime.ops.binding.bound import BoundOps

    run = BoundOps(found.binding).at(0, "mlp").silu_mul
    x = torch.randn(5, 64, dtype=torch.float32)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(run(x), torch.nn.functional.silu(gate) * up)

    from ds_runtime_kit.checks.conformance import check_kernel
    from ds_runtime_kit.kit import subjects

    offered = subjects(found.plugins, found.device, ["acme"])
    results = [r for s in offered for r in check_kernel(s.kernel, s.facts, s.offers)]
    assert len(results) > 20 and all(r.ok for r in results)


def test_the_offline_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (b for b in code_blocks(ROOT / "README.md", "python") if "with LLM(" in b)
    assert len(block.strip().splitlines()) <= 7
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.endswith("579 stop\n")


def test_figures_of_an_h200_are_those_of_a_record() -> None:
    page = (ROOT / "README.md").read_text()
    (row,) = re.findall(r"^\| v3-slice \| (.*) \|$", page, re.MULTILINE)
    said = [float(n.replace(",", "")) for n in row.split(" | ")]
    lines = (ROOT / "benchmarks/results/device_decode.jsonl").read_text().splitlines()
    commit = re.search(r", commit (\w{7}):", page)[1]
    (record,) = [r for r in map(json.loads, lines) if r["commit"] == commit]
    assert record["device"] == "NVIDIA H200" and record["command"] in page
    assert f"One H200, torch {record['versions']['torch']}, " in page
    steps = {s["batch"]: s for s in record["steps"] if "batch" in s}
    assert said[:5] == [round(steps[n]["step_ms"], 3) for n in (1, 8, 32, 64, 128)]
    assert said[5] == round(steps[32]["prefill_tokens_per_s"])


def test_the_page_installs_every_device_from_a_clone() -> None:
    page = (ROOT / "README.md").read_text()
    assert page.index("git clone ") < page.index("pip install")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in extras["optional-dependencies"].keys() - {"dev", "otel"}:
        assert f'pip install -e ".[{extra}]"' in page, extra
