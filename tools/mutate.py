"""Named faults that the tests must catch: each is put into a copy of the sources, one at a time.

    python tools/mutate.py [--only NAME] [--list]

The working tree is never touched. A fault whose text is not found exactly once, a copy that is
not what the tests import, or a test that is red without the fault, too, is an error of its own.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from py_compile import PycInvalidationMode

from fault import Fault
from faults_engine import ENGINE
from faults_model import MODEL

ROOT = Path(__file__).resolve().parents[1]
COPIED = (
    "core",
    "kit",
    "plugins",
    "tests",
    "tools",
    "pyproject.toml",
    "README.md",
    "ARCHITECTURE.md",
)
TIMEOUT = 900.0  # seconds for one selection


class MutationError(Exception):
    """The machinery cannot say anything about a fault."""


FAULTS: tuple[Fault, ...] = (*MODEL, *ENGINE)


def check_text(fault: Fault, root: Path = ROOT) -> None:
    """Raise MutationError unless the fault's text is in its file exactly once."""
    path = root / fault.file
    if not path.is_file():
        raise MutationError(f"{fault.name}: {fault.file} does not exist")
    if (count := path.read_text().count(fault.find)) != 1:
        raise MutationError(f"{fault.name}: {fault.find!r} is {count} times in {fault.file}")


