"""Every flag that other engines' own parsers have is known here, and takes as many values."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from ds_runtime.cli import _add_plugin_flags, build_parser
from ds_runtime.cli.known.notation import ends, ignored
from ds_runtime.config.spelling import SHORT, Known, Spelling, hyphenated, nothing, refused
from ds_runtime.errors import ConfigError
from ds_runtime.plugins.manager import load_plugins

HERE = Path(__file__).parent
COUNTS = {"0": (0,), "1": (1,), "?": (0, 1), "*": (1, 2), "+": (1, 2)}  # by nargs
# What a setting of this engine says of a value that another engine takes.
OTHER_VALUE = r"argument --.*: .*( is not |must be |no such )"
ONE = r"--(api-key|served-model-name) takes one "


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
    name = SHORT.get(flag, flag)
    for count in COUNTS[nargs]:
        line = ["serve", "DIR", flag, *[value] * count, "--port", "4321"]
        try:
            namespace = parser().parse_args(line)
        except ConfigError as e:
            assert re.match(rf"{name}\b.*: \S", str(e)), line
        except SystemExit:  # a setting of this engine: the value is not one of its own
            said = capsys.readouterr().err
            if count > 1 and re.search(ONE, said):
                continue
            assert re.search(OTHER_VALUE, said), said
            assert "expected" not in said and "unknown" not in said, said
        else:
            assert (namespace.folder, namespace.port) == ("DIR", 4321), line
            notes = getattr(namespace, "notes", [])
            assert all(note.startswith(name) and "\n" not in note for note in notes)


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
    assert len(list(flags())) >= 559 + 484


def test_a_flag_that_is_not_known_would_be_seen(capsys):
    for words in (["--no-such-flag"], ["--lora-strict-loading", "x"], ["--kv-canary"]):
        with pytest.raises(SystemExit):
            parser().parse_args(["serve", "DIR", *words, "--port", "4321"])
        said = capsys.readouterr().err
        assert not re.search(OTHER_VALUE, said) and re.search("unknown|expected", said), said


def test_usage_lines_say_what_a_flag_takes():
    usage = "--a  --b X --c X... --f N... --d none|off|X  --[no-]e  --enable|disable-g"
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
        "--enable-g": refused(said),
        "--disable-g": nothing("is always so here"),
    }
    assert ignored(said, "--[no-]e") == {f: nothing(said) for f in ("--e", "--no-e")}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-tp 8 -dp=2", {"tp": 8, "dp": 2}),
        ("-O3", "--optimization-level 3: "),
        ("-O 3", "--optimization-level 3: "),
        ("-O=3", "--optimization-level 3: "),
        ("--compilation-config.mode 3", "--compilation-config mode=3: "),
        ("--compilation_config.pass_config.x=3", "--compilation-config pass_config.x=3: "),
        ("-cc.mode=3", "--compilation-config mode=3: "),
        ("--speculative-config.method mtp", "--speculative-config method=mtp: "),
    ],
)
def test_short_names_and_keys_of_objects(line, said):
    try:
        namespace = parser().parse_args(["serve", "DIR", *line.split()])
    except ConfigError as e:
        assert isinstance(said, str) and str(e).startswith(said)
        return
    if isinstance(said, str):
        assert [note.startswith(said) for note in namespace.notes] == [True]
    else:
        assert said.items() <= vars(namespace).items()
    assert namespace.folder == "DIR"


def test_no_short_name_is_read_behind_two_dashes():
    assert hyphenated(serve(), ["-tp", "1", "--", "-tp"]) == [
        "--tensor-parallel-size",
        "1",
        "--",
        "-tp",
    ]


def test_no_secret_is_shown():
    for words in (["--hf-token", "hf_secret"], ["--hf-token=hf_secret"]):
        with pytest.raises(ConfigError, match=r"^--hf-token: is the variable HF_TOKEN here$"):
            parser().parse_args(["serve", "DIR", *words])


def test_a_second_key_is_not_shown(capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["serve", "DIR", "--api-key", "first", "second"])
    said = capsys.readouterr().err
    assert "--api-key takes one key" in said and "second" not in said


@pytest.mark.parametrize("value", ["vllm", "/data/model"])
def test_other_defaults_of_sampling_end_the_start(value):
    with pytest.raises(ConfigError, match=r"is a change of generation_config\.json here"):
        parser().parse_args(["serve", "DIR", "--generation-config", value])
    found = parser().parse_args(["serve", "DIR", "--generation-config", "auto"])
    assert not getattr(found, "notes", [])


def test_what_is_off_is_accepted_in_silence():
    silent = 0
    for action in known_actions():
        for value, meant in action.spelling.values.items():
            if not meant.says:
                found = parser().parse_args(["serve", action.option_strings[0], value])
                assert not getattr(found, "notes", [])
                silent += 1
    assert silent > 20


def serve():
    return next(a for a in parser()._actions if isinstance(a.choices, dict)).choices["serve"]


def known_actions():
    return [a for a in serve()._actions if isinstance(a, Known)]
