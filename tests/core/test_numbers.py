"""Numbers and origins that are none, over all flags: one sentence says what is wrong."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import pytest
import yarl

from ds_runtime.cli import build_parser
from ds_runtime.config import EngineConfig, ServerConfig
from ds_runtime.config.spelling import Known
from ds_runtime.errors import ConfigError

INFINITE = ("inf", "-inf", "nan", "1e999", "-Infinity", " NaN ")
Capture = pytest.CaptureFixture[str]


def every_action() -> list[tuple[argparse.ArgumentParser, argparse.Action]]:
    """The flags of all verbs and of the verbs below them, with their parsers."""
    parsers: list[argparse.ArgumentParser] = [build_parser()[0]]
    found = []
    for parser in parsers:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
            elif not isinstance(action, Known):
                found.append((parser, action))
    return found


def reads_halves(read: Any) -> bool:
    """Whether a flag's reader makes a float of one."""
    try:
        return isinstance(read("0.5"), float)
    except Exception:
        return False


FLOATS = [(p, a) for p, a in every_action() if callable(a.type) and reads_halves(a.type)]
FIELDS = [(c, f) for c in (EngineConfig, ServerConfig) for f in fields(c)]
FLOAT_FIELDS = [(c, f) for c, f in FIELDS if "float" in str(f.type)]
NUMBERS = [(c, f) for c, f in FIELDS if re.search(r"\b(int|float)\b(?!,)", str(f.type))]


def named(one: tuple[Any, Any]) -> str:
    owner, what = one
    return f"{getattr(owner, 'prog', owner)}.{getattr(what, 'name', getattr(what, 'dest', what))}"


def test_there_are_such_flags() -> None:
    verbs = {p.prog.removeprefix("ds-runtime ") for p, _ in FLOATS}
    assert {"serve", "warm", "generate", "chat", "plan", "bench serving", "tune costs"} <= verbs
    set_by = {a.dest for p, a in FLOATS if p.prog == "ds-runtime serve"}
    assert set_by == {f.name for _, f in FLOAT_FIELDS}


@pytest.mark.parametrize(("parser", "action"), FLOATS, ids=map(named, FLOATS))
def test_a_flag_s_number_is_finite(
    parser: argparse.ArgumentParser, action: argparse.Action, capsys: Capture
) -> None:
    for flag in action.option_strings:
        for text in INFINITE:
            if float(text) == action.default:
                continue  # what it is without the flag may be written
            with pytest.raises(SystemExit):
                parser.parse_args([f"{flag}={text}"])
            said = capsys.readouterr().err.splitlines()
            assert said[0].endswith(f": {text!r} is not a finite number"), said
            assert flag in said[0] and len(said) == 2


@pytest.mark.parametrize(("config", "field"), FLOAT_FIELDS, ids=map(named, FLOAT_FIELDS))
def test_a_setting_s_number_is_finite(config: Any, field: Field[Any], tmp_path: Path) -> None:
    """In Python, and in a file, where YAML has words of its own."""
    name = field.name.replace("_", "-")
    for value in (math.inf, -math.inf, math.nan):
        said = re.escape(f"--{name} {value}: must be a finite number")
        with pytest.raises(ConfigError, match=f"^{said}$"):
            config(**{field.name: value})
    serve = build_parser()[1].choices["serve"]
    file = tmp_path / "serve.yaml"
    for text in (".inf", "-.inf", ".nan", "1e999", "inf"):
        file.write_text(f"{name}: {text}\n")
        with pytest.raises(ConfigError, match=rf"line 1: {name}: .*: must be a finite number$"):
            serve.parse_args(["--config", str(file)])


def bounds(said: str) -> list[Callable[[float], bool]]:
    """What a sentence says that a number must be."""
    checks: list[Callable[[float], bool]] = []
    for word, number in re.findall(r"(above|at least|at most|from|to) (-?[\d.]*\d)", said):
        limit = float(number) if "." in number else int(number)
        checks.append(
            {
                "above": lambda x, limit=limit: x > limit,
                "at least": lambda x, limit=limit: x >= limit,
                "from": lambda x, limit=limit: x >= limit,
                "at most": lambda x, limit=limit: x <= limit,
                "to": lambda x, limit=limit: x <= limit,
            }[word]
        )
    return checks


