"""What `new-plugin` writes, what it refuses, and what happens to a package that is broken.

test_seventh_platform.py serves with one; packaging/test_new_plugin_venv.py installs one by pip.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vendor import command, place, scored

from ds_runtime.cli import main
from ds_runtime.errors import ConfigError
from ds_runtime_kit.scaffold import KINDS, PLATFORM, files, write_plugin

NAME = "septima"


def test_the_package_is_named_throughout() -> None:
    written = dict(files(NAME))
    assert not [p for p, text in written.items() if "acme" in (p + text).lower()]
    assert f"ds_runtime_{NAME}/py.typed" in written
    assert {"pyproject.toml", "README.md", ".github/workflows/ci.yml"} <= written.keys()


def test_a_platforms_package_has_a_linear_that_packs_and_described_devices(
    tmp_path: Path,
) -> None:
    assert main(["new-plugin", NAME, "--platform", "--into", str(tmp_path)]) == 0
    code = tmp_path / f"ds-runtime-{NAME}" / f"ds_runtime_{NAME}"
    linear = (code / "linear.py").read_text()
    assert "def pack(self, weight: Weight" in linear and "def apply(self, x: Tensor" in linear
    assert len(json.loads((code / "devices.json").read_text())["devices"]) == 2
    written = {p.relative_to(code.parent).as_posix() for p in code.parent.rglob("*") if p.is_file()}
    assert written == dict(files(NAME)).keys()


def test_a_loaders_package_has_its_own_files_and_those_of_all() -> None:
    written = dict(files(NAME, "loader"))
    assert not [p for p, text in written.items() if "acme" in (p + text).lower()]
    assert f"ds_runtime_{NAME}/loader.py" in written
    assert f"ds_runtime_{NAME}/platform.py" not in written
    common = {f"ds_runtime_{NAME}/py.typed", "tests/conftest.py", ".gitignore"}
    assert common <= written.keys() & dict(files(NAME)).keys()


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {PLATFORM}))
@pytest.mark.parametrize("turned", [False, True])
def test_it_brings_one_thing(
    kind: str, turned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two flags that say so are refused where they differ, whichever comes first."""
    flags = [["--with", kind], ["--platform"]]
    args = [word for flag in (flags[::-1] if turned else flags) for word in flag]
    assert main(["new-plugin", NAME, *args, "--into", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "not allowed with argument" in said and "--with" in said and "--platform" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "Acme", "9lives", "a-b", "class", "a_", "a b", "../x"])
def test_a_name_that_cannot_be_one_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a name has small letters"):
        write_plugin(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_name_like_a_distribution_gets_one_that_would_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"letter; 'acme_ds_plugin' would do$"):
        write_plugin("Acme-DS-plugin", tmp_path)


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-plugin", "cpu", "--into", str(tmp_path)]) == 1
    assert "a plugin of that name is installed" in capsys.readouterr().err
    assert main(["new-plugin", NAME, "--into", str(tmp_path)]) == 0
    assert "pip install -e" in capsys.readouterr().out
    assert main(["new-plugin", NAME, "--into", str(tmp_path)]) == 1
    assert "is not an empty folder" in capsys.readouterr().err


def test_as_written_it_serves_only_where_it_is_named(tmp_path: Path) -> None:
    """The template's platform finds a device on every machine: the host."""
    package = write_plugin(NAME, tmp_path)
    place(package, package / "metadata")
    plan = ("ds_runtime", "plan", "--json")
    default = command(package, *plan)
    assert json.loads(default.stdout)["platform"] == "cpu", default.stderr
    assert json.loads(command(package, *plan, "--platform", NAME).stdout)["platform"] == NAME
    alone = command(package, *plan, "--plugins", NAME)
    assert alone.returncode == 1
    assert f"{NAME}: only where it is named: pass --platform {NAME}" in alone.stderr


def test_a_loaders_package_passes_as_written(tmp_path: Path) -> None:
    """packaging/test_new_plugin_venv.py installs it by pip."""
    assert main(["new-plugin", NAME, "--with", "loader", "--into", str(tmp_path)]) == 0
    package = tmp_path / f"ds-runtime-{NAME}"
    place(package, package / "metadata")
    settings = ("-c", str(package / "pyproject.toml"), "-p", "no:cacheprovider")
    done = command(package, "pytest", "-q", *settings, str(package / "tests"))
    assert done.returncode == 0 and "7 passed" in done.stdout, done.stdout + done.stderr
    done = command(package, "ds_runtime", "conform", NAME, "--receipts", str(tmp_path))
    assert done.returncode == 0 and "conforms (accepts" in done.stdout, done.stdout
    assert (tmp_path / f"{NAME}-{done.stdout.rpartition(f'{NAME}-')[2].strip()}").is_file()


@pytest.mark.parametrize(
    ("file", "right", "wrong", "says"),
    [
        ("__init__", "import plugin", "import plugins", "cannot import name"),
        pytest.param(
            *(
                "__init__",
                "hooks = plugin(",
                "hooks = plugin(ds_opz=print,",
                "'ds_opz', which is no",
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("__init__", "kernels:OFFERS", "kernels:OFFER", "has no attribute 'OFFER'"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("kernels", '"silu_mul",', '"silu_mull",', "silu_mull"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("kernels", "workspace=", "workspaces=", "workspaces"), marks=pytest.mark.slow
        ),
        ("kernels", 'Provider("septima"', 'Provider("cpu"', "belongs to plugin cpu"),
        ("__init__", "platform:SeptimaPlatform", "platform:NODE", "ds_platform raised TypeError"),
    ],
)
def test_a_broken_plugin_is_a_sentence_and_others_serve(
    file: str, right: str, wrong: str, says: str, tmp_path: Path
) -> None:
    package = tmp_path / "package"
    write_plugin(NAME, tmp_path).rename(package)
    place(package, package / "metadata")
    scored(package)
    source = package / f"ds_runtime_{NAME}" / f"{file}.py"
    assert right in source.read_text()
    source.write_text(source.read_text().replace(right, wrong))
    done = command(package, "ds_runtime", "plan", "--platform", "cpu")
    assert done.returncode == 0, done.stderr
    assert f"plugin {NAME} is left out" in done.stderr and says in done.stderr
    stopped = command(package, "ds_runtime", "plan")
    assert stopped.returncode == 1 and says in stopped.stderr


@pytest.mark.slow
def test_the_pytest_plugin_fails_with_the_sentence(tmp_path: Path) -> None:
    package = write_plugin(NAME, tmp_path)
    place(package, package / "metadata")
    source = package / f"ds_runtime_{NAME}" / "small.py"
    source.write_text(source.read_text().replace("silu(gate) * up", "silu(up) * gate"))
    settings = ("-c", str(package / "pyproject.toml"), "-p", "no:cacheprovider")
    done = command(package, "pytest", "-q", *settings, "-k", "samples", str(package / "tests"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "relative error" in done.stdout and "1 failed" in done.stdout
