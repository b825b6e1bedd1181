"""Commands of the pages are commands; those of the tutorials run, page by page."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from ds_runtime.cli import build_parser

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted(ROOT.glob("docs/tutorials/*.md"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ADDRESS = "http://127.0.0.1:30000"


def lines(page: Path, language: str | None = None) -> list[str]:
    """The lines of the page's blocks, of one language or of all; a backslash joins two."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [
        line.strip()
        for kind, text in found
        if language is None or kind == language
        for line in text.replace("\\\n", " ").splitlines()
    ]


def own(page: Path) -> Iterator[list[str]]:
    """The arguments of every `ds-runtime` command of a page."""
    for line in lines(page):
        if line.removeprefix("$ ").startswith("ds-runtime ") and "…" not in line:
            words = shlex.split(line.removeprefix("$ "), comments=True)
            ends = [i for i, w in enumerate(words) if w in ("|", ">", ">>", "&", "&&", ";")]
            yield words[1 : ends[0] if ends else None]


COMMANDS = [(page, words) for page in PAGES for words in own(page)]


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=[f"{p.stem}-{' '.join(w)}"[:60] for p, w in COMMANDS]
)
def test_a_command_of_a_page_is_a_command(page: Path, words: list[str]) -> None:
    parser, verbs = build_parser()
    assert words[0] in verbs.choices or words[0].startswith("-"), page.name
    if words[-1] not in ("--help", "--help-all", "--version"):
        parser.parse_args(words)


UNQUOTED = re.compile(r"pip install [^\"'`\n]*\[")  # zsh takes brackets for a pattern
SAYING = [
    *PAGES,
    *ROOT.glob("k*/**/*.tmpl"),
    *ROOT.glob("k*/**/.github/**/*.tmpl"),
    *(p for root in ("core", "kit", "plugins") for p in ROOT.glob(f"{root}/**/*.py")),
]


def test_extras_are_quoted_wherever_pip_is_named() -> None:
    texts = {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in SAYING}
    assert sum("pip install" in text for text in texts.values()) > 20
    assert [name for name, text in texts.items() if UNQUOTED.search(text)] == []


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("pip install -e .[test]", True),
        ("pip install ds-runtime[cpu]", True),
        ('pip install -e ".[test]"', False),
        ("pip install 'a[b]' && x", False),
        ("`pip install ./a` and [link](x)", False),
        ("pip install a\n[x]", False),
    ],
)
def test_an_unquoted_extra_is_found(line: str, wrong: bool) -> None:
    assert bool(UNQUOTED.search(line)) == wrong


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


class Reader:
    """A shell of a reader: commands run in a folder, `serve` in the background until the end.

    pip installs into a folder of its own, without the network.
    """

    def __init__(self, folder: Path) -> None:
        self.port, self.server = free_port(), None
        (folder / "bin").mkdir()
        packages = folder / "packages"
        pip = f'#!/bin/sh\nexec {sys.executable} -m pip "$@" -q --no-deps --no-build-isolation'
        (folder / "bin" / "pip").write_text(f"{pip} --target {packages}\n")
        (folder / "bin" / "pip").chmod(0o755)
        (folder / "examples").symlink_to(ROOT / "examples")
        path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        home = {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
        self.env = {**os.environ, **home, "PATH": path, "PYTHONPATH": str(packages)}
        self.folder = folder

    def run(self, line: str) -> str:
        """What a command printed; fails the test if it fails."""
        line = line.replace(ADDRESS, f"http://127.0.0.1:{self.port}")
        if line.startswith("ds-runtime serve"):
            self.start(line)
            return ""
        done = subprocess.run(
            ["bash", "-euc", line],
            env=self.env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, line: str) -> None:
        log = self.folder / "serve.log"
        with log.open("w") as out:
            self.server = subprocess.Popen(
                [*shlex.split(line), "--port", str(self.port)],
                env=self.env,
                cwd=self.folder,
                stdout=out,
                stderr=out,
            )
        for _ in range(600):
            assert self.server.poll() is None, log.read_text()
            with contextlib.suppress(OSError):  # refused, or 503 while the model is loaded
                if urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).status == 200:
                    return
            time.sleep(0.1)
        raise AssertionError(f"{line}: not ready after 60 s: {log.read_text()}")

    def close(self) -> None:
        if self.server is not None:
            self.server.send_signal(signal.SIGINT)
            assert self.server.wait(timeout=30) in (0, 130)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path)
    yield made
    made.close()


SAYS = {  # what the output of a page's commands has, in this order
    "serve": ["cpu", '"42"', '"id"', "ds_runtime_", "cpu.mla_decode", "triton.mla_decode"],
    "agents": ["call: get_weather", "answer:", "'sum': 42"],
    "vendor-plugin": ["acme", "acme.silu_mul", "chosen", "receipt written", "</think>42"],
    "loader-plugin": ["acme", "receipt written"],
}


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda p: p.stem)
def test_a_tutorial_runs(page: Path, reader: Reader) -> None:
    commands = [line for line in lines(page, "console") if line]
    assert len(commands) >= 3, "a tutorial's commands are in blocks called console"
    said = "".join(reader.run(line) for line in commands)
    wanted = ".*".join(map(re.escape, SAYS[page.stem]))
    assert re.search(wanted, said, re.DOTALL), f"no {wanted} in:\n{said}"
