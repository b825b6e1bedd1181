"""Runs a client's uses, one after the other, and tells which runs: standard library only, for it
runs in the client's environment.

Whoever started this answers each name with a line before the use begins, so that what is sent next
belongs to it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
import traceback
from collections.abc import Callable

URL = sys.argv[1] if len(sys.argv) > 1 else ""
V1 = f"{URL}/v1"
MODEL = "demo"
TOKENIZER = sys.argv[2] if len(sys.argv) > 2 else ""  # a folder
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
_uses: list[Callable] = []


def use(function: Callable) -> Callable:
    """Run this function; an exception is a failure."""
    _uses.append(function)
    return function


def refused(function: Callable, *kinds: type[BaseException]) -> None:
    """Fail unless calling `function` raises one of these."""
    try:
        function()
    except kinds:
        return
    raise AssertionError(f"none of {kinds} was raised")


def command(*words: str, **env: str) -> str:
    """What a module of the client's prints as a command. Its failure is the use's."""
    ran = subprocess.run(
        [sys.executable, "-m", *words],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stdout[-6000:]
    return ran.stdout


def main() -> None:
    """All uses. The exit code is 1 if one failed."""
    failed = 0
    for one in _uses:
        print("use", one.__name__, flush=True)
        input()
        try:
            made = one()
            if inspect.iscoroutine(made):
                asyncio.run(made)
        except BaseException:
            traceback.print_exc()
            print("failed", one.__name__, flush=True)
            failed += 1
    sys.exit(bool(failed))
