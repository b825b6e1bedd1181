"""Fields of a JSON file, each of a type. Raises ValueError naming the field. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_SHOWN = 40  # characters of a value that a message shows


def wrong(name: str, value: Any, wanted: str) -> ValueError:
    """What to raise for a field."""
    shown = json.dumps(value)
    cut = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "…"
    return ValueError(f"field {name} is {cut}: must be {wanted}")


def mapping(name: str, value: Any) -> Mapping[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise wrong(name, value, "an object")
    return value


def exactly(
    name: str, raw: Mapping[str, Any], fields: Iterable[str], optional: Iterable[str] = ()
) -> None:
    """That an object has these fields, of which some are optional, and no other; name: "" for the
    whole file."""
    wanted, inside = set(fields), f" in {name}" if name else ""
    if missing := sorted(wanted - set(raw) - set(optional)):
        raise ValueError(f"no field {missing[0]}{inside}")
    if more := sorted(set(raw) - wanted):
        raise ValueError(f"unknown field {more[0]!r}{inside}")


def items(name: str, value: Any, length: int | None = None) -> Sequence[Any]:
    """A list that is not empty, of `length` values if it is given."""
    if not isinstance(value, list) or not value or length not in (None, len(value)):
        raise wrong(name, value, f"a list of {length} values" if length else "a list of values")
    return value


def text(name: str, value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise wrong(name, value, "text")
    return value


def number(name: str, value: Any, zero: bool = False) -> float:
    """A finite number above 0, or also 0; as it was given, int or float."""
    fine = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        fine = fine and math.isfinite(float(value)) and (value > 0 or (zero and value == 0))
    except OverflowError:
        fine = False
    if not fine:
        least = "at least 0" if zero else "above 0"
        raise wrong(name, value, f"a number {least} and finite")
    found: float = value
    return found


def whole(name: str, value: Any, least: int, most: int) -> int:
    """An int between two."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise wrong(name, value, f"a whole number from {least} to {most}")
    return value
