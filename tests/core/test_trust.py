"""What may be loaded: allowlists by distribution, version and digest; never the working folder."""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import os
import py_compile
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from faulty import PRELUDE, install, module, tiny_config

from ds_runtime.assembly.assemble import assemble
from ds_runtime.cli import main
from ds_runtime.config import EngineConfig
from ds_runtime.errors import ConfigError, PluginError
from ds_runtime.plugins.manager import Plugins, load_plugins
from ds_runtime.plugins.trust.allowlist import Unreadable, digest, write_allowlist

GOOD = "@hookimpl\ndef ds_ops(): return []\n"
LOUD = "import pathlib; pathlib.Path(__file__ + '.ran').touch()\n"


def record(site: Path) -> None:
    """The RECORD of the one distribution in `site`, as an installer writes it."""
    (info,) = site.glob("*.dist-info")
    lines = []
    for file in [f for f in site.rglob("*") if f.is_file() and f.suffix != ".pyc"]:
        content = file.read_bytes()
        sha = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{file.relative_to(site)},sha256={sha},{len(content)}")
    (info / "RECORD").write_text("\n".join([*lines, f"{info.name}/RECORD,,"]) + "\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where acme-dist lies, with its plugin acme; it leaves a file when it is imported."""
    folder = tmp_path / "site"
    install(folder, monkeypatch, LOUD + GOOD, "acme", "acme-dist")
    record(folder)
    return folder


def ran(site: Path) -> bool:
    return (site / "acme_dist_module.py.ran").exists()


def listed(tmp_path: Path, **row: str) -> str:
    file = tmp_path / "allowed.json"
    file.write_text(json.dumps({"format": 1, "plugins": [row] if row else []}))
    return str(file)


def said(plugins: Plugins) -> str:
    refusal = plugins.reports["acme"].refusal
    return str(refusal) if refusal is not None else ""


def of(site: Path) -> str:
    (dist,) = distributions(path=[str(site)])
    return digest(dist)


def test_what_is_not_listed_is_not_even_imported(site: Path, tmp_path: Path) -> None:
    found = load_plugins(allowlist=listed(tmp_path))
    assert said(found).startswith("not allowed: acme-dist is not on allowlist ")
    assert not ran(site)
    assert found.reports["cpu"].refusal is None, "the runtime's own needs no entry"
    assert said(load_plugins()) == "" and ran(site)


def test_listed_by_name_version_and_digest(site: Path, tmp_path: Path) -> None:
    for row in ({}, {"version": "2.5"}, {"version": "2.5", "digest": of(site)}):
        assert said(load_plugins(allowlist=listed(tmp_path, distribution="Acme_Dist", **row))) == ""


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"version": "2.4"}, "acme-dist is version 2.5, and allowlist .* has 2.4: install that"),
        ({"digest": "sha256:00"}, "acme-dist is sha256:.*, and allowlist .* has sha256:00"),
    ],
)
def test_another_version_or_content_than_listed_stops_the_start(
    site: Path, tmp_path: Path, row: dict[str, str], why: str
) -> None:
    allowlist = listed(tmp_path, distribution="acme-dist", **row)
    config = EngineConfig(model=str(tiny_config(tmp_path / "m")), plugin_allowlist=allowlist)
    with pytest.raises(PluginError, match=f"plugin acme is broken: {why}"):
        assemble(config)
    assert not ran(site)


def test_a_byte_that_changed_is_seen(site: Path, tmp_path: Path) -> None:
    allowlist = listed(tmp_path, distribution="acme-dist", digest=of(site))
    assert said(load_plugins(allowlist=allowlist)) == ""
    with (site / "acme_dist_module.py").open("a") as file:
        file.write("#")
    assert "acme-dist is sha256:" in said(load_plugins(allowlist=allowlist))


def test_a_digest_is_of_the_code_that_would_run(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowlist = listed(tmp_path, distribution="acme-dist", digest=of(site))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "acme_dist_module.py").write_text(PRELUDE)
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    assert "which is no file of acme-dist" in said(load_plugins(allowlist=allowlist))
    (info,) = site.glob("*.dist-info")
    (info / "direct_url.json").write_text(json.dumps({"dir_info": {"editable": True}}))
    with pytest.raises(Unreadable, match="editable"):
        of(site)
    (info / "direct_url.json").unlink()
    (info / "RECORD").unlink()
    assert "has no RECORD of its files" in said(load_plugins(allowlist=allowlist))


