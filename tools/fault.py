"""What a fault is: one wrong line that the tests must catch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One wrong line: `find` is in `file` exactly once, and `tests` turn red with `replace`.

    Of `tests` the one that turns red first stands in front: a run ends there.
    """

    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
