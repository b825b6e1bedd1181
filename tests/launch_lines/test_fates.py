"""What becomes of each flag that other engines have: honoured, a hint or refused (`fates.txt`).

Only a flag whose absence changes neither answers nor memory nor safety is a hint.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_every_flag import flags, parser, serve

from ds_runtime.config.spelling import SHORT, Known, _turned
from ds_runtime.errors import ConfigError

HINTS = ("speed", "log", "more", "stricter", "models", "off")
PART = "hint: part of "
# Words in names of flags that ask for answers, memory or safety.
HARM = (
    "auth|allowed|cert|checksum|crash|dtype|fail|fault|gb|key|limit|mask|memory|precision|quant.*|"
)
HARM += "scales?|seed|secret|secure|ssl|timeout|trust"
REVIEWED = {  # flags with such a word that are hints of speed all the same
    "--disable-hybrid-swa-memory": "each group of the cache has pages of its own size",
    "--enable-unified-memory": "each group of the cache has pages of its own size",
    "--dynamic-batch-tokenizer-batch-timeout": "milliseconds to wait for more texts to encode",
}


def table():
    """(flag, what becomes of it) of every row."""
    kind, rows = "", []
    for line in (Path(__file__).parent / "fates.txt").read_text().splitlines():
        if line.startswith("["):
            kind = line.strip("[]")
        elif not line.startswith("#"):
            rows += [(flag, kind) for flag in line.split()]
    return rows


FATES = dict(table())


def listed():
    """flag → (nargs, a value) of all lists."""
    rows = (row.values for row in flags())
    return {SHORT.get(flag, flag): (nargs, value) for flag, nargs, value in rows}


LISTED = listed()


def words_of(flag):
    """A command line's words for the flag, with a value that asks for something."""
    nargs, value = LISTED[flag]
    if nargs == "0":
        return [flag]
    spelling = getattr(serve()._option_string_actions[flag], "spelling", None)
    if spelling is not None and value in spelling.values:
        value = "1234" if value.lstrip("-").replace(".", "").isdecimal() else "another"
    return [flag, value]


def test_every_flag_has_one_fate():
    assert len(table()) == len(FATES) and FATES.keys() == LISTED.keys()
    kinds = {kind for kind in FATES.values() if not kind.startswith(PART)}
    assert kinds == {"honoured: set", "honoured: always", "refused", *(f"hint: {h}" for h in HINTS)}


def test_what_is_set_has_a_setting():
    for flag, kind in FATES.items():
        action = serve()._option_string_actions[flag]
        own = not isinstance(action, Known)
        sets = own or any(one.sets for one in (action.spelling, *action.spelling.values.values()))
        assert sets == (kind == "honoured: set"), flag


@pytest.mark.parametrize("flag", [f for f, kind in FATES.items() if kind == "refused"])
def test_what_is_missing_ends_the_start(flag):
    with pytest.raises(ConfigError, match=rf"^{flag}\b.*: \S"):
        parser().parse_args(["serve", "DIR", *words_of(flag)])


@pytest.mark.parametrize(
    "flag", [f for f, k in FATES.items() if k.startswith("hint") or "always" in k]
)
def test_a_hint_changes_nothing_but_what_is_said(flag):
    before = vars(parser().parse_args(["serve", "DIR"]))
    found = vars(parser().parse_args(["serve", "DIR", *words_of(flag)]))
    notes = found.pop("notes", [])
    assert found == before
    assert notes or FATES[flag] in ("hint: off", "hint: more")


def test_what_a_hint_is_part_of_is_refused():
    parents = {kind.removeprefix(PART) for kind in FATES.values() if kind.startswith(PART)}
    assert parents and {FATES[parent] for parent in parents} == {"refused"}


def test_what_turns_something_off_turns_off_what_is_not_here():
    for flag, kind in FATES.items():
        others = [FATES[one] for one in _turned(flag) if one in FATES]
        if kind == "hint: off":
            assert others and "honoured: set" not in others, flag
        if kind == "hint: more":
            assert others and {*others} <= {"honoured: always", "hint: more"}, flag
        if kind == "honoured: always" and (
            flag.startswith("--enable-") or flag.startswith("--no-")
        ):
            assert {*others} <= {"refused", "hint: more"}, flag


def test_no_hint_is_about_answers_memory_or_safety():
    for flag, kind in FATES.items():
        harmful = [w for w in flag.strip("-").split("-") if re.fullmatch(HARM, w)]
        if kind in ("hint: speed", "hint: log"):
            assert bool(harmful) == (flag in REVIEWED), flag
    assert REVIEWED.keys() <= FATES.keys()
