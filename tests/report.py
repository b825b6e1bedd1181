"""A pytest plugin: how long each file took, and whether the tests that must run have run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

LONGEST = 12  # files in the table
NOT_RUN = 9  # exit status: unlike a failure, it is not worth another try
LIMIT = 60.0  # seconds above which a file is reported as too long


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--must-run",
        type=Path,
        metavar="FILE",
        help=f"exit {NOT_RUN} unless every test that FILE names has run, passed or failed",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(config.option.must_run), "report-of-files")


def named(path: Path) -> list[str]:
    """The tests that a list names: `file::test`, without parameters."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


class Report:
    """Adds up the phases of each file's tests."""

    def __init__(self, must_run: Path | None) -> None:
        self.seconds, self.count = Counter[str](), Counter[str]()
        self.wanted = named(must_run) if must_run is not None else []
        self.ran = set[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, _, _ = report.nodeid.partition("::")
        self.seconds[file] += report.duration
        if report.when == "call" and not report.skipped:
            self.count[file] += report.passed
            self.ran.add(report.nodeid.partition("[")[0])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if set(self.wanted) - self.ran:
            session.exitstatus = NOT_RUN

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        if sum(self.seconds.values()) > LIMIT:
            write("seconds  passed  file")
            for file, seconds in self.seconds.most_common(LONGEST):
                late = f"  above {LIMIT:.0f} s" if seconds > LIMIT else ""
                write(f"{seconds:7.1f}  {self.count[file]:6}  {file}{late}")
        for test in self.wanted:
            if test not in self.ran:
                write(f"{test} must run in every run, and has not in this one", red=True)
