"""A pytest plugin: `--draw SHARE` runs that share of the slow tests, drawn at random.

A mutation, a pair, an attacker: slow tests are many of a kind, and a change that breaks one breaks
others. Names on the command line (`::`, `-k`) are always obeyed. `--draw-seed` repeats a draw.
"""

from __future__ import annotations

import os

import pytest

import receipts

SEED = "DS_DRAW_SEED"  # the workers of a run draw alike


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("draw of slow tests")
    group.addoption("--draw", type=float, metavar="SHARE", help="run this share of slow tests")
    group.addoption("--draw-seed", metavar="SEED", help="draw those that another run drew")


def pytest_configure(config: pytest.Config) -> None:
    share = config.option.draw
    if share is not None and not 0 < share <= 1:
        raise pytest.UsageError(f"--draw {share:g}: give a share above 0, and at most 1")
    if not hasattr(config, "workerinput"):
        os.environ[SEED] = config.option.draw_seed or os.urandom(4).hex()


def _share(config: pytest.Config) -> float:
    named = any("::" in argument for argument in config.invocation_params.args)
    return 1.0 if config.option.keyword or named else config.option.draw or 1.0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share, seed = _share(config), os.environ[SEED]
    kept, left = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        runs = not item.get_closest_marker("slow") or receipts.drawn(seed, item.nodeid, share)
        (kept if runs else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    config = terminalreporter.config
    if (share := _share(config)) < 1:
        seed = os.environ[SEED]
        terminalreporter.write_line(f"slow tests: --draw {share:g} --draw-seed {seed}")
