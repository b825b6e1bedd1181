"""`--help` of every verb fits on a screen, and `--help-all` leaves nothing out."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import fields

import pytest

from ds_runtime.cli import build_parser
from ds_runtime.cli.help import COMMON, INDENT, LINES
from ds_runtime.cli.parser import Parser
from ds_runtime.config import EngineConfig, ServerConfig


def verbs() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every verb and the verbs below it, with its parser."""
    todo = [build_parser()[0]]
    while todo:
        parser = todo.pop()
        yield parser.prog, parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                todo += action.choices.values()


PARSERS = dict(verbs())
verb = pytest.mark.parametrize("parser", PARSERS.values(), ids=PARSERS)


def visible(parser: argparse.ArgumentParser) -> set[str]:
    """The first name of every flag that has help."""
    return {
        action.option_strings[-1]
        for action in parser._actions
        if action.option_strings and action.help is not argparse.SUPPRESS
    }


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@verb
def test_help_fits_on_a_screen(parser: argparse.ArgumentParser) -> None:
    said = parser.format_help()
    assert len(said.splitlines()) <= LINES


@verb
def test_help_all_has_every_flag(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        parser.parse_args(["--help-all"])
    out = capsys.readouterr().out
    assert left.value.code == 0
    assert visible(parser) <= set(re.findall(r"--?[\w-]+", out))


@verb
def test_help_counts_what_it_leaves_out(parser: argparse.ArgumentParser) -> None:
    said = parser.format_help()
    shown = set(re.findall(r"^  (?:-h, )?(--[\w-]+)", said, re.MULTILINE))
    first = {
        next(o for o in a.option_strings if o.startswith("--"))
        for a in parser._actions
        if a.option_strings and a.help is not argparse.SUPPRESS
    }
    tail = " ".join(said.partition("Flags left out:")[2].split())
    assert sum(map(int, re.findall(r"\d+", tail))) == len(first - shown)
    assert ("--help-all" in said) or not first - shown


@pytest.mark.parametrize("longs", [0, 1, 70])
def test_flags_of_a_plugin_s_verb_may_be_short(longs: int) -> None:
    """Also those of more than a screen."""
    parser = Parser(prog="ds-runtime theirs", description="Does it. And more.")
    for number in range(70):
        long = [f"--long-{number}"] if number < longs else []
        parser.add_argument(f"-{chr(0x4E00 + number)}", *long, metavar="X", help=f"number {number}")
    assert len(argparse.ArgumentParser.format_help(parser).splitlines()) > LINES
    said = parser.format_help()
    for number in range(70):
        name = f"--long-{number}" if number < longs else f"-{chr(0x4E00 + number)}"
        (line,) = re.findall(rf"^  {name} X +(.*)$", said, re.MULTILINE)
        assert line == f"number {number}"
    assert said.startswith("usage: ds-runtime theirs [-h] [--FLAG …]") and "left out" not in said


def test_common_flags_are_settings_and_have_one_line() -> None:
    settings = {f.name for c in (EngineConfig, ServerConfig) for f in fields(c)}
    assert COMMON.keys() <= settings
    said = PARSERS["ds-runtime serve"].format_help()
    for text in COMMON.values():
        assert f"  {text}\n" in said, f"longer than {78 - INDENT} characters: {text}"
