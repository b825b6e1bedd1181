"""What the kit is to look at, by name. Torch-free."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from ds_runtime.errors import ConfigError, UnsupportedError
from ds_runtime.ops.table import OPS
from ds_runtime.plugins.manager import Plugins


def plugins_of(plugins: Plugins, names: Collection[str]) -> list[str]:
    """The plugins to look at: those named, else every one that works.

    Raises ConfigError for a name that is none, UnsupportedError for a plugin that failed.
    """
    for name in names:
        report = plugins.reports.get(name)
        if report is None:
            raise ConfigError(
                f"conform {name}: no such plugin; installed: {', '.join(plugins.reports)}"
            )
        if report.refusal is not None:
            raise UnsupportedError(f"conform {name}: the plugin is {report.refusal}")
    return list(names) or [n for n, r in plugins.reports.items() if r.refusal is None]


def check_names(flag: str, given: Collection[str], known: Collection[str] = tuple(OPS)) -> None:
    """Raise ConfigError for a name that is not known, by default as an op."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{flag} {name!r}: no such name; {hint}")