@pytest.mark.parametrize(("config", "field"), NUMBERS, ids=map(named, NUMBERS))
def test_what_a_refusal_asks_for_is_not_what_was_given(config: Any, field: Field[Any]) -> None:
    """A limit that a number breaks is told."""
    flag = f"--{field.name.replace('_', '-')}"
    probes = [-(10**12), -1, -0.0, 0, 1, 2, 10**5, 10**6 + 1, 10**9, 10**12, 1e-9, 0.6, 1.5, 1e300]
    for value in probes if "float" in str(field.type) else filter(lambda x: type(x) is int, probes):
        try:
            config(**{field.name: value})
        except ConfigError as e:
            said = str(e)
            asked = bounds(said.partition(": ")[2])
            if said.startswith(flag) and asked and ": must be" in said:
                assert not all(fits(value) for fits in asked), said


INT_FIELDS = [(c, f) for c, f in NUMBERS if "float" not in str(f.type)]


@pytest.mark.parametrize(("config", "field"), INT_FIELDS, ids=map(named, INT_FIELDS))
def test_a_whole_number_fits_where_it_goes(config: Any, field: Field[Any]) -> None:
    """Settings go to other processes, which take 64 bits, and kernels take 32. The sentence names
    the flag, the value and a limit that holds."""
    several = "tuple" in str(field.type)
    bits = 64 if field.metadata.get("size") else 32
    for value in (2 ** (bits - 1), 2**64, 10**20, 10**400):
        with pytest.raises(ConfigError) as caught:
            config(**{field.name: (1, value) if several else value})
        said = str(caught.value)
        flag, given = f"--{field.name.replace('_', '-')}", f"1,{value}" if several else value
        assert said.startswith(f"{flag} {given}: "), said
        assert (limits := bounds(said.partition(": ")[2])), said
        assert not all(fits(value) for fits in limits), "another limit is named"
        assert any(all(fits(kept) for fits in limits) for kept in (2, 63)), said


@pytest.mark.parametrize(
    ("fault", "value"),
    [
        ("no scheme", "chat.example.com"),
        ("no scheme", "//chat.example.com"),
        ("no host", "https://"),
        ("no host", "https://:8080"),
        ("a path", "https://a.b/"),
        ("a path", "https://a.b/chat"),
        ("a query", "https://a.b?x"),
        ("a fragment", "https://a.b#x"),
        ("a user", "https://me@a.b"),
        ("a port that is none", "https://a.b:65536"),
        ("a port that is none", "https://a.b:"),
        ("a port that is none", "https://a.b:٣"),
        ("a dash", "-x"),
        ("a dash", "-"),
        ("a dash", "--"),
        ("a dash", "https://-x"),
        ("a wildcard", "https://*.a.b"),
        ("a space", "https://a b"),
        ("a line", "https://a.b\n"),
        ("no address", "http://[::g]"),
        ("a word of Python's", "None"),
        ("nothing", ""),
    ],
)
def test_what_is_no_origin_is_refused(fault: str, value: str, capsys: Capture) -> None:
    """In Python, and on the command line, however it is written there."""
    with pytest.raises(ConfigError) as caught:
        ServerConfig(cors_origins=(value,))
    assert str(caught.value).startswith(f"--cors-origins {value!r}: ")
    assert "write '*', or scheme and host" in str(caught.value) or not value
    serve = build_parser()[1].choices["serve"]
    for args in ([f"--cors-origins={value}"], ["--cors-origins", value]):
        try:
            found = serve.parse_args(args).cors_origins
        except SystemExit:
            assert "--cors-origins" in (said := capsys.readouterr().err) and f"{value!r}" in said
        else:
            assert found == [value.strip()]


HOSTS = ("a.b", "A.b", "chat_1.example.com", "127.0.0.1", "[::1]", "[0:0::1]", "localhost")
PORTS = ("", ":80", ":443", ":8080", ":08080")


@pytest.mark.parametrize("scheme", ["http", "https", "HTTPS"])
def test_an_origin_is_written_as_browsers_send_it(scheme: str) -> None:
    """They compare it as text, so that another writing would let nobody in. yarl knows theirs."""
    for origin in (f"{scheme}://{host}{port}" for host in HOSTS for port in PORTS):
        sent = str(yarl.URL(origin).origin())
        if origin == sent:
            assert ServerConfig(cors_origins=(origin,)).cors_origins == (origin,)
            continue
        with pytest.raises(ConfigError) as caught:
            ServerConfig(cors_origins=(origin,))
        assert str(caught.value).endswith(f" like {sent}"), origin
    with pytest.raises(ConfigError, match=r"like https://xn--bcher-kva\.de$"):
        ServerConfig(cors_origins=("https://bücher.de",))


@pytest.mark.parametrize("host", ["-x", "a?b", "a b", "a,b", "http://a", "a:80", "", "*.", "*x"])
def test_what_is_no_name_of_a_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--allowed-hosts {host!r}: ")):
        ServerConfig(allowed_hosts=(host,))
