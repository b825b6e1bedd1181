"""A pytest plugin: which cases of the instruction-set matrix run, and what they found.

While the receipt in the tree is of these sources, the best instruction set runs and a random tenth
of the cases of the others; otherwise, or with --every-isa, all of them. Names on the command line
(`::`, `-k`, `--last-failed`) are always obeyed. `--matrix-seed` repeats a draw.
"""

from __future__ import annotations

import os
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path

import pytest

import receipts
from ds_runtime_cpu import native

SEED = "DS_MATRIX_SEED"  # the workers of a run draw alike


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("instruction-set matrix")
    group.addoption("--every-isa", action="store_true", help="run every case of every set")
    group.addoption("--matrix-seed", metavar="SEED", help="draw the tenth that another run drew")
    group.addoption("--outcomes", type=Path, metavar="FILE", help="what to make a receipt of")


def _samples(config: pytest.Config) -> bool:
    named = config.option.keyword or config.getoption("lf", False)
    named = named or any("::" in argument for argument in config.invocation_params.args)
    return not (config.option.every_isa or named) and receipts.is_current()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    if _samples(config):
        os.environ[SEED] = config.option.matrix_seed or os.urandom(4).hex()
    else:
        os.environ.pop(SEED, None)
    if config.option.outcomes is not None:
        config.pluginmanager.register(Outcomes(config.option.outcomes), "matrix-outcomes")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if (seed := os.environ.get(SEED)) is not None:
        terminalreporter.write_line(
            "instruction sets: the best one, and a tenth of the cases of others: "
            f"--matrix-seed {seed}"
        )


def in_matrix(nodeid: str) -> bool:
    """Whether the file runs its tests once for each instruction set."""
    return any(fnmatch(nodeid.partition("::")[0], pattern) for pattern in receipts.TESTS)


def isa_of(item: pytest.Item) -> str | None:
    """The instruction set that a case of the matrix is about."""
    if not in_matrix(item.nodeid) or (call := getattr(item, "callspec", None)) is None:
        return None
    isa = call.params.get("isa") or getattr(call.params.get("variant"), "isa", None)
    return isa if isinstance(isa, str) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    runnable = native.runnable()
    always = {None, *runnable[:1], *set(runnable) - receipts.covered("isas")}
    seed, kept, left = os.environ.get(SEED), [], []
    for item in items:
        isa = isa_of(item)
        if isa is not None:
            item.user_properties.append(("isa", isa))
        runs = seed is None or isa in always or receipts.drawn(seed, item.nodeid)
        (kept if runs else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


class Outcomes:
    """Collects what the cases of the matrix found, and writes it when a run of all has passed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, list[str]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        isa = dict(report.user_properties).get("isa")
        if isa is not None and (report.when == "call" or not report.passed):
            self.found[str(isa)].append(f"{report.nodeid} {report.outcome}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.path.unlink(missing_ok=True)
        if session.exitstatus == 0 and session.config.option.every_isa:
            receipts.save(self.path, self.found)
