"""What a digest is of where other finders than that of folders answer: of archives, of editable
installs, of memory. The answer that counts is an import's own, in a process of its own."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib._bootstrap_external import _code_to_hash_pyc  # type: ignore[import-not-found]
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path
from zipimport import zipimporter

import pytest
from faulty import PRELUDE, install
from test_trust import (  # noqa: F401 (fixtures)
    EVIL,
    GOOD,
    LOUD,
    listed,
    of,
    package,
    record,
    run,
    said,
    site,
    write,
)

from ds_runtime.plugins.manager import load_plugins
from ds_runtime.plugins.trust.allowlist import Unreadable

NAMES = ("acme_dist_module", "acme_pkg", "acme_pkg.kernels", "spaced.deep")


class Memory(importlib.abc.InspectLoader):
    """Serves a module that is no file."""

    def get_source(self, fullname: str) -> str:
        return EVIL

    def is_package(self, fullname: str) -> bool:
        return False


class Mapping:
    """One of a name, first of all, as editable installs have it. It has answered in `asked`."""

    def __init__(self, name: str, spec: ModuleSpec | None) -> None:
        self.name, self.spec, self.asked = name, spec, 0

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> object:
        self.asked += fullname == self.name
        return self.spec if fullname == self.name else None


def elsewhere(name: str, folder: Path, how: str) -> ModuleSpec | None:
    if how == "memory":
        return importlib.util.spec_from_loader(name, Memory())
    if how == "archive":
        with zipfile.ZipFile(folder / "other.zip", "w") as archive:
            archive.writestr(f"{name.rpartition('.')[2]}.py", EVIL)
        return zipimporter(str(folder / "other.zip")).find_spec(name.rpartition(".")[2])
    write(folder / "other" / "module.py")
    return importlib.util.spec_from_file_location(name, folder / "other" / "module.py")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["file", "memory", "archive"])
def test_a_finder_that_answers_first_is_seen(
    package: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    how: str,
) -> None:
    """Of the plugin, a package, a module of it, and one that it imports from a package without a
    file."""
    write(package / "acme_pkg" / "kernels.py", "from spaced import deep\n")
    write(package / "spaced" / "deep.py", "x = 1\n")
    record(package)
    allowlist = listed(tmp_path, distribution="acme-dist", digest=of(package))
    finder = Mapping(name, elsewhere(name, tmp_path, how))
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    refusal = said(load_plugins(allowlist=allowlist))
    assert finder.asked and "\n" not in refusal
    assert refusal.startswith("broken: acme-dist has "), refusal
    place = (
        finder.spec.origin if finder.spec and finder.spec.origin else "test_trust_finders.Memory"
    )
    assert f"comes from {place}" in refusal
    assert not list(tmp_path.rglob("*.ran"))


def zipped(folder: Path, at: Path, more: dict[str, bytes] | None = None) -> Path:
    """Everything in a folder, and more, in one archive."""
    with zipfile.ZipFile(at, "w") as archive:
        for file in sorted(folder.rglob("*")):
            if "__pycache__" not in file.parts and not file.name.endswith(".ran"):
                archive.write(file, str(file.relative_to(folder)))
        for name, content in (more or {}).items():
            archive.writestr(name, content)
    return at


def loads(*places: Path, allowlist: str = "", cwd: Path | None = None) -> str:
    """What a process says of the plugin that finds it in these places, and loads it."""
    code = (
        "import sys; from ds_runtime.plugins.manager import load_plugins\n"
        f"found = load_plugins(allowlist={allowlist or None!r}).reports['acme'].refusal\n"
        "print(found or sys.modules['acme_dist_module'].__file__)"
    )
    path = os.pathsep.join([*map(str, places), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def silent(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """The same distribution, of which an import leaves no file; on no search path."""
    module = package / "acme_dist_module.py"
    write(module, module.read_text().replace(LOUD, ""))
    record(package)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not p.startswith(str(tmp_path))])
    return package


def at(place: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The digest of the distribution there, as a process has it that searches there."""
    with monkeypatch.context() as patched:
        patched.syspath_prepend(str(place))
        importlib.invalidate_caches()
        return of(place)


