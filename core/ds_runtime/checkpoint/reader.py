"""Typed access to the values of a JSON object. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_runtime.errors import ConfigError, shown

_MOST = 2**31 - 1  # of any whole number
_SMALLEST, _LARGEST = 1e-12, 1e12  # of any other number: what is computed from them stays finite


class Reader:
    """Typed access; null counts as absent. Errors name file, key and value.

    `under` is the key of the mapping that is read, for those inside another.
    """

    def __init__(self, raw: Mapping[str, Any], where: str, under: str = "") -> None:
        self.raw = raw
        self.where = where
        self.under = under

    def any(self, key: str) -> Any:
        """Whatever is there; None if nothing is."""
        return self.raw.get(key)

    def wrong(self, key: str, expected: str) -> ConfigError:
        """The error for a value that is not what it should be."""
        name = f"{self.under}.{key}" if self.under else key
        said = shown(self.raw[key])
        return ConfigError(f"{self.where}: {name} is {said}, expected {expected}")

    def missing(self, key: str) -> ConfigError:
        """The error for a value that has no default."""
        name = f"{self.under}.{key}" if self.under else key
        return ConfigError(f"{self.where}: {name} is missing")

    def integer(
        self,
        *keys: str,
        default: int | None = None,
        least: int | None = None,
        most: int = _MOST,
    ) -> int:
        """The first of `keys` that is there; at least 1, or 0 if it has a default."""
        low = (1 if default is None else 0) if least is None else least
        for key in keys:
            value = self.raw.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= most:
                raise self.wrong(key, f"a whole number of at least {low} and at most {most}")
            return value
        if default is None:
            raise self.missing(keys[0])
        return default

    def number(self, key: str, default: float | None = None, above: float = 0.0) -> float:
        """A number greater than `above`."""
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise self.missing(key)
            return default
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not max(above, _SMALLEST) <= value <= _LARGEST or value == above:  # or NaN
            low = f"above {above:g}" if above else f"of at least {_SMALLEST:g}"
            raise self.wrong(key, f"a number {low} and at most {_LARGEST:g}")
        return float(value)

    def text(self, key: str) -> str:
        """A string; empty if absent."""
        value = self.raw.get(key)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """An object; empty if absent."""
        value = self.raw.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.wrong(key, "a JSON object")
        return value

    def strings(self, key: str) -> list[str]:
        """A list of strings; empty if absent."""
        value = self.raw.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self.wrong(key, "a list of strings")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids: one, or a list of them."""
        value = self.raw.get(key)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
            raise self.wrong(key, "a token id or a list of token ids")
        return tuple(values)
