"""The command line as a user meets it: help, flags, suggestions, errors, and what verbs print."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from faulty import install, tiny_config
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime.cli import build_parser, main
from ds_runtime.cli.flags import add_flags, build
from ds_runtime.cli.inspect.doctor import next_command
from ds_runtime.cli.parser import Parser
from ds_runtime.cli.run.generate import sampling_params
from ds_runtime.config import EngineConfig, ServerConfig, parse_size
from ds_runtime.config.spelling import Known, engines
from ds_runtime.errors import ConfigError, RequestError
from ds_runtime.ops.table import OPS
from ds_runtime_bench import record
from ds_runtime_bench.engine import one_batch

VERBS = ("serve", "warm", "generate", "plan", "ops", "plugins", "doctor", "bench")
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    return str(tiny_config(tmp_path / "tiny"))


def run(capsys: Capture, *args: str) -> tuple[int, str, str]:
    code = main(args)
    said = capsys.readouterr()
    return code, said.out, said.err


# start-up


def seconds(*command: str) -> tuple[float, float]:
    """(time, processor time) of a Python process."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    end, after = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return end - start, busy


def test_help_answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under 0.4 s on a core of its own; a neighbour's share is taken off by a loop in front of it.
    A core that needs more than 0.1 s for the loop has as much more time.

    Modules are compiled, as they are from the second start on, or after an installation.
    """
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    seconds("-m", "ds_runtime", "--help")
    runs, loops = [], []
    for _ in range(5):
        took, busy = seconds("-c", "sum(range(4_000_000))")
        runs.append(seconds("-m", "ds_runtime", "--help")[0] * min(1.0, busy / took))
        loops.append(busy)
    assert min(runs) < 0.4 * max(1.0, min(loops) / 0.1), (runs, loops)


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {'torch', 'transformers', 'fastapi', 'zmq', 'uvicorn'}:
            raise ImportError(f'{name} is blocked')
sys.meta_path.insert(0, Block())
from ds_runtime.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "args",
    [["--help"], ["serve", "--help"], ["plugins"], ["doctor"], ["plan"], ["ops", "--json"]],
    ids=" ".join,
)
def test_explaining_needs_no_torch(args: list[str], tiny: str) -> None:
    model = ["--model", tiny] if args[0] in ("plan", "ops") else []
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *args, *model], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(capsys: Capture, verb: str) -> None:
    code, out, err = run(capsys, verb, "--help")
    assert (code, err) == (0, "")
    assert f"usage: ds-runtime {verb}" in out


def test_no_verb_prints_help_and_version_is_the_package_s(capsys: Capture) -> None:
    code, out, _ = run(capsys)
    assert code == 0 and all(verb in out for verb in VERBS)
    code, out, _ = run(capsys, "--version")
    assert (code, out) == (0, "ds-runtime 0.1.0\n")


# flags


def parse(config: type[object], *args: str) -> tuple[object, frozenset[str]]:
    parser = Parser(prog="p")
    add_flags(parser, config)
    return build(config, parser.parse_args(args))  # type: ignore[type-var]


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig])
def test_no_flags_give_the_defaults_and_nothing_explicit(config: type[object]) -> None:
    assert parse(config) == (config(), frozenset())


def test_every_field_has_a_flag_with_its_help(capsys: Capture) -> None:
    _, out, _ = run(capsys, "serve", "--help-all")
    flat = " ".join(out.split())
    for f in (*fields(EngineConfig), *fields(ServerConfig)):
        assert "--" + f.name.replace("_", "-") in flat
        assert " ".join(f.metadata["help"].split()[:3]) in flat
    assert "(default: 30000)" in flat and "(default: off)" in flat


ENGINE = {
    "model": st.sampled_from(["demo", "a/b", "/x y"]),
    "dtype": st.sampled_from(["auto", "bfloat16", "float32"]),
    "plugins": st.lists(st.sampled_from(["cpu", "cuda"]), min_size=1).map(tuple),
    "tp": st.integers(1, 8),
    "kv_memory": st.integers(1, 1 << 50),
    "disable_radix_cache": st.booleans(),
    "strict_ops": st.booleans(),
    "pin": st.lists(st.sampled_from(["linear@*.[0,1].o=k", "rope=r"]), min_size=1).map(tuple),
    "graph_sizes": st.lists(st.integers(1, 99), min_size=1).map(tuple),
    "policy": st.sampled_from(["fifo", "priority"]),
}


def as_flags(values: dict[str, object]) -> list[str]:
    args: list[str] = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            args.append(flag if value else "--no-" + flag[2:])
        elif name == "pin":
            args += [word for pin in value for word in (flag, pin)]  # type: ignore[attr-defined]
        elif isinstance(value, tuple):
            args += [flag, ",".join(map(str, value))]
        else:
            args += [flag, str(value)]
    return args


@given(values=st.fixed_dictionaries({}, optional=ENGINE))
def test_flags_round_trip_and_say_what_was_set(values: dict[str, object]) -> None:
    found, explicit = parse(EngineConfig, *as_flags(values))
    assert found == EngineConfig(**values)  # type: ignore[arg-type]
    assert explicit == frozenset(values)


def test_setting_a_field_to_its_default_counts_as_set() -> None:
    assert parse(EngineConfig, "--page-size", "16")[1] == {"page_size"}


@pytest.mark.parametrize("space", ["", " ", "  "])
@pytest.mark.parametrize("write", [str, str.lower, str.upper])
def test_a_size_s_unit_is_written_in_any_way(write: Callable[[str], str], space: str) -> None:
    for power, letter in enumerate("KMGT", start=1):
        for unit, base in ((f"{letter}B", 1000), (f"{letter}iB", 1024), (f"{letter}i", 1024)):
            assert parse_size(f"6{space}{write(unit)}") == 6 * base**power


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512", 512),
        ("1.5GB", 1_500_000_000),
        ("2GiB", 2 << 30),
        ("4g", 4 << 30),
        (" 3 mb ", 3_000_000),
        ("7B", 7),
        ("1e3", 1000),
        ("1e999", None),
        ("GB", None),
        ("nanGB", None),
        ("infGB", None),
        ("-1GB", None),
        ("2 PB", None),
        ("", None),
    ],
)
def test_sizes(text: str, size: int | None) -> None:
    if size is None:
        with pytest.raises(ConfigError, match="write a number with"):
            parse_size(text)
    else:
        assert parse_size(text) == size


# wrong input


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["srve"], "did you mean 'serve'?"),
        (["serve", "--prot", "1"], "unknown flag --prot; did you mean '--port'?"),
        (["serve", "--prot=1"], "unknown flag --prot; did you mean '--port'?"),
        (["serve", "--dtype", "float23"], "did you mean 'float32'?"),
        (["serve", "--kv-mem", "1"], "unknown flag --kv-mem; did you mean '--kv-memory'?"),
        (["serve", "--port", "x"], "argument --port: 'x' is not a whole number"),
        (["serve", "--kv-memory", "much"], "--kv-cache-memory-bytes: size 'much': write a number"),
        (["serve", "demo", "model"], "unknown argument model"),
        (["serve", "--model", "a", "--model"], "--model-path: a value is expected"),
        (
            ["serve", "--model=a", "--model", "-b"],
            "--model-path: '-b' begins as a flag does: write",
        ),
        (["generate"], "prompt is missing: the text to complete, or '-' for"),
        (["bench"], "KIND is missing: give one of one-batch, "),
        (["bench", "one-bach"], "did you mean 'one-batch'?"),
        (["plan", "dif"], "did you mean 'diff'?"),
        (["plan", "demo"], "'demo' is not one of show, lock, diff; a model is --model demo"),
        (["plan", "/models/r1"], "a model is --model /models/r1"),
        (["plan", "", "--port", "1"], "'' is not one of show, lock, diff"),
    ],
)
def test_usage_errors_exit_2_with_a_suggestion(capsys: Capture, args: list[str], said: str) -> None:
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert said in err and "--help" in err and "Traceback" not in err


@pytest.mark.parametrize("command", ["--help", "plan"])
@pytest.mark.parametrize("closed", ["<", ">", "2>", "< >", "> 2>", "< > 2>"])
def test_closed_standard_streams_end_no_command(command: str, closed: str, tiny: str) -> None:
    """As some daemons start programs. What is still open gets the command's words, and no more."""
    model = f"--model {tiny}" if command == "plan" else ""
    redirected = " ".join(f"{stream}&-" for stream in closed.split())
    line = f"exec {sys.executable} -m ds_runtime {command} {model} {redirected}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (">" not in closed.split())


