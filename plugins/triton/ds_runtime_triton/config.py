"""Tuned configurations: data in `configs/<arch>/<op>.json`, found by shape and size. Torch-free.

configs/README.md documents the files. What an architecture's folder lacks comes from `generic`.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ds_runtime.api import Facts, PluginError

Config = Mapping[str, int]
GENERIC = "generic"
ORDERED = "ordered"  # a shape's name
_FORM = "configs/README.md of ds_runtime_triton"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Configurations of one shape, by rising upper bound of the size; the last has none."""

    bounds: tuple[int, ...]
    configs: tuple[Config, ...]

    def at(self, size: int) -> Config:
        """The configuration of the smallest bound that is not below `size`."""
        return self.configs[self.number(size)]

    def any_from(self, size: int, name: str) -> bool:
        """Whether the configuration of this size, or of any larger one, says `name`."""
        return any(config.get(name) for config in self.configs[self.number(size) :])

    def number(self, size: int) -> int:
        """Which one that is."""
        return min(bisect_left(self.bounds, size), len(self.configs) - 1)


@cache
def _file(arch: str, op: str) -> dict[str, Any]:
    path = files("ds_runtime_triton") / "configs" / arch / f"{op}.json"
    if not path.is_file():
        return {}
    try:
        shapes: dict[str, Any] = json.loads(path.read_text())["shapes"]
        for shape, sizes in shapes.items():
            if not sizes:
                raise ValueError(f"{shape}: no configuration")
            for bound, config in sizes.items():
                if not bound.isdigit() or not all(type(v) is int for v in config.values()):
                    raise ValueError(f"{shape}, {bound}: whole numbers are needed")
    except (ValueError, KeyError, AttributeError, TypeError) as e:
        said = f"no {e}" if isinstance(e, KeyError) else e
        raise PluginError(f"{path}: is no file of configurations: {said}; see {_FORM}") from e
    return shapes


def folder(arch: str, dtype: str) -> str:
    """Where to look: architectures are tuned for elements of two bytes, and tiles of float32 would
    not fit on chip."""
    return GENERIC if dtype == "float32" else arch


@cache
def tuned(arch: str, op: str, shape: str = "*") -> Sizes:
    """Configurations of `op` for this shape: the architecture's own, its "*", the generic ones."""
    for folder, key in ((arch, shape), (arch, "*"), (GENERIC, shape), (GENERIC, "*")):
        found = _file(folder, op).get(key)
        if found is not None:
            ordered = sorted((int(bound), config) for bound, config in found.items())
            return Sizes(tuple(b for b, _ in ordered), tuple(c for _, c in ordered))
    raise LookupError(f"no configuration of {op} for {shape} or *")


@cache
def ordered(arch: str, op: str) -> Sizes:
    """Configurations that sum in one order, whatever the size: the architecture's, or generic ones.
    They differ in what no result shows: tiles of tokens and of rows, warps and stages."""
    found = _file(arch, op).get(ORDERED) or _file(GENERIC, op)[ORDERED]
    made = sorted((int(bound), config) for bound, config in found.items())
    return Sizes(tuple(b for b, _ in made), tuple(c for _, c in made))


def chosen(facts: Facts, op: str, shape: str = "*") -> Sizes:
    """Configurations of `op` at a place: tuned for this shape, or `ordered` where rows must have
    bits of their own."""
    arch = folder(facts.device.arch, facts.dtype)
    return ordered(arch, op) if facts.own_bits else tuned(arch, op, shape)


def part_of(config: Config, prefix: str, prefixes: tuple[str, ...]) -> dict[str, int]:
    """The entries for one of several matmuls: named with its prefix, or with none of them."""
    own = {k.removeprefix(prefix): v for k, v in config.items() if k.startswith(prefix)}
    return {**{k: v for k, v in config.items() if not k.startswith(prefixes)}, **own}
