"""Command-line flags made from config fields, and config objects made from flags. Torch-free."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import Field, fields
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ds_runtime.config import EngineConfig, ServerConfig, parse_size
from ds_runtime.errors import ConfigError

C = TypeVar("C", EngineConfig, ServerConfig)


def add_flags(
    parser: argparse.ArgumentParser, config: type[Any], title: str, only: Iterable[str] = ()
) -> None:
    """One flag per field of the dataclass `config` (or `only` some), in a help group.

    Flags carry no default, so that the namespace holds exactly what the user set.
    """
    hints, wanted = get_type_hints(config), frozenset(only)
    group = parser.add_argument_group(title)
    for f in fields(config):
        if wanted and f.name not in wanted:
            continue
        flag, options = "--" + f.name.replace("_", "-"), _options(f, hints[f.name])
        group.add_argument(flag, default=argparse.SUPPRESS, help=_help(f), **options)


def build(config: type[C], namespace: argparse.Namespace) -> tuple[C, frozenset[str]]:
    """(config, names of the fields that the user set). Raises ConfigError for a bad value."""
    given = vars(namespace)
    values = {f.name: _value(given[f.name]) for f in fields(config) if f.name in given}
    return config(**values), frozenset(values)


def _value(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _options(field: Field[Any], hint: Any) -> dict[str, Any]:
    kinds = [a for a in get_args(hint) if a is not NoneType] if get_args(hint) else [hint]
    kind = hint if get_origin(hint) is tuple else kinds[0]
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is tuple:
        if field.metadata.get("repeatable"):
            return {"action": "append", "metavar": "X"}
        return {"action": "extend", "type": _words, "metavar": "A,B"}
    if field.metadata.get("size"):
        return {"type": size, "metavar": "SIZE"}
    if choices := field.metadata.get("choices"):
        return {"choices": choices}
    reads: dict[type, Callable[[str], Any]] = {int: int, float: float, str: str}
    return {"type": reads[kind], "metavar": "N" if kind in (int, float) else "X"}


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def size(text: str) -> int:
    """`parse_size` for argparse, which wants its own exception."""
    try:
        return parse_size(text)
    except ConfigError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


def _help(field: Field[Any]) -> str:
    text = str(field.metadata["help"])
    default = field.default
    if isinstance(default, bool):
        text += f" (default: {'on' if default else 'off'})"
    elif field.metadata.get("size") and isinstance(default, int):
        text += f" (default: {default >> 20}MiB)"
    elif default is not None and default != () and "default" not in text:
        text += f" (default: {default})"
    return text.replace("%", "%%")
