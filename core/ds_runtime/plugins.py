"""Finds plugins, loads each in isolation, and calls hooks. The only module that uses pluggy.

A plugin that fails to import, to register or in a hook becomes a refusal with its traceback, and
nothing of it stays. Built-in plugins enter through the same door as third parties.
"""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from ds_runtime import hookspecs
from ds_runtime.errors import ConfigError
from ds_runtime.ops.spec import (
    API_VERSION,
    Facts,
    Kernel,
    Layout,
    Offers,
    QuantLoader,
    Refusal,
)
from ds_runtime.platform.spec import Platform

GROUP = "ds_runtime"
OWN_DISTRIBUTION = "ds-runtime"
ALWAYS = {"reference": "ds_runtime.ops.reference"}  # part of every process
ON_REQUEST = {"null": "ds_runtime.testing.null"}  # loaded only when named


@dataclass(frozen=True, slots=True)
class PluginReport:
    """One plugin as found: where it comes from, and why it is not in use if it is not."""

    name: str
    module: str
    distribution: str
    version: str
    third_party: bool
    refusal: Refusal | None = None


@dataclass
class Plugins:
    """The loaded plugins of one process. Built once; never consulted during a step."""

    manager: pluggy.PluginManager
    reports: dict[str, PluginReport] = field(default_factory=dict)
    calls: int = 0

    def call(self, hook: str, **kwargs: Any) -> list[tuple[str, Any]]:
        """(plugin name, result) of all that implement `hook`; one that raises is dropped."""
        results = []
        for name, function, arguments in self._implementations(hook):
            try:
                self.calls += 1
                if os.environ.get("DS_TRACE_PLUGINS"):
                    print(f"plugin call: {name}.{hook}", file=sys.stderr)
                results.append((name, function(*(kwargs[a] for a in arguments))))
            except Exception as e:
                self.drop(name, _broken(f"{hook} raised {type(e).__name__}: {e}"))
        return results

    def drop(self, name: str, refusal: Refusal) -> None:
        """Unregister a plugin and keep the reason."""
        plugin = self.manager.get_plugin(name)
        if plugin is not None:
            self.manager.unregister(plugin)
        report = self.reports[name]
        self.reports[name] = PluginReport(
            report.name,
            report.module,
            report.distribution,
            report.version,
            report.third_party,
            refusal,
        )

    def _implementations(self, hook: str) -> list[tuple[str, Any, Sequence[str]]]:
        caller = getattr(self.manager.hook, hook)
        found = [
            (str(i.plugin_name), i.function, tuple(i.argnames)) for i in caller.get_hookimpls()
        ]
        return sorted(found, key=lambda item: item[0])

    def offers(self, facts: Facts) -> Offers:
        """Everything that all plugins offer for this device and model; a plugin counts whole."""
        collected: dict[str, list[Any]] = {}
        for hook in hookspecs.OFFER_HOOKS:
            for name, offered in self.call(hook, facts=facts):
                collected.setdefault(name, []).extend(offered or ())
        kernels, layouts, loaders = [], [], []
        for name in sorted(collected):
            if self.reports[name].refusal is not None:
                continue  # one of its hooks raised: none of its offers count
            bad = [o for o in collected[name] if not isinstance(o, Kernel | Layout | QuantLoader)]
            if bad:
                self.drop(name, _broken(f"offers {bad[0]!r}, which is no Kernel, Layout or loader"))
                continue
            kernels += [o for o in collected[name] if isinstance(o, Kernel)]
            layouts += [o for o in collected[name] if isinstance(o, Layout)]
            loaders += [o for o in collected[name] if isinstance(o, QuantLoader)]
        third = {
            k.provider
            for n, found in collected.items()
            if self.reports[n].third_party
            for k in found
            if isinstance(k, Kernel)
        }
        return Offers(tuple(kernels), tuple(layouts), tuple(loaders), frozenset(third))

    def platforms(self) -> dict[str, tuple[Platform | None, Refusal | None]]:
        """Every plugin's platform by plugin name, or why it has none here."""
        found: dict[str, tuple[Platform | None, Refusal | None]] = {}
        for name, answer in self.call("ds_platform"):
            if isinstance(answer, Platform) and answer.api_version != API_VERSION:
                said = (
                    f"written for plugin API {answer.api_version}, this runtime has {API_VERSION}"
                )
                found[name] = (None, Refusal("unsupported", said))
            elif isinstance(answer, Platform):
                found[name] = (answer, None)
            elif isinstance(answer, Refusal):
                found[name] = (None, answer)
            elif answer is not None:
                self.drop(name, _broken(f"ds_platform returned {answer!r}"))
        for name, report in self.reports.items():
            if report.refusal is not None:
                found.setdefault(name, (None, report.refusal))
        return found


def load_plugins(names: Iterable[str] | None = None, extra: Iterable[Any] = ()) -> Plugins:
    """Load the installed plugins, or only `names` of them; `extra` are modules to add.

    `names` None reads DS_PLUGINS, else takes all. Raises ConfigError for an unknown name.
    """
    if names is None and os.environ.get("DS_PLUGINS"):
        names = [n.strip() for n in os.environ["DS_PLUGINS"].split(",") if n.strip()]
    found = {ep.name: ep for ep in sorted(entry_points(group=GROUP), key=lambda e: e.name)}
    wanted = None if names is None else list(names)
    _check_names(wanted, {*found, *ON_REQUEST, *ALWAYS})
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    plugins = Plugins(manager)
    for name, module in ALWAYS.items():
        _register(plugins, name, module, None)
    for name, module in ON_REQUEST.items():
        if wanted is not None and name in wanted:
            _register(plugins, name, module, None)
    for name, entry in found.items():
        if wanted is None or name in wanted:
            _register(plugins, name, entry.value, entry)
    for module in extra:
        _register(plugins, module.__name__, module, None, third_party=True)
    return plugins


def _check_names(wanted: list[str] | None, known: set[str]) -> None:
    for name in wanted or ():
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = (
                f"did you mean {near[0]!r}?" if near else f"installed: {', '.join(sorted(known))}"
            )
            raise ConfigError(f"--plugins {name!r}: no such plugin; {hint}")


def _register(
    plugins: Plugins, name: str, module: Any, entry: EntryPoint | None, third_party: bool = False
) -> None:
    """Import, register and validate one plugin; on any failure leave only a refusal."""
    dist = entry.dist if entry is not None else None
    distribution = dist.name if dist is not None else OWN_DISTRIBUTION
    third_party = third_party or distribution != OWN_DISTRIBUTION
    version = dist.version if dist is not None else ""
    plugins.reports[name] = PluginReport(name, str(module), distribution, version, third_party)
    try:
        loaded = import_module(module) if isinstance(module, str) else module
        plugins.manager.register(loaded, name)
        plugins.manager.check_pending()
    except Exception as e:
        plugins.drop(name, _broken(f"{type(e).__name__}: {e}"))


def _broken(reason: str) -> Refusal:
    return Refusal("broken", reason, traceback.format_exc())
