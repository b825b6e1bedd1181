"""What a digest is of where lists of files cannot be read, and of code that is named in other ways.
An import's own answer, in a process of its own, is the reference."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, distributions
from pathlib import Path

import pytest
from faulty import install
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_trust import (  # noqa: F401 (fixtures)
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
from ds_runtime.plugins.trust.allowlist import Unreadable, hidden_by
from examples import examples

NOT_READ = {
    "latin-1": "zbr\xf6ken.py,,\n".encode("latin-1"),
    "a long field": b"a" * 200_000 + b",,\n",
    "fields too many": b"a.py,,,\n",
    "a size that is none": b"a.py,,x\n",
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["url", "dir_info", "editable"]), inner, max_size=3)
    ),
    max_leaves=6,
)
URLS = st.one_of(JSON.map(lambda one: json.dumps(one).encode()), st.binary(max_size=20))
RECORDS = st.one_of(
    st.binary(max_size=40), st.text(alphabet='a/.,"\0\n\r', max_size=40).map(str.encode)
)


@contextmanager
def installed(name: str, dist: str, code: str = GOOD) -> Iterator[tuple[Path, Path]]:
    """(the folder of a distribution that is searched, its folder of metadata)."""
    with tempfile.TemporaryDirectory() as outer, pytest.MonkeyPatch.context() as patched:
        install(Path(outer), patched, code, name, dist)
        record(Path(outer))
        importlib.invalidate_caches()
        yield Path(outer), next(Path(outer).glob("*.dist-info"))


@pytest.mark.parametrize("how", NOT_READ)
def test_a_record_that_cannot_be_read_refuses_its_plugin(
    package: Path,  # noqa: F811
    tmp_path: Path,
    how: str,
) -> None:
    allowlist = listed(tmp_path, distribution="acme-dist", digest=of(package))
    (info,) = package.glob("*.dist-info")
    (info / "RECORD").write_bytes(NOT_READ[how])
    refusal = said(load_plugins(allowlist=allowlist))
    assert refusal.startswith("broken: acme-dist has a RECORD that "), refusal
    assert "install it again" in refusal and not list(tmp_path.rglob("*.ran"))


@example("RECORD", NOT_READ["latin-1"])
@example("RECORD", NOT_READ["a long field"])
@example("RECORD", b"a\0b.py,,\n")
@example("RECORD", b"a,,,\n")
@example("direct_url.json", b"[]")
@example("direct_url.json", b'{"dir_info": []}')
@example("direct_url.json", b'{"dir_info": {"editable": true}, "url": "file://[/"}')
@example("direct_url.json", b'{"dir_info": {"editable": true}, "url": "file:///%00"}')
@example("direct_url.json", b"[" * 100_000)
@given(
    name=st.sampled_from(["RECORD", "direct_url.json"]),
    content=st.one_of(URLS, RECORDS),
)
@settings(max_examples=examples(40), deadline=None)
def test_whatever_an_installer_has_left_a_digest_is_told_or_refused(
    name: str, content: bytes
) -> None:
    """Of the distribution itself; and that of another hinders nobody."""
    with installed("acme", "acme-dist") as (folder, own), installed("other", "other-dist") as more:
        before = of(folder)
        (more[1] / name).write_bytes(content)
        assert of(folder) == before
        (own / name).write_bytes(content)
        try:
            assert of(folder).startswith("sha256:")
        except Unreadable as e:
            assert "\n" not in str(e)
        (dist,) = distributions(path=[str(folder)])
        (entry,) = dist.entry_points
        assert isinstance(entry, EntryPoint)
        with pytest.MonkeyPatch.context() as patched:
            patched.chdir(folder)  # where only an editable install may be
            place = hidden_by(entry, [""])
            assert place in (None, str(folder / "acme_dist_module.py"))


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff", b'{"dir_info": 1}'])
def test_a_direct_url_that_cannot_be_read_is_named(
    package: Path,  # noqa: F811
    content: bytes,
) -> None:
    (info,) = package.glob("*.dist-info")
    (info / "direct_url.json").write_bytes(content)
    with pytest.raises(Unreadable, match=r"has a direct_url\.json that cannot be read"):
        of(package)


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages", "vendored"])
@pytest.mark.parametrize("url", ["", "file://", "https://host", None])
def test_an_environment_in_an_editable_project_is_not_the_project(
    package: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    folder: str,
    url: str | None,
) -> None:
    """A module that nobody has installed there is nobody's. In the project's sources it is."""
    project = tmp_path / "project"
    inside = project / "env" / folder
    install(inside, monkeypatch, GOOD, "third", "third-dist")
    record(inside)
    if folder != "vendored":  # one that holds nothing else counts, too
        for path in [*inside.glob("*.dist-info/*"), *inside.glob("*.dist-info"), *inside.glob("*")]:
            path.rmdir() if path.is_dir() else path.exists() and path.unlink()
    install(tmp_path / "apart", monkeypatch, GOOD, "other", "other-dist")
    (info,) = (tmp_path / "apart").glob("*.dist-info")
    places = {"": project.as_uri(), "file://": "file:///", "https://host": "https://host/"}
    at = places.get(url or "")
    about = {"dir_info": {"editable": True}} | ({} if url is None else {"url": at})
    (info / "direct_url.json").write_text(json.dumps(about))
    monkeypatch.chdir(project)
    write(package / "acme_pkg" / "kernels.py", "import nobody_s\n")
    record(package)
    before = of(package)
    write(inside / "nobody_s.py")
    importlib.invalidate_caches()
    with pytest.raises(Unreadable, match=f"comes from {inside}/nobody_s.py, which no installed"):
        of(package)
    (inside / "nobody_s.py").unlink()
    write(project / "src" / "nobody_s.py")
    monkeypatch.syspath_prepend(str(project / "src"))
    if url in ("", "file://"):
        assert of(package) == before
    else:  # a project that is nowhere on this machine
        with pytest.raises(Unreadable, match="which no installed"):
            of(package)


# names of code

BY_NAME = {
    "from . import": "from . import opt",
    "from .x import": "from .opt import x",
    "from .. import": "from .. import opt",
    "from ..x.y import": "from ..within.opt import x",
    "in a function": "def f():\n    from . import opt\nf()",
    "positional": "from importlib import import_module\nimport_module('opt')",
    "by keyword": "import importlib\nimportlib.import_module(name='opt')",
    "keywords turned": "import importlib\nimportlib.import_module(package=None, name='opt')",
    "__import__": "__import__(name='opt')",
    "relative": "import importlib\nimportlib.import_module('.opt', 'spaced.within')",
    "relative by keyword": "import importlib\nimportlib.import_module('.opt', package='spaced')",
    "relative to its own": "import importlib\nimportlib.import_module('.opt', __package__)",
    "relative, all keywords": (
        "import importlib\nimportlib.import_module(package=__package__, name='..opt')"
    ),
}
PLACES = ("opt.py", "spaced/opt.py", "spaced/within/opt.py")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", BY_NAME)
def test_what_an_import_would_run_is_looked_for(
    package: Path,  # noqa: F811
    tmp_path: Path,
    how: str,
    place: str,
) -> None:
    """From a module in packages without a file. Where an import runs what was planted, there is no
    digest; where it does not, the digest stays."""
    lines = "\n".join(f"    {line}" for line in BY_NAME[how].splitlines())
    code = f"try:\n{lines}\nexcept (ImportError, TypeError): pass\n"
    write(package / "spaced" / "within" / "deep.py", code)
    record(package)
    before = of(package)
    write(package / place, LOUD + "x = 1\n")
    importlib.invalidate_caches()
    path = os.pathsep.join([str(package), *filter(None, sys.path)])
    run(tmp_path, "-B", "-c", "import spaced.within.deep", PYTHONPATH=path)
    if (package / f"{place}.ran").exists():
        with pytest.raises(Unreadable, match=f"comes from {package / place}, which no installed"):
            of(package)
    else:
        assert of(package) == before


def test_each_of_these_names_is_of_one_place(package: Path, tmp_path: Path) -> None:  # noqa: F811
    """So that the test above tells."""
    path = os.pathsep.join([str(package), *filter(None, sys.path)])
    for place in PLACES:
        write(package / place, LOUD + "x = 1\n")
    for how, code in BY_NAME.items():
        write(package / "spaced" / "within" / "deep.py", code)
        run(tmp_path, "-B", "-c", "import spaced.within.deep", PYTHONPATH=path)
        found = [one for one in package.rglob("*.ran") if one.unlink() is None]
        assert len(found) == 1, (how, found)


# names of files


@pytest.mark.parametrize("name", ["RECORD", "INSTALLER", "REQUESTED", "direct_url.json"])
def test_a_file_of_the_plugin_counts_whatever_its_name(
    package: Path,  # noqa: F811
    name: str,
) -> None:
    (info,) = package.glob("*.dist-info")
    for folder in (package / "acme_pkg", package / "acme_pkg" / "deep.dist-info", info / "more"):
        write(folder / name, "one")
        record(package)
        before = of(package)
        write(folder / name, "two")
        assert of(package) != before, folder
    before = of(package)
    if name != "RECORD":  # the installer's own
        write(info / name, "{}")
        record(package)
        assert of(package) == before


@pytest.mark.parametrize("name", ["run-me.py", "2to3.py", "a b.py", "lambda.x.py", "x-y.pyc"])
def test_a_file_whose_name_is_no_module_s_can_be_locked(
    package: Path,  # noqa: F811
    name: str,
) -> None:
    file = package / "acme_pkg" / name
    write(file, "one")
    with pytest.raises(Unreadable, match=f"has modules next to {file}, which is no file of"):
        of(package)
    (info,) = package.glob("*.dist-info")
    lines = (info / "RECORD").read_text()
    (info / "RECORD").write_text(f"{lines}acme_pkg/{name},,\n")
    before = of(package)
    write(file, "two")
    assert of(package) != before
    (info / "RECORD").write_text(f"{lines}acme_pkg/../acme_pkg/{name},,\n")  # it does not count
    with pytest.raises(Unreadable, match="has modules next to"):
        of(package)


ASKED = """
from importlib.metadata import distributions
from ds_runtime.plugins.trust.allowlist import digest
try:
    print(digest(next(iter(distributions(path=[{place!r}])))))
except Exception as e:
    print(e)
"""


def test_links_may_lead_in_circles(package: Path, tmp_path: Path) -> None:  # noqa: F811
    """A walk along two of them would take 2 to the 40th steps."""
    path = os.pathsep.join([str(package), *filter(None, sys.path)])
    ask = ASKED.format(place=str(package))
    before = run(tmp_path, "-c", ask, PYTHONPATH=path)
    assert before.startswith("sha256:")
    pkg = package / "acme_pkg"
    (pkg / "inner").mkdir()
    for link, target in {"a": ".", "b": pkg, "inner/c": "..", "inner/d": "../inner"}.items():
        (pkg / link).symlink_to(target)
    try:
        assert run(tmp_path, "-c", ask, PYTHONPATH=path) == before
        write(tmp_path / "outside" / "evil.py")
        (pkg / "inner" / "away").symlink_to(tmp_path / "outside")
        assert "has modules next to" in (found := run(tmp_path, "-c", ask, PYTHONPATH=path))
        assert "away/evil.py" in found
    except subprocess.TimeoutExpired:
        pytest.fail("it walks in circles")