EXTENSION = importlib.machinery.EXTENSION_SUFFIXES[0]
EVIL = LOUD + PRELUDE + GOOD


def write(path: Path, text: str = EVIL) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def compiled(source: Path, text: str | None = None, to: str | None = None) -> None:
    """Bytecode of `text` that Python takes for that of `source`."""
    code = compile(text or source.read_text(), str(source), "exec", dont_inherit=True)
    about = source.stat()
    data = importlib._bootstrap_external._code_to_timestamp_pyc(  # type: ignore[attr-defined]
        code, about.st_mtime, about.st_size
    )
    path = Path(to or importlib.util.cache_from_source(str(source)))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


PLANTED = {
    "a package over a module": lambda s: write(s / "acme_pkg" / "kernels" / "__init__.py"),
    "a package over a module at the top": lambda s: write(s / "acme_dist_module" / "__init__.py"),
    "an extension over a module": lambda s: write(s / "acme_pkg" / f"kernels{EXTENSION}"),
    "an extension over a package": lambda s: write(s / f"acme_dist_module{EXTENSION}"),
    "a module that is looked for": lambda s: write(s / "acme_pkg" / "speedups.py"),
    "its bytecode alone": lambda s: compiled(
        s / "acme_pkg" / "kernels.py", EVIL, str(s / "acme_pkg" / "speedups.pyc")
    ),
    "a folder of modules": lambda s: write(s / "acme_pkg" / "vendor" / "deep" / "x.py"),
    "a place that is searched first": lambda s: write(s / "first" / "acme_pkg" / "__init__.py"),
    "bytecode of something else": lambda s: compiled(s / "acme_pkg" / "kernels.py", EVIL),
    "that of a package": lambda s: compiled(s / "acme_pkg" / "__init__.py", EVIL),
    "that of the plugin": lambda s: compiled(s / "acme_dist_module.py", EVIL),
    "bytecode that is none": lambda s: compiled(s / "acme_pkg" / "kernels.py", "x = 1"),
}
NAMED = {  # what acme_pkg/kernels.py says, and what nobody has installed
    "a module at the top": ("import speedups", "speedups.py"),
    "where there is one": ("try:\n    import speedups\nexcept ImportError: pass", "speedups.py"),
    "in a function": ("def f():\n    from speedups.deep import x", "speedups/__init__.py"),
    "of a package without a file": ("from spaced import speedups", "spaced/speedups.py"),
    "by its name": ("import importlib\nimportlib.import_module('speedups')", "speedups.py"),
    "of a kernel": ("KERNEL = 'speedups:fast'", "speedups.py"),
    "an extension": ("import speedups", f"speedups{EXTENSION}"),
    "in a place of its own": ("import speedups", "first/speedups.py"),
    "over one that is installed": ("import packaging.version", "first/packaging/__init__.py"),
    "over one of Python's": ("import colorsys", "first/colorsys.py"),
}
WANTED = {"broken: acme-dist has ", "; allowlist "}


