"""Command-line flags made from config fields, and config objects made from flags. Torch-free."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, fields
from functools import cache
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from ds_runtime.cli.config_file import FromFile, given
from ds_runtime.config import EngineConfig, ServerConfig, parse_size
from ds_runtime.config.fields import flag_of
from ds_runtime.errors import ConfigError

C = TypeVar("C", EngineConfig, ServerConfig)


@cache
def _types(config: Any) -> dict[str, Any]:
    """Of a dataclass' fields. Each command of a parser has flags of the same few classes."""
    return get_type_hints(config)


def add_flags(
    parser: argparse.ArgumentParser,
    config: type[Any],
    only: Iterable[str] = (),
    spaces: bool = False,
    hidden: bool = False,
) -> None:
    """One flag per field of the dataclass `config` (or `only` some), in the fields' help groups.

    Flags carry no default, so that the namespace holds exactly what the user set. spaces: lists
    take spaces besides commas, where no argument without a flag may follow. hidden: help leaves
    them out.
    """
    hints, wanted = _types(cast(Any, config)), frozenset(only)
    group: Any = parser
    title = ""
    for f in fields(config):
        title = f.metadata.get("group", title)
        if wanted and f.name not in wanted:
            continue
        if group is parser or group.title != title:
            group = parser.add_argument_group(title)
        flag, options = flag_of(f.name), _options(f, hints[f.name])
        if spaces and options.get("action") is _Extend:
            options["nargs"] = "+"
        said = argparse.SUPPRESS if hidden else _help(f)
        made = group.add_argument(flag, default=argparse.SUPPRESS, help=said, **options)
        made.setting = True  # `cli/help.py` shows the common ones


def build(config: type[C], namespace: argparse.Namespace) -> tuple[C, frozenset[str]]:
    """(config, names of the fields that the user set). Raises ConfigError for a bad value.

    What `--config FILE` says counts where the command line says nothing.
    """
    said: FromFile | None = getattr(namespace, "config", None)
    every = given(namespace)
    values = {f.name: _value(every[f.name]) for f in fields(config) if f.name in every}
    try:
        return config(**values), frozenset(values)
    except ConfigError as e:
        raise said.place(e, namespace) if said else e from None


def _value(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _options(field: Field[Any], hint: Any) -> dict[str, Any]:
    also: Mapping[str, Any] = field.metadata.get("also", {})
    kinds = [a for a in get_args(hint) if a is not NoneType] if get_args(hint) else [hint]
    kind = hint if get_origin(hint) is tuple else kinds[0]
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is tuple:
        if field.metadata.get("repeatable"):
            return {"action": "append", "metavar": "X"}
        if int in get_args(kind):
            return {"action": _Extend, "type": _numbers, "metavar": "N,N"}
        return {"action": _Extend, "type": _words, "metavar": "A,B"}
    if field.metadata.get("size"):
        return {"type": size, "metavar": "SIZE"}
    if choices := field.metadata.get("choices"):
        known = {"choices": [c for c in choices if c is not None]}
        return {**known, "type": _also(str, also)} if also else known
    reads: dict[type, Callable[[str], Any]] = {int: int, float: float, str: str}
    return {"type": _also(reads[kind], also), "metavar": "N" if kind in (int, float) else "X"}


def _also(read: Callable[[str], Any], also: Mapping[str, Any]) -> Callable[[str], Any]:
    """A reader that knows other engines' words for some values, too."""
    if not also:
        return read

    def known(text: str) -> Any:
        return also[text] if text in also else read(text)

    known.__name__ = getattr(read, "__name__", "value")  # argparse names it
    return known


class _Extend(argparse._ExtendAction):
    """What `type` makes of every word is a list."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        items = list(values or ())
        if self.nargs is not None:
            items = [item for some in items for item in some]
        super().__call__(parser, namespace, items, option_string)


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:  # such as a script's variable that is not set: `--allowed-hosts` would allow all
        raise argparse.ArgumentTypeError(f"{text!r}: is empty: give a value, or leave the flag out")
    return words


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r}: must be whole numbers, like 1,2,4") from e


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
