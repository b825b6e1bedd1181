"""What a setting is made of: its default, its help, and the checks that all settings share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any

from ds_runtime.errors import ConfigError

_MOST = 2**31 - 1  # of a whole number: kernels count rows and tokens in 32 bits
_MOST_BYTES = 2**63 - 1  # of a size: allocators count in 64 bits


def setting(default: Any, help: str, **extra: Any) -> Any:
    """A field. group: the heading in the help of this field and of those that follow. also: what
    words of other engines mean as its value. least, most: the smallest and the largest number.
    Without `most` a whole one is at most 2^31 - 1, and a size in bytes 2^63 - 1. above: what a
    number must be above. off: of sizes to capture, the flag for none. choices: all values. empty: a
    text may be empty."""
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
    is given. Also for numbers that are not finite, or not within `least`, `above` and `most`, for
    what is none of `choices`, and for empty texts. A script's variable that is not set must not
    turn a check off.
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
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{flag} {value}: must be a finite number")
        if value is not None:
            _check_range(flag, value, f.metadata)
        choices = f.metadata.get("choices")
        if choices and value not in choices:
            known = ", ".join(filter(None, choices))
            raise ConfigError(f"{flag} {value!r}: must be one of {known}")
        if (value == "" or value == ("",)) and not f.metadata.get("empty"):
            raise ConfigError(f"{flag} '': is empty: give a value, or leave the flag out")


def _check_range(flag: str, value: Any, meta: Mapping[str, Any]) -> None:
    """Of a number, or of several, of which there is one."""
    least, most = meta.get("least", -math.inf), meta.get("most", math.inf)
    given = repr(value).removesuffix(".0")
    limit = _MOST_BYTES if meta.get("size") else _MOST
    numbers = [one for one in (value if isinstance(value, tuple) else (value,)) if type(one) is int]
    if "most" not in meta and any(one > limit for one in numbers):
        raise ConfigError(f"{flag} {','.join(map(str, numbers))}: must be at most {limit}")
    if isinstance(value, tuple):
        if "least" in meta and not all(least <= one for one in value or (-math.inf,)):
            several = ",".join(map(str, value))
            raise ConfigError(
                f"{flag} {several}: must be numbers of at least {least}; {flag_of(meta['off'])} "
                "captures nothing"
            )
    elif "above" in meta and not meta["above"] < value <= most:
        wanted = f"above {meta['above']}" + (f" and at most {most}" if "most" in meta else "")
        raise ConfigError(f"{flag} {given}: must be {wanted}")
    elif ("least" in meta or "most" in meta) and not least <= value <= most:
        wanted = f"from {least} to {most}" if "most" in meta else f"at least {least}"
        raise ConfigError(f"{flag} {given}: must be {wanted}")


def parse_size(text: str) -> int:
    """Bytes from '512MB', '2GiB', '4g' or a plain number. MB = 10^6, MiB = Mi = M = 2^20."""
    units = {"": 1, "b": 1}
    for i, letter in enumerate("kmgt", start=1):
        units[letter] = units[letter + "i"] = units[letter + "ib"] = 1024**i
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
