"""Every flag that other engines' own parsers have is known here, and takes as many values."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from ds_runtime.cli import _add_plugin_flags, build_parser
from ds_runtime.cli.known.notation import ends, ignored
from ds_runtime.config.spelling import Known, Spelling, nothing, refused
from ds_runtime.errors import ConfigError
from ds_runtime.plugins.manager import load_plugins

HERE = Path(__file__).parent
COUNTS = {"0": (0,), "1": (1,), "?": (0, 1), "*": (1, 2), "+": (1, 2)}  # by nargs
# What a setting of this engine says of a value that another engine takes.
OTHER_VALUE = r"argument --.*: .*( is not |must be |no such )"


def flags():
    """(flag, nargs, a value) of every row of every list."""
    for page in sorted(HERE.glob("*-[0-9]*.txt")):
        for row in page.read_text().splitlines():
            if row and not row.startswith("#"):
                flag, nargs, *value = row.split()
                yield pytest.param(flag, nargs, *(value or [""]), id=f"{page.stem} {flag}")


@cache
def parser():
    made, _ = build_parser()
    _add_plugin_flags(made, load_plugins())
    return made


@pytest.mark.parametrize(("flag", "nargs", "value"), list(flags()))
def test_it_is_known_and_takes_as_many_values(flag, nargs, value, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("dtype: auto\n")  # what --config names
    for count in COUNTS[nargs]:
        line = ["serve", "DIR", flag, *[value] * count, "--port", "4321"]
        try:
            namespace = parser().parse_args(line)
        except ConfigError as e:
            assert re.match(rf"{flag}\b.*: \S", str(e)), line
        except SystemExit:  # a setting of this engine: the value is not one of its own
            said = capsys.readouterr().err
            assert re.search(OTHER_VALUE, said), said
            assert "expected" not in said and "unknown" not in said, said
        else:
            assert (namespace.folder, namespace.port) == ("DIR", 4321), line
            notes = getattr(namespace, "notes", [])
            assert all(note.startswith(flag) and "\n" not in note for note in notes)


@pytest.mark.parametrize(("flag", "nargs", "value"), list(flags()))
def test_it_takes_no_folder_that_stands_behind_it(flag, nargs, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("dtype: auto\n")
    (tmp_path / "DIR").mkdir()
    for count in COUNTS[nargs]:
        try:
            namespace = parser().parse_args(["serve", flag, *[value] * count, "DIR"])
        except (ConfigError, SystemExit):
            continue  # nothing starts without the folder
        # Of this engine's own lists, what a model has none of ends the start.
        taken = getattr(namespace, "lora_target_modules", ())
        assert namespace.folder == "DIR" or "DIR" in taken, namespace


MANY = [p for p in flags() if p.values[1] in "*+"]


@pytest.mark.parametrize(("flag", "nargs", "value"), MANY)
@pytest.mark.parametrize("verb", ["lock", "diff", "show"])
def test_it_takes_no_verb_that_stands_behind_it(verb, flag, nargs, value, capsys):
    try:
        namespace = parser().parse_args(["plan", flag, value, verb, "no-such-file"])
    except (ConfigError, SystemExit) as ended:
        assert flag in (capsys.readouterr().err or str(ended))
    else:
        assert (namespace.action, namespace.files) == (verb, ["no-such-file"])


def test_numbers_end_where_something_else_stands(capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["serve", "--gc-threshold", "700", "10", "no-such-folder"])
    said = capsys.readouterr().err
    assert "--gc-threshold: 'no-such-folder' is not a number: give it in front" in said
    words = ["DIR", "--gc-threshold", "700,10", "10", "--numa-node", "-1", "0"]
    namespace = parser().parse_args(["serve", *words])
    assert namespace.folder == "DIR" and len(namespace.notes) == 2


def test_texts_end_where_the_model_may_stand(tmp_path, capsys):
    flag, there = "--allowed-media-domains", str(tmp_path)
    with pytest.raises(SystemExit):
        parser().parse_args(["serve", flag, "a.com", there])
    assert f"{flag}: {there!r} is a file or folder" in capsys.readouterr().err
    for line in (["DIR", flag, there], ["--model-path", "DIR", flag, there], [flag, "a", "b"]):
        assert parser().parse_args(["serve", *line]).notes, line


def test_the_lists_are_whole():
    assert len(list(flags())) >= 559


def test_a_flag_that_is_not_known_would_be_seen(capsys):
    for words in (["--no-such-flag"], ["--lora-strict-loading", "x"], ["--kv-canary"]):
        with pytest.raises(SystemExit):
            parser().parse_args(["serve", "DIR", *words, "--port", "4321"])
        said = capsys.readouterr().err
        assert not re.search(OTHER_VALUE, said) and re.search("unknown|expected", said), said


def test_usage_lines_say_what_a_flag_takes():
    usage = "--a  --b X --c X... --f N... --d none|off|X  --[no-]e"
    said, off = "is gone: leave it out", Spelling(takes="one")
    found = ends(said, usage)
    assert found == {
        "--a": refused(said),
        "--b": refused(said, "one"),
        "--c": refused(said, "many"),
        "--f": refused(said, "numbers"),
        "--d": Spelling(said, refused=True, takes="one", values={"none": off, "off": off}),
        "--e": refused(said),
        "--no-e": nothing("is always so here"),
    }
    assert ignored(said, "--[no-]e") == {f: nothing(said) for f in ("--e", "--no-e")}


def test_what_is_off_is_accepted_in_silence():
    silent = 0
    for action in known_actions():
        for value, meant in action.spelling.values.items():
            if not meant.says:
                found = parser().parse_args(["serve", action.option_strings[0], value])
                assert not getattr(found, "notes", [])
                silent += 1
    assert silent > 20


def known_actions():
    serve = next(a for a in parser()._actions if isinstance(a.choices, dict)).choices["serve"]
    return [a for a in serve._actions if isinstance(a, Known)]
