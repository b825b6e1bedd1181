"""What a setting is made of: its default, its help, and the checks that all settings share."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any

from ds_runtime.errors import ConfigError


def setting(default: Any, help: str, **extra: Any) -> Any:
    """A field. group: the heading in the help of this field and of those that follow. also: what
    words of other engines mean as its value. least: the smallest number. choices: all values."""
    return field(default=default, metadata={"help": help, **extra})


_TYPES = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "tuple[str, ...]": tuple,
    "tuple[int, ...]": tuple,
    "None": type(None),
}


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def check_fields(config: Any) -> None:
    """ConfigError for values of another type than the field's, as the offline API passes what it
    is given; for numbers below `least`; and for what is none of `choices`.
    """
    for f in fields(config):
        value, flag = getattr(config, f.name), flag_of(f.name)
        wanted = tuple(_TYPES[part] for part in str(f.type).split(" | "))
        if float in wanted:
            wanted += (int,)
        right = isinstance(value, wanted) and (not isinstance(value, bool) or bool in wanted)
        if isinstance(value, tuple):
            item_type = int if "tuple[int" in str(f.type) else str
            right = right and all(type(item) is item_type for item in value)
        if not right:
            raise ConfigError(f"{flag} {value!r}: must be of type {f.type}")
        least, choices = f.metadata.get("least"), f.metadata.get("choices")
        if least is not None and value is not None and value < least:
            raise ConfigError(f"{flag} {value}: must be at least {least}")
        if choices and value not in choices:
            known = ", ".join(filter(None, choices))
            raise ConfigError(f"{flag} {value!r}: must be one of {known}")


def parse_size(text: str) -> int:
    """Bytes from '512MB', '2GiB', '4g' or a plain number. MB = 10^6, MiB = M = 2^20."""
    units = {"": 1, "b": 1}
    for i, letter in enumerate("kmgt", start=1):
        units[letter] = units[letter + "ib"] = 1024**i
        units[letter + "b"] = 1000**i
    stripped = text.strip().lower()
    number = stripped.rstrip("abcdefghijklmnopqrstuvwxyz")
    try:
        size = int(float(number) * units[stripped[len(number) :].strip()])
        if size < 0:
            raise ValueError("negative")
        return size
    except (KeyError, ValueError, OverflowError) as e:
        raise ConfigError(f"size {text!r}: write a number with KB, MB, GB or KiB, MiB, GiB") from e