def test_an_archive_has_the_digest_of_its_folder(
    silent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = zipped(silent, tmp_path / "plugins.zip")
    found = at(archive, monkeypatch)
    assert found == at(silent, monkeypatch)
    allowlist = listed(tmp_path, distribution="acme-dist", digest=found)
    assert loads(archive, allowlist=allowlist) == f"{archive}/acme_dist_module.py"
    write(silent / "acme_pkg" / "tables.json", "{1}")
    changed = zipped(silent, tmp_path / "changed.zip")
    assert "broken: acme-dist is sha256:" in loads(changed, allowlist=allowlist)


@pytest.mark.parametrize(
    ("planted", "why"),
    [
        ("acme_pkg/speedups.py", "has modules next to "),
        ("acme_pkg/kernels/__init__.py", "has module acme_pkg.kernels, but that comes from "),
        ("acme_pkg/kernels.pyc", "has module acme_pkg.kernels, but that comes from "),
        ("acme_pkg/vendor/deep/x.py", "has modules next to "),
    ],
)
def test_what_is_planted_in_an_archive_is_seen(
    silent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str, why: str
) -> None:
    code = EVIL.encode()
    if planted.endswith(".pyc"):
        made = compile(EVIL, "kernels.py", "exec", dont_inherit=True)
        code = _code_to_hash_pyc(made, b"12345678", checked=False)
    archive = zipped(silent, tmp_path / "plugins.zip", {planted: code})
    with pytest.raises(Unreadable, match=f"{why}.*plugins.zip/{planted}"):
        at(archive, monkeypatch)


def test_bytecode_that_is_listed_counts(
    silent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python runs it without a source, wherever the list of files may name it."""
    before = at(silent, monkeypatch)
    extra = silent / "acme_pkg" / "speedups.pyc"
    extra.write_bytes(b"one")
    (info,) = silent.glob("*.dist-info")
    lines = (info / "RECORD").read_text()
    (info / "RECORD").write_text(f"{lines}acme_pkg/speedups.pyc,,\n")
    after = at(silent, monkeypatch)
    extra.write_bytes(b"two")
    assert len({before, after, at(silent, monkeypatch)}) == 3


def test_an_archive_in_the_working_directory_that_is_searched_is_none_of_its_modules(
    silent: Path, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    archive = zipped(silent, here / "plugins.zip")
    assert loads(archive, cwd=here) == f"{archive}/acme_dist_module.py"


def test_a_package_without_a_file_may_lie_in_the_working_directory_as_well(tmp_path: Path) -> None:
    """Its modules would come from there first."""
    install(tmp_path / "site", None, GOOD, "acme", "acme-dist")
    (info,) = (tmp_path / "site").glob("*.dist-info")
    (info / "entry_points.txt").write_text("[ds_runtime]\nacme = spaced.plugin\n")
    write(tmp_path / "site" / "spaced" / "plugin.py", PRELUDE + GOOD)
    write(tmp_path / "here" / "spaced" / "other.py")
    code = "from ds_runtime.plugins.manager import load_plugins; print(load_plugins().reports)"
    hides = f"{tmp_path / 'here' / 'spaced' / 'plugin.py'}, in the working directory, hides"
    path = os.pathsep.join([*filter(None, sys.path), str(tmp_path / "site")])
    assert hides not in run(tmp_path / "here", "-c", code, PYTHONPATH=path)
    write(tmp_path / "here" / "spaced" / "plugin.py")
    assert hides in run(tmp_path / "here", "-c", code, PYTHONPATH=path)
    assert not list(tmp_path.rglob("*.ran"))


PROJECT = """[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "helper"
version = "1.0"
[tool.setuptools.package-dir]
"spaced.helper" = "code"
[tool.setuptools]
packages = ["spaced.helper"]
"""
ASKED = """
import site, sys
from importlib.metadata import distributions
site.addsitedir({user!r})  # its .pth file puts the finder there
from ds_runtime.plugins.trust.allowlist import digest
(dist,) = distributions(path=[{place!r}])
sys.path.insert(0, {place!r})
try:
    print(digest(dist), "ds_runtime" in sys.modules, "spaced.helper" in sys.modules)
except Exception as e:
    print(e)
"""


def test_what_an_editable_install_brings_is_installed(silent: Path, tmp_path: Path) -> None:
    """By pip and setuptools, whose finder maps a name to a folder of another name."""
    source, prefix = tmp_path / "source", tmp_path / "prefix"
    write(source / "pyproject.toml", PROJECT)
    write(source / "code" / "__init__.py", "")
    write(source / "code" / "fast.py", "x = 1\n")
    options = "--quiet --no-build-isolation --no-deps --no-index --disable-pip-version-check"
    command = [sys.executable, "-m", "pip", "install", *options.split(), "--prefix", str(prefix)]
    subprocess.run([*command, "-e", str(source)], check=True, timeout=120, capture_output=True)
    (user,) = prefix.glob("lib*/python3*/site-packages")
    assert [*user.glob("__editable___helper*.py")], "a finder, not a folder on the path"
    write(silent / "acme_pkg" / "kernels.py", "from spaced.helper.fast import x\n")
    record(silent)
    asked = ASKED.format(user=str(user), place=str(silent))
    found, *imported = run(tmp_path, "-c", asked).split()
    assert found.startswith("sha256:") and imported == ["True", "False"]
    shutil.rmtree(next(user.glob("helper-1.0*.dist-info")))
    assert f"comes from {source}/code/__init__.py, which no installed" in run(tmp_path, "-c", asked)


def test_a_namespace_package_in_another_is_looked_for_where_an_import_looks(
    silent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is imported, so Python itself finds no search path of the outer one."""
    write(silent / "acme_pkg" / "kernels.py", "from spaced.within import mod\n")
    write(silent / "spaced" / "within" / "mod.py", "x = 1\n")
    record(silent)
    assert at(silent, monkeypatch).startswith("sha256:")
    write(tmp_path / "evil" / "spaced" / "within" / "mod.py")
    with monkeypatch.context() as patched:
        patched.syspath_prepend(str(silent))
        patched.syspath_prepend(str(tmp_path / "evil"))
        importlib.invalidate_caches()
        with pytest.raises(Unreadable, match=f"comes from {tmp_path}/evil/spaced/within/mod.py"):
            of(silent)


@pytest.mark.parametrize("name", ["impl.py", f"impl{EXTENSION_SUFFIXES[0]}", "impl.pyc"])
def test_a_folder_of_kept_bytecode_may_hold_code(
    silent: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Which is imported as from any other folder: acme_pkg.__pycache__.impl."""
    code = silent / "acme_pkg" / "__pycache__" / name
    write(code, "x = 1\n")
    record(silent)
    (info,) = silent.glob("*.dist-info")
    if name.endswith(".pyc"):
        with (info / "RECORD").open("a") as lines:
            lines.write(f"acme_pkg/__pycache__/{name},,\n")
    before = at(silent, monkeypatch)
    code.write_text("x = 2\n")
    assert at(silent, monkeypatch) != before


def test_a_module_of_memory_is_nobody_s_in_an_editable_project_either(
    silent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose folder holds every name that a loader has, if one takes it for a file's."""
    project, other = tmp_path / "project", tmp_path / "other"
    project.mkdir()
    install(other, None, GOOD, "other", "other-dist")
    (info,) = other.glob("*.dist-info")
    url = {"url": project.as_uri(), "dir_info": {"editable": True}}
    (info / "direct_url.json").write_text(json.dumps(url))
    write(silent / "acme_pkg" / "kernels.py", "import of_memory\n")
    record(silent)
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(str(other))
    finder = Mapping("of_memory", elsewhere("of_memory", tmp_path, "memory"))
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    with pytest.raises(Unreadable, match=r"comes from test_trust_finders\.Memory"):
        at(silent, monkeypatch)
    assert finder.asked
