"""argparse with a memory for near misses: an unknown verb, flag or choice suggests one."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from ds_runtime.cli.help import add_help_all, short
from ds_runtime.config.spelling import hyphenated, opposite

_NUMBERS = {"int": "a whole number", "float": "a number"}


def near(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'serve'?`, or nothing when nothing is near."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


_REQUIRED = "the following arguments are required: "  # argparse's words
_LACKS = re.compile(": expected (one|at least one) argument$")  # and these


class Parser(argparse.ArgumentParser):
    """No abbreviated flags; wrong input names the nearest right one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self._given: Sequence[str] = ()
        if self.add_help:
            add_help_all(self)

    def format_help(self) -> str:
        """The help that fits on a screen; `--help-all` prints the rest."""
        return short(self, super().format_help())

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = ", ".join(map(str, action.choices))
        hint = near(str(value), map(str, action.choices))
        raise argparse.ArgumentError(action, f"{value!r} is not one of {known}{hint}")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """As argparse, but `--flag=--` has the value `--`: Python 3.11 drops it, and some later."""
        if not action.option_strings or arg_strings != ["--"]:
            return super()._get_values(action, arg_strings)
        value = self._get_value(action, "--")
        self._check_value(action, value)
        return value if action.nargs is None else [value]

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            value = super()._get_value(action, arg_string)
        except argparse.ArgumentError as e:
            wanted = _NUMBERS.get(getattr(action.type, "__name__", ""))
            if wanted is None or not e.message.startswith("invalid "):
                raise
            raise argparse.ArgumentError(action, f"{arg_string!r} is not {wanted}") from None
        if isinstance(value, float) and not math.isfinite(value) and value != action.default:
            raise argparse.ArgumentError(action, f"{arg_string!r} is not a finite number")
        return value

    def error(self, message: str) -> NoReturn:
        """Exit 2 with one line and where to read on, instead of the whole usage."""
        for action in self._actions:
            below = isinstance(action, argparse._SubParsersAction)
            if below and message.endswith(f"are required: {action.metavar}"):
                known = ", ".join(action.choices or ())
                message = f"{action.metavar} is missing: give one of {known}"
            elif message == f"{_REQUIRED}{argparse._get_action_name(action)}":
                message = f"{message.removeprefix(_REQUIRED)} is missing: {action.help}"
        if message.startswith(_REQUIRED):
            message = f"{message.removeprefix(_REQUIRED)} are missing"
        if _LACKS.search(message):
            message = self._without_value(_LACKS.sub("", message))
        for flag, word in pairwise(self._given):  # its value is taken for a verb
            unknown = flag.partition("=")[0] not in self._option_string_actions
            if flag.startswith("-") and unknown and f": {word!r} is not one of" in message:
                message = self._unknown(flag)
        self.exit(2, f"{self.prog}: {message}\nsee {self.prog} --help\n")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse, but each (sub)parser reports its own unknown arguments."""
        self._given = hyphenated(self, sys.argv[1:] if args is None else args)
        found, extra = super().parse_known_args(self._given, namespace)
        if extra:
            flag = extra[0].partition("=")[0]
            if ("--api-key", extra[0]) in zip(self._given, self._given[2:], strict=False):
                self.error("--api-key takes one key: write the flag again in front of the next")
            if not flag.startswith("-") and "served_model_name" in found:
                one = f"--served-model-name takes one name, here {found.served_model_name}"
                self.error(f"unknown argument {flag}; {one}")
            self.error(self._unknown(flag))
        return found, extra

    def _without_value(self, said: str) -> str:
        """`said` names the flag, with its other names. A word with a dash is none of its values."""
        names = said.removeprefix("argument ").split("/")
        for flag, word in pairwise(self._given):
            wrong = word.startswith("-") and not self._negative_number_matcher.match(word)
            known = word.partition("=")[0] in self._option_string_actions
            if flag in names and wrong and not known:
                return f"{said}: {word!r} begins as a flag does: write {flag}={word} if it is meant"
        return f"{said}: a value is expected"

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unknown argument {word}"
        known = self._option_string_actions.keys() - {opposite(word)}
        return f"unknown flag {word}{near(word, sorted(known))}"
