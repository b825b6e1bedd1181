"""What a fault is: one wrong line that the tests must catch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One wrong line: with `replace` for `find`, which is in `file` once, one of `tests` turns red.

    A run ends with the first that is red, and pytest runs them in the order of their files: a whole
    file is named only where no single test of it is known.
    """

    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