# Editable installs put a finder before every path; without it PYTHONPATH names the copy.
SITECUSTOMIZE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "_editable" not in type(f).__module__]
"""
# Imported once, in the process that every run of pytest is forked from: nothing of the project.
WARM = (
    *("torch", "transformers.models.deepseek_v3.modeling_deepseek_v3", "hypothesis", "pytest"),
    *("jinja2", "msgspec", "numpy", "safetensors.torch", "tokenizers", "zmq"),
)
# The plugins of pytest that the tests need; others that are installed cost each run a second.
PYTEST_PLUGINS = ("pytest_timeout", "_hypothesis_pytestplugin")


@dataclass(frozen=True)
class Outcome:
    """What pytest said: whether all was green, the first test that was not, and the output."""

    green: bool
    first_red: str
    output: str


def run_here(folder: str, environment: Mapping[str, str], tests: Sequence[str], log: str) -> None:
    """In a forked process: pytest over a copy, its output in the file `log`, its status the exit's.

    Nothing of the project may have been imported before the fork.
    """
    with open(log, "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    roots = environment["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [*roots, *(p for p in sys.path if not Path(p).is_relative_to(ROOT))]
    exec(SITECUSTOMIZE, {})
    import ds_runtime
    import ds_runtime_cpu

    for module in (ds_runtime, ds_runtime_cpu):
        if not Path(str(module.__file__)).resolve().is_relative_to(Path(folder).resolve()):
            sys.exit(f"{module.__file__} would be tested, not the copy in {folder}")
    import pytest

    # Warm imports are earlier than pytest's rewriting of assertions in its plugins.
    early = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
    plugins = [word for name in PYTEST_PLUGINS for word in ("-p", name)]
    # The same examples each time, and none that another fault has left.
    told = ["-x", "-q", "--hypothesis-profile", "faults", "-p", "no:cacheprovider"]
    sys.exit(int(pytest.main([*told, *plugins, *early, *tests])))


class Copy:
    """A copy of the sources that tests import instead of the originals."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        skipped = shutil.ignore_patterns("__pycache__", ".*_cache", "*.pyc")
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=skipped)
            elif source.exists():
                shutil.copy(source, folder / name)
        self._copy_native()
        (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
        # A fault is as long as what it replaces, or made within the same second: ask the text.
        mode = PycInvalidationMode.CHECKED_HASH
        for name in ("core", "kit", "plugins"):
            compileall.compile_dir(str(folder / name), quiet=2, invalidation_mode=mode)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(WARM))

    def _copy_native(self) -> None:
        """The built library, which an editable install keeps outside the sources."""
        with contextlib.suppress(ModuleNotFoundError):
            built = Path(str(files("ds_runtime_cpu") / "_lib"))
            target = self.folder / "plugins/cpu/ds_runtime_cpu/_lib"
            if built.is_dir() and not target.exists():
                shutil.copytree(built, target)

    @property
    def environment(self) -> dict[str, str]:
        packages = (
            p for part in ("kit", "plugins") for p in sorted((self.folder / part).iterdir())
        )
        roots = [self.folder, self.folder / "core", *packages]
        path = os.pathsep.join(str(r) for r in roots)
        # Runs are no workers of a run that may be theirs.
        own = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        return {**own, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    @contextlib.contextmanager
    def with_fault(self, fault: Fault) -> Iterator[None]:
        """The copy with one fault in it. Raises MutationError if its text is not there once."""
        check_text(fault, self.folder)
        path = self.folder / fault.file
        original = path.read_text()
        path.write_text(original.replace(fault.find, fault.replace))
        try:
            yield
        finally:
            path.write_text(original)

    def run(self, tests: Sequence[str]) -> Outcome:
        """Run a selection in the copy, in a fork of a process that has torch and transformers.

        Raises MutationError if pytest itself fails, or the tests would not import the copy.
        """
        log = self.folder / "output"
        log.unlink(missing_ok=True)
        arguments = (str(self.folder), self.environment, tuple(tests), str(log))
        process = self._context.Process(target=run_here, args=arguments)
        process.start()
        process.join(TIMEOUT)
        if process.is_alive():
            process.kill()
            process.join()
            raise MutationError(f"{' '.join(tests)}: not done after {TIMEOUT:.0f} s")
        output = log.read_text(errors="replace") if log.exists() else ""
        red = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
        if process.exitcode not in (0, 1) or (process.exitcode == 1) != bool(red):
            raise MutationError(f"{' '.join(tests)}: pytest failed ({process.exitcode}):\n{output}")
        return Outcome(process.exitcode == 0, red.group(1) if red else "", output)


@contextlib.contextmanager
def copied() -> Iterator[Copy]:
    """A copy in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="ds-mutate-") as folder:
        yield Copy(Path(folder))


def groups(faults: Sequence[Fault] = FAULTS, size: int = 6) -> list[tuple[Fault, ...]]:
    """The faults in groups of up to `size`, those of the same tests together."""
    alike = sorted(faults, key=lambda fault: fault.tests)
    return [tuple(alike[i : i + size]) for i in range(0, len(alike), size)]


def check_faults(copy: Copy, faults: Sequence[Fault]) -> dict[str, Outcome]:
    """What each fault's selection says with the fault in place, by its name.

    Then what turned red runs without a fault, all in one process. Raises MutationError if one of
    these tests is red there, too.
    """
    found = {}
    for fault in faults:
        with copy.with_fault(fault):
            found[fault.name] = copy.run(fault.tests)
    red = sorted({outcome.first_red for outcome in found.values() if not outcome.green})
    if red and not (without := copy.run(red)).green:
        raise MutationError(f"red without a fault: {without.first_red}\n{without.output}")
    return found


def main() -> int:
    """Print fault → test that went red; exit 1 if one stayed green."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", action="append", metavar="NAME", choices=[f.name for f in FAULTS])
    parser.add_argument("--list", action="store_true", help="name the faults and run nothing")
    args = parser.parse_args()
    faults = [f for f in FAULTS if not args.only or f.name in args.only]
    if args.list:
        print("\n".join(f"{f.name}: {f.file}" for f in faults))
        return 0
    for fault in faults:
        check_text(fault)
    survived = 0
    with copied() as copy:
        for group in groups(faults):
            for name, found in check_faults(copy, group).items():
                survived += found.green
                print(f"{name:<36} {found.first_red or 'NOT CAUGHT'}", flush=True)
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
