"""The samples of README.md print what stands under them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import serving

PAGE = (Path(__file__).parents[2] / "README.md").read_text()
ADDRESS = "http://127.0.0.1:30000"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("demo", "--context-length", "1024") as server:
        yield server.wait_url()


def samples() -> list[tuple[str, str]]:
    """(code, what stands under it) of every Python sample that has something under it."""
    return re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE, re.DOTALL)


def test_the_samples_print_what_stands_under_them(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(samples()) == 2
    for code, printed in samples():
        exec(compile(code.replace(ADDRESS, url), "README.md", "exec"), {})
        assert capsys.readouterr().out.strip() == printed.strip()


def test_the_command_answers_what_stands_under_it(url: str) -> None:
    command, answer = re.search(r"```\n\$ (curl .*?)\n(\{.*?)```", PAGE, re.DOTALL).groups()
    words = shlex.split(command.replace("\\\n", " ").replace(ADDRESS, url))
    got = json.loads(subprocess.run(words, capture_output=True, check=True, timeout=60).stdout)
    want = json.loads(answer.replace("\n", ""))
    assert got.keys() == want.keys()
    for body in (got, want):
        del body["id"], body["created"]
    assert got == want
