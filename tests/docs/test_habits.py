"""What stands beside the code: fragments, recipes, workflow, templates and records are sound."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import changelog
from ds_runtime._version import __version__

ROOT = Path(__file__).parents[2]


def test_the_fragments_of_the_tree_are_sound() -> None:
    changelog.fragments(ROOT)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("a.new.md", "x", "KIND one of added"),
        ("A b.added.md", "x", "KIND one of added"),
        ("a.added.txt", "x", "KIND one of added"),
        ("a.added.md", " \n", "has 0 characters"),
        ("a.added.md", "x" * 501, "has 501 characters"),
    ],
)
def test_a_wrong_fragment_is_named(tmp_path: Path, file: str, text: str, said: str) -> None:
    (tmp_path / "changelog.d").mkdir()
    (tmp_path / "changelog.d" / file).write_text(text)
    with pytest.raises(ValueError, match=said) as raised:
        changelog.fragments(tmp_path)
    assert file in str(raised.value)


def test_a_release_moves_the_fragments(tmp_path: Path) -> None:
    folder = tmp_path / "changelog.d"
    folder.mkdir()
    (folder / "README.md").write_text("how")
    page = tmp_path / "CHANGELOG.md"
    page.write_text("# Changelog\n\n## 0.1.0\n\n* Old.\n")
    with pytest.raises(ValueError, match="nothing to release"):
        changelog.release(tmp_path, "0.2.0")
    (folder / "b.fixed.md").write_text("B works\nagain.\n")
    (folder / "a.added.md").write_text("A is new.\n")
    with pytest.raises(ValueError, match=r"section 0\.1\.0"):
        changelog.release(tmp_path, "0.1.0")
    changelog.release(tmp_path, "0.2.0")
    assert page.read_text() == (
        "# Changelog\n\n## 0.2.0\n\n### Added\n\n* A is new.\n\n### Fixed\n\n"
        "* B works\n  again.\n\n## 0.1.0\n\n* Old.\n"
    )
    assert [p.name for p in folder.iterdir()] == ["README.md"]


def test_a_section_under_way_takes_the_fragments(tmp_path: Path) -> None:
    folder = tmp_path / "changelog.d"
    folder.mkdir()
    page = tmp_path / "CHANGELOG.md"
    page.write_text("# Changelog\n\n## 0.2.0 (unreleased)\n\n* Here.\n\n## 0.1.0\n\n* Old.\n")
    (folder / "a.added.md").write_text("A is new.\n")
    with pytest.raises(ValueError, match=r"0\.2\.0 \(unreleased\)"):
        changelog.release(tmp_path, "0.3.0")
    changelog.release(tmp_path, "0.2.0")
    assert page.read_text() == (
        "# Changelog\n\n## 0.2.0\n\n* Here.\n\n### Added\n\n* A is new.\n\n## 0.1.0\n\n* Old.\n"
    )


@pytest.mark.parametrize("args", [[], ["--check", "1.0"], ["--chekc"]])
def test_the_tool_refuses_what_it_does_not_know(args: list[str]) -> None:
    command = [sys.executable, str(ROOT / "tools/changelog.py"), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "usage" in done.stderr


def recipes() -> dict[str, list[str]]:
    """The commands of each recipe of the justfile."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "justfile").read_text().splitlines():
        if head := re.match(r"([a-z]+)[^:=]*:$", line):
            found[head[1]] = []
        elif line.startswith("    "):
            found[list(found)[-1]].append(line.strip())
    return found


