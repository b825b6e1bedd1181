"""Pins: which kernel the user wants where."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ds_runtime.errors import ConfigError
from ds_runtime.ops.contract import Kernel, Site
from ds_runtime.ops.table import OPS


@dataclass(frozen=True, slots=True)
class Pin:
    """`OP[@SITE-GLOB]=KERNEL` from the user: beats ranks, never a refusal. flag: what the user gave
    instead, if it was another one than --pin."""

    op: str
    glob: str
    kernel: str
    flag: str = ""

    def __str__(self) -> str:
        at = "" if self.glob == "*" else f"@{self.glob}"
        return self.flag or f"--pin {self.op}{at}={self.kernel}"

    def names(self, site: Site) -> bool:
        """Whether it is about this site; an earlier one may count instead."""
        return self.op == site.op and fnmatchcase(site.path, self.glob)

    @staticmethod
    def parse(text: str) -> Pin:
        """Raises ConfigError for anything else than OP[@SITE-GLOB]=KERNEL, and for unknown ops."""
        left, equals, kernel = text.partition("=")
        op, at, glob = left.partition("@")
        if not equals or not kernel or not op or (at and not glob):
            raise ConfigError(f"--pin {text!r}: write OP[@SITE-GLOB]=KERNEL")
        if op not in OPS:
            near = difflib.get_close_matches(op, OPS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "`ds-runtime ops` lists them"
            raise ConfigError(f"--pin {text!r}: op {op!r} is unknown; {hint}")
        return Pin(op, glob or "*", kernel)

    @staticmethod
    def parse_all(texts: Iterable[str]) -> list[Pin]:
        """In the order given: of pins whose globs overlap, the first that fits counts. Raises
        ConfigError as `parse`, and for two that name the same sites and different kernels."""
        pins = dict[tuple[str, str], Pin]()
        for text in texts:
            pin = Pin.parse(text)
            first = pins.setdefault((pin.op, pin.glob), pin)
            if first.kernel != pin.kernel:
                raise ConfigError(
                    f"--pin {text!r}: the same sites are pinned to {first.kernel!r} already; "
                    "keep one of the two, or name sites by OP@SITE-GLOB"
                )
        return list(pins.values())


def check_counts(
    pin: Pin, pins: Sequence[Pin], choices: Sequence[tuple[Site, Kernel | None]]
) -> None:
    """ConfigError for a pin that names no site, or only sites where another counts that leads to
    another kernel. Of the pins that one flag stands for, one has to count."""
    alike = [p for p in pins if p is pin or (pin.flag and p.flag == pin.flag)]
    named = [(site, kernel) for site, kernel in choices if any(p.names(site) for p in alike)]
    if not named:
        raise ConfigError(f"{pin}: matches no site{_hidden(pin, choices)}")
    for site, kernel in named:
        first = next(p for p in pins if p.names(site))
        wished = {p.kernel for p in alike}
        if first in alike or (kernel and wished & {kernel.name, kernel.provider}):
            return
    site, first = named[0][0], next(p for p in pins if p.names(named[0][0]))
    remedy = "" if pin.flag else ", or give the one of fewer sites first"
    raise ConfigError(
        f"{pin}: counts nowhere, as {first} comes first at {site.path} and wherever else both "
        f"name a site: leave one of them out{remedy}"
    )


def _hidden(pin: Pin, choices: Sequence[tuple[Site, Kernel | None]]) -> str:
    """What to do about a pin without a site: a fusion may do the op's work there."""
    for site, kernel in choices:
        if kernel is not None and pin.op in _parts(site.op):
            return (
                f": {kernel.name} does its work at {site.path}: give --fusion {site.op}=off "
                "with it, and do not pin that op"
            )
    if own := next((site for site, _ in choices if site.op == pin.op), None):
        return f": {pin.op} has others, like {own.path}; ds-runtime plan shows all"
    return ": this model has none of that op; leave it out"


def _parts(op: str) -> set[str]:
    """What a fusion is made of, down to what is none."""
    return {name for part in OPS[op].uses for name in (part, *_parts(part))}