def test_a_closed_stream_s_number_is_no_socket_s() -> None:
    """Else a client gets what the server prints."""
    code = "from ds_runtime.cli.leaving import own_streams; own_streams(); import socket, sys; "
    code += "sys.exit(min(one.fileno() for one in socket.socketpair()))"
    line = f"exec {sys.executable} -c '{code}' <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", line], timeout=60).returncode > 2


def in_a_deleted_folder(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (gone := folder / "gone").mkdir()
    line = f"cd {gone}; rmdir {gone}; exec {sys.executable} -P -m ds_runtime {command}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)


def below(parser: argparse.ArgumentParser) -> list[str]:
    """The verbs of a parser."""
    found = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return [name for action in found for name in action.choices]


@pytest.mark.parametrize("command", below(build_parser()[0]))
def test_a_working_directory_that_was_deleted_is_said(command: str, tmp_path: Path) -> None:
    done = in_a_deleted_folder(command, tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    said = "ds-runtime: the working directory was deleted: cd to one that exists"
    assert done.stderr.splitlines()[-1] == said


@pytest.mark.parametrize("command", ["", "--version", "--help", "serve -h", "plan --help-all"])
def test_help_needs_no_working_directory(command: str, tmp_path: Path) -> None:
    done = in_a_deleted_folder(command, tmp_path)
    elsewhere = [sys.executable, "-P", "-m", "ds_runtime", *command.split()]
    usual = subprocess.run(elsewhere, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, usual.stdout) and usual.stdout
    assert "Traceback" not in done.stderr


def every_parser() -> list[argparse.ArgumentParser]:
    """Those of all verbs and of the verbs below them."""
    found: list[argparse.ArgumentParser] = [build_parser()[0]]
    for parser in found:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                found += action.choices.values()
    return found


@pytest.mark.parametrize("columns", ["1", "0", "-5", "28", "40", "wide", "10000"])
def test_help_is_written_on_a_terminal_of_any_width(
    columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for parser in every_parser():
        assert parser.format_help()


@pytest.mark.parametrize("parser", every_parser(), ids=lambda p: p.prog)
def test_help_says_what_a_flag_is_and_not_its_default_alone(
    parser: argparse.ArgumentParser,
) -> None:
    flags = [a for a in parser._actions if not isinstance(a, argparse._SubParsersAction)]
    assert flags
    for action in flags:
        assert action.help is not None and not action.help.startswith("("), action


@pytest.mark.parametrize("parser", every_parser(), ids=lambda p: p.prog)
def test_an_unknown_flag_is_named_before_its_value(
    parser: argparse.ArgumentParser, capsys: Capture
) -> None:
    """Of every verb, also where the value could be the verb below it or its model."""
    for flag in ("-nosuch", "--no-such-flag", "--no-such.x"):
        with pytest.raises(SystemExit):
            parser.parse_args([flag, "8"])
        err = capsys.readouterr().err
        assert f"unknown flag {flag}" in err or re.search(
            r" (is missing: |are missing$)", err, re.M
        )
        assert "not one of" not in err and "following arguments" not in err, err


def test_a_value_of_two_dashes_is_a_value_or_an_error_of_its_flag() -> None:
    """Python 3.11's argparse drops it, and the field then holds an empty list."""
    parser, _ = build_parser()
    (serve,) = (one for one in engines(parser) if one.prog.endswith(" serve"))
    taken = 0
    for flag, action in serve._option_string_actions.items():
        if not flag.startswith("--") or action.nargs == 0:
            continue
        try:
            found = vars(serve.parse_args([f"{flag}=--"]))
        except (SystemExit, ConfigError):
            continue
        taken += 1
        value = found.get(action.dest, "--")
        assert "--" in (value if isinstance(value, list | tuple) else [value]), flag
    assert taken > 40


@pytest.mark.parametrize("parser", every_parser(), ids=lambda p: p.prog)
def test_a_word_is_no_number(parser: argparse.ArgumentParser, capsys: Capture) -> None:
    """Of every flag of every verb: what argparse says of a type is in words of Python."""
    for action in parser._actions:
        if action.type is not None and action.option_strings:
            flag = action.option_strings[0]
            words = ["x"] * (action.nargs if isinstance(action.nargs, int) else 1)
            with contextlib.suppress(SystemExit):
                parser.parse_args([flag, *words])
            err = capsys.readouterr().err
            assert "invalid" not in err and "Traceback" not in err, err
            if getattr(action.type, "__name__", "") in ("int", "float"):
                assert flag in err and ("'x' is not a " in err), err


@pytest.mark.parametrize("parser", every_parser(), ids=lambda p: p.prog)
def test_a_flag_without_its_value_names_what_stands_there(
    parser: argparse.ArgumentParser, capsys: Capture
) -> None:
    """Of every flag of one value. Argparse takes `-1GB` for a flag, and does not name it."""
    for flag, action in parser._option_string_actions.items():
        if action.nargs is not None or isinstance(action, Known):
            continue
        for words, said in (
            ([flag], f"{flag}.*: a value is expected$"),
            ([flag, flag], f"{flag}.*: a value is expected$"),
            ([flag, "-1GB"], f"{flag}.*: '-1GB' begins as a flag does: write {flag}=-1GB"),
        ):
            with pytest.raises(SystemExit):
                parser.parse_args(words)
            assert re.search(said, capsys.readouterr().err, re.M), words


@pytest.mark.parametrize("parser", every_parser(), ids=lambda p: p.prog)
def test_a_verb_that_needs_a_verb_names_them(
    parser: argparse.ArgumentParser, capsys: Capture
) -> None:
    below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction) and a.required]
    if below:
        with pytest.raises(SystemExit):
            parser.parse_args([])
        assert ", ".join(below[0].choices) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["serve", "--port", "70000"], "--port 70000: must be from 0 to 65535"),
        (["serve", "--tp", "0"], "--tp 0: must be at least 1"),
        (["serve", "--enable-dp-attention"], "give --tp N, too, or leave the flag out"),
        (
            ["serve", "--tp", "8", "--dp", "5", "--enable-dp-attention"],
            "--tp 8 does not divide into 5: give --tp 5, or leave",
        ),
        (["plan", "--model", "/no/such"], "--model /no/such: no such folder"),
        (["plan", "--platform", "cpuu"], "no such platform; did you mean 'cpu'?"),
        (["plan", "--platform", "h200"], "it is a device: ds-runtime plan --device h200"),
        (["plan", "--plugins", "cpuu"], "'cpuu': no such plugin; did you mean 'cpu'?"),
        (["plan", "--explain", "linaer"], "no such op; did you mean 'linear'?"),
        (["plan", "lock"], "write ds-runtime plan lock FILE"),
        (["plan", "diff", "a"], "write ds-runtime plan diff A B"),
        (["plan", "diff", "/no/a", "/no/b"], "plan /no/a: cannot be read"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "--top-p", "2", "hi"], "--top-p is 2.0: must be between 0.0 and 1.0"),
        (["generate", "--max-tokens", "0", "hi"], "--max-tokens is 0: must be between 1 and"),
        (
            ["generate", "--min-tokens", "5", "--max-tokens", "2", "hi"],
            "--min-tokens 5 is above --max-tokens 2",
        ),
        (["generate", "--stop", "", "hi"], "--stop holds an empty string: remove it"),
        (["bench", "one-batch", "--output-len", "1"], "--output-len 1: must be at least 2"),
        (["bench", "accuracy", "--limit", "0"], "--limit 0: must be at least 1"),
        (["bench", "host", "--steps", "0"], "--steps 0: must be at least 1"),
        (["bench", "make-checkpoint", "/proc/x"], "make-checkpoint /proc/x: cannot be written"),
        (["plan", "--threads", "100000"], "--threads 100000: at most "),
        (["bench", "make-checkpoint", "/"], "exists and is not an empty folder"),
        (["bench", "one-batch", "--batch-size", "0"], "--batch-size 0: must be at least 1"),
    ],
)
def test_errors_exit_1_with_one_message(capsys: Capture, args: list[str], said: str) -> None:
    code, out, err = run(capsys, *args)
    assert (code, out) == (1, "")
    assert err.startswith("ds-runtime: ") and said in err and "Traceback" not in err