@pytest.fixture
def package(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same with a package beside the plugin, and a place that is searched first."""
    write(site / "acme_pkg" / "__init__.py", "")
    write(site / "acme_pkg" / "kernels.py", "def f(x): return x + 1\n")
    write(site / "acme_pkg" / "tables.json", "{}")
    (site / "first").mkdir()
    monkeypatch.syspath_prepend(str(site / "first"))
    record(site)
    return site


@pytest.mark.parametrize("how", PLANTED)
def test_a_digest_is_of_all_code_that_would_run(package: Path, tmp_path: Path, how: str) -> None:
    allowlist = listed(tmp_path, distribution="acme-dist", digest=of(package))
    PLANTED[how](package)
    importlib.invalidate_caches()
    refusal = said(load_plugins(allowlist=allowlist))
    assert all(part in refusal for part in WANTED) and "\n" not in refusal, refusal
    assert not list(package.rglob("*.ran"))
    with pytest.raises(ConfigError, match="plugins --lock: acme-dist has "):
        main_lock(tmp_path)


@pytest.mark.parametrize("how", NAMED)
def test_a_digest_is_of_what_its_code_imports_as_well(
    package: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)  # others may have imported it
    code, planted = NAMED[how]
    for loaded in ("packaging.version", "colorsys"):  # here, but not in a rank's process
        importlib.import_module(loaded)
    write(package / "acme_pkg" / "kernels.py", code)
    record(package)
    allowlist = listed(tmp_path, distribution="acme-dist", digest=of(package))
    assert said(load_plugins(allowlist=allowlist)) == "", "as long as it is not there"
    write(package / planted)
    importlib.invalidate_caches()
    refusal = said(load_plugins(allowlist=allowlist))
    assert all(part in refusal for part in WANTED) and "\n" not in refusal, refusal
    assert str(package / planted) in refusal and "no installed distribution" in refusal
    with pytest.raises(ConfigError, match="plugins --lock: acme-dist has code that imports"):
        main_lock(tmp_path)


def test_the_plugin_itself_must_be_installed(site: Path, tmp_path: Path) -> None:
    (info,) = site.glob("*.dist-info")
    lines = (info / "RECORD").read_text().splitlines()
    (info / "RECORD").write_text("\n".join(n for n in lines if "acme_dist_module" not in n))
    with pytest.raises(Unreadable, match="has code that imports acme_dist_module, but that comes"):
        of(site)


def test_what_is_installed_may_be_imported(package: Path, tmp_path: Path) -> None:
    write(
        package / "acme_pkg" / "kernels.py",
        "import json, sys, colorsys, os.path, torch, numpy.linalg, packaging.version, acme_pkg\n"
        "from ds_runtime.api import OPS\nfrom . import tables\nimport nowhere.at.all\n"
        "from acme_dist_module import ds_ops\nTEXT = 'note: this', 'acme_pkg.kernels:f'\n",
    )
    record(package)
    allowlist = listed(tmp_path, distribution="acme-dist", digest=of(package))
    assert said(load_plugins(allowlist=allowlist)) == ""


def main_lock(tmp_path: Path) -> None:
    (dist,) = [d for d in distributions() if d.name == "acme-dist"]
    write_allowlist(str(tmp_path / "lock"), [dist])


def test_what_python_itself_leaves_is_no_fault(package: Path, tmp_path: Path) -> None:
    allowlist = listed(tmp_path, distribution="acme-dist", digest=of(package))
    for source in package.rglob("*.py"):
        py_compile.compile(str(source), doraise=True)
    write(package / "acme_pkg" / "__pycache__" / "kernels.cpython-27.pyc", "of another Python")
    write(package / "acme_pkg" / "cache.bin", "data")
    assert said(load_plugins(allowlist=allowlist)) == ""
    kernels = package / "acme_pkg" / "kernels.py"
    old = Path(importlib.util.cache_from_source(str(kernels)))
    old.write_bytes(b"\0\0\0\0" + old.read_bytes()[4:])
    assert said(load_plugins(allowlist=allowlist)) == "", "of another Python, and ignored"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read"),
        ("[]", "is no allowlist of format 1; write one with ds-runtime plugins --lock"),
        ('{"format": 2, "plugins": []}', "is no allowlist of format 1"),
        ('{"format": 1, "plugins": [{"distributon": "acme-dist"}]}', "is no allowlist"),
        ('{"format": 1, "plugins": [{"distribution": "acme"}]}', "'acme' brings no plugin here; i"),
    ],
)
def test_a_bad_list_is_an_error(site: Path, tmp_path: Path, content: str | None, why: str) -> None:
    file = tmp_path / "list.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=f"--plugin-allowlist .*{why}"):
        load_plugins(allowlist=str(file))
    assert not ran(site)


def test_the_command_line_locks_and_holds_to_it(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock, settings = str(tmp_path / "lock.json"), tmp_path / "settings.yaml"
    assert main(["plugins", "--lock", lock]) == 0
    assert "acme-dist written to" in capsys.readouterr().out
    assert main(["plugins", "--plugin-allowlist", lock]) == 0
    assert "acme         acme-dist 2.5          kernels only" in capsys.readouterr().out
    (site / "acme_dist_module.py.ran").unlink()
    settings.write_text(f"plugin-allowlist: {listed(tmp_path)}\n")
    sys.modules.pop("acme_dist_module")
    assert main(["plan", "--config", str(settings), "--platform", "cpu"]) == 0
    assert not ran(site), "a list in the settings file counts before anything is imported"


@pytest.mark.parametrize("flag", ["--plugin-allowlist", "--plugin_allowlist"])
@pytest.mark.parametrize("join", [[" "], ["="]], ids=["space", "equals"])
def test_a_list_counts_however_its_flag_is_written(
    site: Path, tmp_path: Path, flag: str, join: list[str]
) -> None:
    words = f"{flag}{join[0]}{listed(tmp_path)}".split(" ")
    assert main(["serve", "/no/such", *words]) == 1
    assert not ran(site)


@pytest.mark.parametrize("verb", ["serve", "bench one-batch"])
def test_plugins_with_spaces_between_load_all_of_them(site: Path, verb: str) -> None:
    words = verb.split()
    assert main([*words, "--model", "/no/such", "--plugins", "cpu", "acme"]) == 1
    assert ran(site)


# the working directory


def entry_in(folder: Path, dist: str) -> None:
    install(folder, None, LOUD + GOOD, "acme", dist)


def run(folder: Path, *command: str, **environment: str) -> str:
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("way", ["module", "library"])
def test_a_plugin_in_the_working_directory_is_not_loaded(tmp_path: Path, way: str) -> None:
    entry_in(tmp_path, "acme-dist")
    if way == "module":
        assert "acme" not in run(tmp_path, "-m", "ds_runtime", "plugins")
    else:
        code = (
            "from ds_runtime.plugins.manager import load_plugins; "
            "print(load_plugins().reports['acme'])"
        )
        assert "is in the working directory, from which nothing is" in run(tmp_path, "-c", code)
    assert not list(tmp_path.glob("*.ran"))


def test_a_module_in_the_working_directory_does_not_hide_an_installed_one(tmp_path: Path) -> None:
    site, here = tmp_path / "site", tmp_path / "here"
    install(site, None, GOOD, "acme", "acme-dist")
    here.mkdir()
    (here / "acme_dist_module.py").write_text(LOUD + PRELUDE + GOOD)
    path = os.pathsep.join([*filter(None, sys.path), str(site)])
    listing = run(here, "-m", "ds_runtime", "plugins", PYTHONPATH=path)
    assert "acme         acme-dist 2.5          kernels only" in listing
    code = (
        "from ds_runtime.plugins.manager import load_plugins; print(load_plugins().reports['acme'])"
    )
    assert "in the working directory, hides its module" in run(here, "-c", code, PYTHONPATH=path)
    assert not list(here.glob("*.ran"))


def test_an_editable_install_works_in_its_own_folder(tmp_path: Path) -> None:
    """Such an install leaves metadata beside the sources, which must not count as a stranger."""
    site, here = tmp_path / "site", tmp_path / "here"
    entry_in(here, "acme-dist")
    install(site, None, GOOD, "acme", "acme-dist")
    (site / "acme_dist_module.py").unlink()
    (info,) = site.glob("*.dist-info")
    (info / "direct_url.json").write_text(json.dumps({"dir_info": {"editable": True}}))
    path = os.pathsep.join([*filter(None, sys.path), str(site), str(here)])
    code = "from ds_runtime.plugins.manager import load_plugins; print(load_plugins().reports)"
    for way in (("-m", "ds_runtime", "plugins"), ("-c", code)):
        said = run(here, *way, PYTHONPATH=path)
        assert "acme" in said and "acme@" not in said and "not allowed" not in said


def test_the_folder_of_installed_packages_may_be_the_working_directory(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("site.getsitepackages", lambda: [str(site)])
    monkeypatch.chdir(site)
    assert said(load_plugins()) == ""


# a broken plugin of a device that is here


def test_a_broken_plugin_stops_the_start_unless_a_downgrade_is_allowed(tmp_path: Path) -> None:
    code = "@hookimpl\ndef ds_platform(): return Refusal('broken', '8 cards, and no driver')"
    model = str(tiny_config(tmp_path / "m"))
    config = EngineConfig(model=model, plugins=("cpu",))
    with pytest.raises(PluginError, match=r"card is broken: 8 cards.*--allow-platform-downgrade"):
        assemble(config, (), [module("card", code)])
    config = EngineConfig(model=model, plugins=("cpu",), allow_platform_downgrade=True)
    found = assemble(config, (), [module("card", code)])
    assert found.platform.name == "cpu"
    assert found.left_out() == ["plugin card is left out: broken: 8 cards, and no driver"]