def test_the_contributors_page_names_recipes_that_are_there() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`just ([a-z]+)", page))
    assert named and named <= recipes().keys()


def test_just_reads_the_justfile() -> None:
    just = Path(sys.executable).with_name("just")
    command = [str(just) if just.exists() else shutil.which("just") or "just", "--list"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    assert set(re.findall(r"^    (\w+)", done.stdout, re.MULTILINE)) == recipes().keys()


def test_lint_checks_what_ci_checks() -> None:
    ci = (ROOT / ".ci/run").read_text()
    for command in recipes()["lint"]:
        if "gen_docs" not in command and "changelog" not in command:  # tests hold these
            assert command in ci, command


def test_files_that_recipes_and_hooks_run_exist() -> None:
    said = [c for commands in recipes().values() for c in commands]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    said += [hook["entry"] for hook in hooks]
    named = {p for c in said for p in re.findall(r"[\w./]+\.py\b|\.ci/run", c)}
    assert len(named) >= 4
    assert all((ROOT / path).is_file() for path in named)
    assert all(hook["language"] == "system" for hook in hooks), "hooks need no network"


def test_the_workflow_runs_what_a_change_must_pass() -> None:
    flow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    (job,) = flow["jobs"].values()
    assert [s["run"] for s in job["steps"] if "run" in s][-1] == ".ci/run"
    assert flow["permissions"] == {"contents": "read"}
    version = next(s["with"] for s in job["steps"] if "python" in s.get("uses", ""))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={version['python-version']}"
    (limit,) = re.findall(r'^    ""\) limit=(\d+)', (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert job["timeout-minutes"] * 60 > int(limit), "it would end before .ci/run says what hangs"


def workflows() -> list[Path]:
    """Those of this repository, and of the packages that `new-plugin` writes."""
    written = ROOT / "kit/vendor/ds_runtime_kit/templates"
    return [*ROOT.glob(".github/workflows/*"), *written.glob("*/.github/workflows/*")]


@pytest.mark.parametrize("path", workflows(), ids=lambda p: str(p.relative_to(ROOT)))
def test_actions_are_pinned_to_a_commit_that_says_its_version(path: Path) -> None:
    used = re.findall(r"uses: *(.*)", path.read_text())
    assert used
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", action), action


def test_the_extra_of_contributors_brings_what_recipes_and_hooks_call() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = {re.split(r"[<>=;\[]", one)[0] for one in project["optional-dependencies"]["dev"]}
    packages = {"lint-imports": "import-linter", "mkdocs": "mkdocs-material"}
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    called = [c for commands in recipes().values() for c in commands]
    called += [hook["entry"] for hook in hooks] + ["just", "pre-commit"]
    tools = {c.split()[0] for c in called} - {"pip", "python", ".ci/run"}
    assert len(tools) >= 6
    assert {packages.get(tool, tool.replace("just", "rust-just")) for tool in tools} <= extra


def test_the_templates_are_forms() -> None:
    forms = {p.name: yaml.safe_load(p.read_text()) for p in ROOT.glob(".github/ISSUE_TEMPLATE/*")}
    for file, form in forms.items():
        if file != "config.yml":
            ids = [part["id"] for part in form["body"]]
            assert form["name"] and form["description"] and len(ids) == len(set(ids))


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert cited["version"] == __version__ and cited["cff-version"] == "1.2.0"
    assert cited["license"] == "Apache-2.0" and "Apache" in (ROOT / "LICENSE").read_text()
    assert cited["title"].startswith(project["name"]) and cited["authors"] and cited["message"]


def test_every_decision_is_a_numbered_record_in_the_index() -> None:
    folder = ROOT / "docs/decisions"
    records = sorted(p for p in folder.glob("*.md") if p.name != "index.md")
    assert [int(p.name[:3]) for p in records] == list(range(1, len(records) + 1))
    index = (folder / "index.md").read_text()
    assert re.findall(r"\]\(([\w-]+\.md)\)", index) == [p.name for p in records]
    for record in records:
        text = record.read_text()
        title, *headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        assert headings == ["Why", "Decision", "What follows"]
        assert f"[{record.name[:3]}]({record.name}): {title[4:]}." in index


def glossary() -> list[str]:
    """The words of docs/glossary.md, each as its row begins."""
    page = (ROOT / "docs/glossary.md").read_text()
    return re.findall(r"^\| ([\w ,()-]+?) \| (?!means)", page, re.MULTILINE)


def test_the_glossary_is_in_order() -> None:
    words = glossary()
    assert len(words) >= 40 and words == sorted(words) and len(words) == len(set(words))


PLAIN = {"return", "raise"}  # in italics as words, not as terms of our own
TERM = re.compile(r"(?<![\w*])\*([a-z][^*\n`]{1,29})\*(?![\w*])")


def terms(page: str) -> set[str]:
    """The words in italics of a page, outside code: a page introduces a word of its own so."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page, flags=re.DOTALL)
    return {t for t in TERM.findall(text) if not t.endswith((".", "!", "?"))}


def test_words_in_italics_are_in_the_glossary() -> None:
    known = {w for row in glossary() for w in re.sub(r" \(.*\)", "", row).split(", ")}
    known |= {f"{w}s" for w in known}
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    found = {(t, p.name) for p in pages for t in terms(p.read_text())}
    assert len({t for t, _ in found}) >= 10
    assert not {(t, p) for t, p in found if t not in known | PLAIN}


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ("A *gate* is.", {"gate"}),
        ("| *own bits* |", {"own bits"}),
        ("**bold** and 2 * 3 * 4", set()),
        ("`*code*` and ```\n*code*\n```", set()),
        ("* item\n* item", set()),
        ("a *whole sentence.*", set()),
    ],
)
def test_terms_of_a_page(page: str, found: set[str]) -> None:
    assert terms(page) == found


def test_the_release_checklist_installs_what_it_built() -> None:
    page = (ROOT / "docs/release.md").read_text()
    assert "--find-links dist" in page and "--no-index" in page
    assert "--wheel-dir dist" in page and "DS_REQUIRE_NATIVE=1" in page


def test_the_readme_says_the_essential_on_one_screen() -> None:
    """What it is, why, how fast, two starts and what never ran: before the first heading."""
    top = (ROOT / "README.md").read_text().partition("\n## ")[0]
    assert len(top.splitlines()) <= 45
    for said in (
        "SGLang",
        "llama.cpp",
        "**Never run:**",
        "671 billion",
        "Blackwell",
        "AMD",
        "Ascend",
    ):
        assert said in top
    assert '".[cuda]" && ds-runtime serve' in top and '".[cpu]" && ds-runtime serve' in top


def test_what_ran_of_v3_is_what_its_records_say() -> None:
    (said,) = re.findall(r"\[(\d+) of its (\d+) layers\]", (ROOT / "README.md").read_text())
    lines = (ROOT / "benchmarks/results/v3_whole.jsonl").read_text().splitlines()
    records = [r for r in map(json.loads, lines) if r["model"] == "v3"]
    ran = max((r["layers"], r["of_layers"]) for r in records)
    assert tuple(map(int, said)) == ran and ran[0] < ran[1], "once all ran, say so"


def test_the_size_of_the_plugin_in_the_readme_is_its_size() -> None:
    (said,) = re.findall(r"about ([\d,]+) lines", (ROOT / "README.md").read_text())
    files = (ROOT / "plugins/npu").rglob("*.py")
    lines = sum(len(path.read_text().splitlines()) for path in files)
    assert abs(lines - int(said.replace(",", ""))) <= 100