def test_an_interrupt_is_130_and_a_bug_keeps_its_traceback(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ds_runtime.plugins.manager.Plugins.platforms", interrupted)
    assert run(capsys, "plugins")[0] == 130
    monkeypatch.setattr("ds_runtime.plugins.manager.Plugins.platforms", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["plugins"])


def test_a_reader_that_leaves_is_no_error(tiny: str) -> None:
    command = f"{sys.executable} -m ds_runtime ops --json --model {tiny} | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[\n" and done.stderr == ""


@pytest.mark.parametrize("verb", ["plan", "plugins"])
def test_a_full_disk_is_a_sentence(tiny: str, verb: str) -> None:
    args = [sys.executable, "-m", "ds_runtime", verb, *(["--model", tiny] * (verb == "plan"))]
    with open("/dev/full", "w") as full:
        done = subprocess.run(args, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("ds-runtime: the output cannot be written: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "rows", ["[3]", '[{"op": "a", "kernel": "b", "sites": 3}]', "[" * 100_000 + "]" * 100_000]
)
def test_a_plan_file_that_is_none(capsys: Capture, tmp_path: Path, rows: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(f'{{"format": 1, "rows": {rows}}}')
    code, out, err = run(capsys, "plan", "diff", str(path), str(path))
    assert (code, out) == (1, "") and err.startswith(f"ds-runtime: plan {path}: ")


# what verbs print


def test_plan_names_a_kernel_for_every_op_it_needs(capsys: Capture, tiny: str) -> None:
    code, out, _ = run(capsys, "plan", "--model", tiny)
    assert code == 0
    assert out.startswith("model tiny · platform cpu (")
    code, out, _ = run(capsys, "plan", "--model", tiny, "--verbose")
    named = {line.split()[0] for line in out.splitlines()[1:] if not line.startswith(" ")}
    assert code == 0 and named >= {"embed", "linear", "experts", "mla_decode", "sample"}
    assert named <= {*OPS, "receipt"}  # after the ops: what conform found of the plugins
    assert "refused: " in out and "lost: " in out


@pytest.mark.parametrize("device", [(), ("--device", "h200"), ("--device", "910b")])
@pytest.mark.parametrize("model", ["demo", "demo-v32", "demo-v4"])
def test_plan_prints_one_line_per_op(capsys: Capture, model: str, device: tuple[str, ...]) -> None:
    """With all sites and notes of the op's kernels; who lost and refused, with --verbose alone."""
    _, out, _ = run(capsys, "plan", "--model", model, *device)
    plan = json.loads(run(capsys, "plan", "--model", model, *device, "--json")[1])
    assert plan["model"] == model and f"model {model} · platform " in out, "as it was typed"
    lines = [line for line in out.splitlines() if line.split()[0] in OPS]
    assert [line.split()[0] for line in lines] == list(dict.fromkeys(r["op"] for r in plan["rows"]))
    assert "refused: " not in out and "lost: " not in out
    said = {line.split()[0]: line for line in lines}
    for row in plan["rows"]:
        wanted = (row["kernel"], row["note"], row["converts"], *row["sites"])
        assert all(text in said[row["op"]] for text in wanted), row["op"]


def test_plan_as_json_is_the_plan(capsys: Capture, tiny: str) -> None:
    _, out, _ = run(capsys, "plan", "--model", tiny, "--json", "--page-size", "32")
    plan = json.loads(out)
    assert (plan["model"], plan["platform"], plan["page_size"]) == ("tiny", "cpu", 32)
    assert {"op", "kernel", "sites", "refused", "lost"} <= plan["rows"][0].keys()
    assert plan["digest"] in run(capsys, "plan", "--model", tiny, "--page-size", "32")[1]


def test_explain_gives_every_kernel_a_verdict_at_every_site(capsys: Capture, tiny: str) -> None:
    _, out, _ = run(capsys, "plan", "--model", tiny, "--explain", "linear", "--json")
    rows = json.loads(out)["kernels"]
    assert {"reference.ReferenceLinear", "reference.Fp8W8A8Linear"} <= {r["kernel"] for r in rows}
    sites = [sorted(s for at in r["verdicts"].values() for s in at) for r in rows]
    assert all(found == sites[0] for found in sites) and "lm_head" in sites[0]
    chosen = [s for r in rows for s in r["verdicts"].get("chosen", ())]
    assert sorted(chosen) == sites[0]
    _, text, _ = run(capsys, "plan", "--model", tiny, "--explain", "linear")
    assert "refused: does not read weight format 'dense'; it reads fp8_block" in text


def test_lock_diff_and_hold_to_a_plan(capsys: Capture, tiny: str, tmp_path: Path) -> None:
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    pin = ["--pin", "mla_prologue=reference.mla_prologue"]
    assert run(capsys, "plan", "lock", a, "--model", tiny)[0] == 0
    assert run(capsys, "plan", "lock", b, "--model", tiny, *pin)[0] == 0
    assert run(capsys, "plan", "diff", a, a) == (0, "the plans are equal\n", "")
    code, out, _ = run(capsys, "plan", "diff", a, b)
    assert code == 1
    assert "mla_prologue at layers.0-2.self_attn" in out and "reference.mla_prologue there" in out
    assert run(capsys, "plan", "--model", tiny, "--plan", a)[0] == 0
    code, _, err = run(capsys, "plan", "--model", tiny, "--plan", b)
    assert code == 1 and "the plan differs: " in err and "mla_prologue at" in err
    assert run(capsys, "plan", "lock", str(tmp_path / "no" / "x"), "--model", tiny)[0] == 1


HALVES = "'steps with 1024 tokens of prompts or more run as two halves"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--tp 2", "--tp: 2 here, 1 there"),
        ("--tp 2 --enable-dp-attention", "--enable-dp-attention, groups: 2 here, 1 there"),
        ("--tp 2 --ep 2", "--ep: 2 here, 1 there"),
        ("--tp 2 --enable-two-batch-overlap", f"--enable-two-batch-overlap: {HALVES}"),
        ("--dtype bfloat16", "--dtype: 'bfloat16' here, 'float32' there"),
        ("--kv-cache-dtype fp8", "--kv-cache-dtype: 'float8_e4m3fn' here, 'float32' there"),
        ("--page-size 32", "--page-size: 32 here, 16 there"),
    ],
)
def test_a_plan_that_differs_names_the_flag(
    words: str, said: str, capsys: Capture, tmp_path: Path
) -> None:
    """And the remedy keeps the flags of the command: as said, it locks what then holds."""
    locked, given = str(tmp_path / "a.json"), ["--model", "demo", "--platform", "cpu"]
    base = [*given, "--dtype", "float32"]
    assert run(capsys, "plan", "lock", locked, *base)[0] == 0
    now = [*base, *words.split()] if "--dtype" not in words else [*given, *words.split()]
    code, _, err = run(capsys, "plan", *now, "--plan", locked)
    assert code == 1 and said in err and f"--plan {locked}: the plan differs: " in err
    if "overlap" in words:
        assert run(capsys, "plan", "lock", locked, *base, "--tp", "2")[0] == 0
        err = run(capsys, "plan", *now, "--plan", locked)[2]
        assert f"--enable-two-batch-overlap: {HALVES}" in err and ", 'off' there" not in err
        assert " here, off there; " in err
    remedy = f"lock again: ds-runtime plan lock {locked}, with the flags of this command"
    assert err.rstrip().endswith(remedy)
    assert run(capsys, "plan", "lock", locked, *now)[0] == 0
    assert run(capsys, "plan", *now, "--plan", locked)[0] == 0


def test_a_user_setting_reaches_the_plan_as_explicit(
    capsys: Capture, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "@hookimpl\ndef ds_defaults(): return [Change('page_size', 64, 'aligned loads')]"
    install(tmp_path / "s", monkeypatch, code, "wisher", "wisher-dist")
    _, out, _ = run(capsys, "plan", "--model", tiny)
    assert "page 64" in out and "config page_size: 16 → 64 (wisher: aligned loads)" in out
    assert "page 16" in run(capsys, "plan", "--model", tiny, "--page-size", "16")[1]


def test_strict_ops_names_the_heavy_op_and_where(capsys: Capture, tiny: str) -> None:
    assert run(capsys, "plan", "--model", tiny, "--strict-ops")[0] == 0
    code, _, err = run(capsys, "plan", "--model", tiny, "--strict-ops", "--pin", "linear=reference")
    assert code == 1
    assert "linear at layers.0-2.self_attn.o_proj" in err
    assert "ds-runtime plan --explain linear says why" in err


def test_fusions_can_be_left_apart(capsys: Capture, tiny: str) -> None:
    whole = run(capsys, "plan", "--model", tiny)[1]
    assert "self_attn.qkv_a_proj" in whole and "self_attn.kv_a_proj_with_mqa" not in whole
    code, out, _ = run(capsys, "plan", "--model", tiny, "--fusion", "qkv_a=off,mla_prologue=off")
    assert code == 0
    assert "self_attn.kv_a_proj_with_mqa" in out and "self_attn.qkv_a_proj" not in out
    assert "composed of rms_norm, rope, cache_write (--fusion mla_prologue=off)" in out
    code, _, err = run(capsys, "plan", "--model", tiny, "--fusion", "everything=off")
    assert code != 0 and "--fusion everything: no such fusion; known: qkv_a" in err


def test_ops_lists_the_whole_vocabulary(capsys: Capture, tiny: str) -> None:
    _, out, _ = run(capsys, "ops", "--model", tiny, "--json")
    table = json.loads(out)
    assert [row["op"] for row in table] == list(OPS)
    for row in table:
        assert row["summary"] and row["contract"] >= 1 and row["tolerance"]
        assert any(k["provider"] == "reference" for k in row["kernels"])
    _, text, _ = run(capsys, "ops", "--model", tiny)
    assert "mla_prologue: " in text and "composed of rms_norm, rope, cache_write" in text
    assert "reference.quantize_group (rank 0): this model has no site for it" in text


BAD = "raise OSError('driver 12 is too old')"


def test_plugins_says_where_each_comes_from_and_why_not(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "s", monkeypatch, BAD, "bad", "bad-dist")
    _, out, _ = run(capsys, "plugins")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert {"cpu", "cuda", "rocm", "npu", "xpu", "triton", "reference", "bad"} <= lines.keys()
    assert "ds-runtime 0.1.0" in lines["cpu"] and "platform cpu" in lines["cpu"]
    assert "bad-dist 2.5" in lines["bad"]
    assert "broken: OSError: driver 12 is too old" in lines["bad"]
    assert "Traceback" not in out
    assert "Traceback" in run(capsys, "plugins", "--verbose")[1]
    rows = json.loads(run(capsys, "plugins", "--json", "--plugins", "bad")[1])
    assert {r["name"]: r["refusal"] for r in rows} == {
        "bad": "broken",
        "checkpoints": None,
        "compiled": None,
        "reference": None,
    }


BAD_OFFERS = """
@hookimpl
def ds_ops():
    raise OSError('no card')
"""


def test_a_plugin_whose_offers_fail_is_said_everywhere(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: str
) -> None:
    install(tmp_path / "s", monkeypatch, BAD_OFFERS, "bad", "bad-dist")
    said = "broken: ds_ops raised OSError: no card"
    assert said in run(capsys, "plugins")[1] and said in run(capsys, "doctor")[1]
    for verb in ("plan", "ops"):
        code, out, err = run(capsys, verb, "--json", "--model", tiny)
        assert code == 0 and json.loads(out)
        assert err == f"ds-runtime: plugin bad is left out: {said}\n"


def test_reports_run_whatever_the_plugins_are(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "s", monkeypatch, "import sys; sys.exit()", "bad", "bad-dist")
    assert "broken: SystemExit" in run(capsys, "plugins")[1]
    monkeypatch.setenv("DS_PLUGINS", "cpi,cpu")
    unknown = "DS_PLUGINS 'cpi': no such plugin; did you mean 'cpu'?"
    code, out, err = run(capsys, "plugins")
    assert code == 1 and "platform cpu" in out and err == f"ds-runtime: {unknown}\n"
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and unknown in out
    assert run(capsys, "--help")[0] == 0
    assert run(capsys, "plan") == (1, "", f"ds-runtime: {unknown}\n")


def test_doctor_ends_with_the_command_to_run(capsys: Capture) -> None:
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    for word in ("python", "torch", "plugin cpu", "device cpu", "memory", "huggingface cache"):
        assert word in out
    assert out.rstrip().splitlines()[-1] == "next: ds-runtime serve"
    report = json.loads(run(capsys, "doctor", "--json")[1])
    assert report["works"] == ["cpu"] and report["next"] == "ds-runtime serve"


def test_doctor_s_advice(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert next_command(["cpu"], broken=True) == "ds-runtime plugins --verbose"
    assert next_command([], broken=False).startswith("pip install")
    install(tmp_path / "s", monkeypatch, BAD, "bad", "bad-dist")
    code, out, _ = run(capsys, "doctor", "--plugins", "bad")
    assert code == 1 and out.endswith("next: ds-runtime plugins --verbose\n")


@pytest.mark.parametrize("only", ["nothere", "cpu,nothere", "cuda", "reference", ""])
@pytest.mark.parametrize("said_by", ["--plugins", "DS_PLUGINS"])
def test_doctor_s_advice_is_about_what_was_left_out(
    only: str, said_by: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No package is missing where a name is wrong, or a restriction leaves out what works here. The
    command that it names runs, and the fault is not in what that prints."""
    if said_by == "DS_PLUGINS":
        monkeypatch.setenv(said_by, only)
        _, out, _ = run(capsys, "doctor")
    else:
        _, out, _ = run(capsys, "doctor", said_by, only)
    told = out.splitlines()[-1].removeprefix("next: ")
    empty = said_by == "DS_PLUGINS" and not only  # which restricts nothing
    verb = "serve" if empty else "plugins" if "nothere" in only else "doctor"
    assert told.endswith(f"ds-runtime {verb}") and "pip" not in told
    if verb != "serve":
        done = subprocess.run(["bash", "-c", told], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and "nothere" not in done.stdout + done.stderr
        assert re.search(r"^(active|cpu) .*platform cpu$", done.stdout, re.MULTILINE)


def test_what_plugins_say_of_themselves(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
    PROBE = lambda: Refusal("not installed", "its compiler is missing")
    DIAGNOSE = lambda: [("compiler", "none")]
    """
    install(tmp_path / "a", monkeypatch, code, "mine", "mine-dist")
    install(tmp_path / "b", monkeypatch, "PROBE = DIAGNOSE = lambda: 1 / 0", "bad", "bad-dist")
    _, out, _ = run(capsys, "plugins")
    assert "not installed: its compiler is missing" in out
    assert "broken: PROBE raised ZeroDivisionError" in out
    _, out, _ = run(capsys, "doctor")
    assert "mine: compiler" in out and "broken: DIAGNOSE raised ZeroDivisionError" in out
    assert "cpu: native library" in out
    assert out.rstrip().endswith("next: ds-runtime plugins --verbose")


# verbs of plugins


HELLO = """
@hookimpl
def ds_cli(subcommands):
    parser = subcommands.add_parser({verb!r}, help="greets")
    parser.add_argument("--name", default="you")
    parser.set_defaults(run=lambda args: print(f"hello {{args.name}}"))
    {after}
"""


def test_a_plugin_adds_a_verb(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, HELLO.format(verb="hello", after=""), "hello", "hello-dist")
    assert run(capsys, "hello", "--name", "there") == (0, "hello there\n", "")
    assert "greets" in run(capsys, "--help")[1]
    assert "did you mean 'hello'?" in run(capsys, "helo")[2]
    assert run(capsys, "hello", "--plugins", "cpu")[0] == 2  # restricted: the verb is not there


@pytest.mark.parametrize(
    ("verb", "after", "said"),
    [
        ("hello", "raise OSError('late')", "ds_cli raised OSError: late"),
        ("serve", "", "ds_cli adds 'serve', which is taken"),
    ],
)
def test_a_plugin_whose_verb_fails_leaves_none(
    capsys: Capture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    after: str,
    said: str,
) -> None:
    install(tmp_path, monkeypatch, HELLO.format(verb=verb, after=after), "hello", "hello-dist")
    assert run(capsys, "hello")[0] == 2
    code, out, err = run(capsys, "serve", "--help")
    assert code == 0 and "--port" in out
    assert said in err


# generate and bench without an engine


def test_sampling_flags_become_sampling_params() -> None:
    parser, _ = build_parser()
    args = parser.parse_args(["generate", "hi"])
    assert sampling_params(args).max_tokens is None
    args = parser.parse_args(
        [
            "generate",
            "--stop",
            "a",
            "--stop",
            "b",
            "--top-k=5",
            "--seed",
            "-3",
            "--max-tokens",
            "7",
            "x",
        ]
    )
    params = sampling_params(args)
    assert (params.stop, params.top_k, params.seed, params.max_tokens) == (("a", "b"), 5, -3, 7)
    with pytest.raises(RequestError, match="temperature"):
        sampling_params(parser.parse_args(["generate", "--temperature", "101", "x"]))


def test_rates_are_medians_of_differences() -> None:
    found = one_batch.rates((8, 512, 33), [2.0, 1.0, 4.0], [4.0, 2.0, 8.0])
    assert (found.prefill_s, found.decode_s) == (2.0, 2.0)
    assert found.prefill_tokens_per_s == 8 * 512 / 2.0
    assert found.decode_tokens_per_s == 8 * 32 / 2.0


def test_random_prompts_repeat_and_differ() -> None:
    prompts = one_batch.random_prompts(3, 50, 11)
    assert prompts == one_batch.random_prompts(3, 50, 11)
    assert len({tuple(p) for p in prompts}) == 3
    assert {len(p) for p in prompts} == {50} and max(map(max, prompts)) < 11


def test_a_record_says_where_it_was_measured(tmp_path: Path) -> None:
    row = record.environment()
    assert row["machine"]["cores"] >= 1 and "torch" in row["versions"]
    path = tmp_path / "results" / "x.jsonl"
    for i in range(2):
        record.append(path, {"i": i, **row})
    assert [json.loads(line)["i"] for line in path.read_text().splitlines()] == [0, 1]
    assert record.peak_bytes() > 1 << 20


def test_several_served_names_are_refused_by_name(capsys):
    """The second one looks like a model's folder."""
    code, _, err = run(capsys, "serve", "--model", "demo", "--served-model-name", "a", "b")
    assert code and "b: --model demo names another model: give one of them" in err
    assert "--served-model-name takes one name, here a" in err
    code, _, err = run(capsys, "serve", "demo", "--served-model-name", "a", "b")
    assert code and "unknown argument b; --served-model-name takes one name, here a" in err
