"""Finds plugins, loads each in isolation, and calls hooks. The only module that uses pluggy.

A plugin that fails to import, to register or in a hook becomes a refusal with its traceback, and
nothing of it stays. Built-in plugins enter through the same door as third parties.
"""

from __future__ import annotations

import difflib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from types import MappingProxyType
from typing import Any

import pluggy

from ds_runtime._version import __version__
from ds_runtime.errors import ConfigError, blaming
from ds_runtime.ops.contract import (
    API_VERSION,
    Encoding,
    Facts,
    Kernel,
    Offers,
    QuantLoader,
    Refusal,
)
from ds_runtime.ops.kernel import Compiles, Layout
from ds_runtime.ops.table import OPS
from ds_runtime.platform.contract import Platform
from ds_runtime.plugins import hooks, hookspecs
from ds_runtime.plugins.asking import Misuse, ask, asking, check_outside
from ds_runtime.plugins.installed import GROUP, OWN_DISTRIBUTION, InstalledPlugin, find
from ds_runtime.plugins.lazy import absent
from ds_runtime.plugins.trust.allowlist import Allowlist, read_allowlist

ALWAYS = {  # part of every process
    "reference": "ds_runtime.ops.reference",
    "checkpoints": "ds_runtime.weights.loaders",
    "compiled": "ds_runtime.ops.compiled",
}
ON_REQUEST = {"null": "ds_runtime_kit.devices.null"}  # loaded only when named
TOOLS = {  # bring commands of this distribution
    "bench": "ds_runtime_bench",
    "convert": "ds_runtime_convert",
    "kit": "ds_runtime_kit",
}


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
    restricted: str = ""  # the setting that loaded only some of the installed, as written
    unknown: tuple[str, ...] = ()  # sentences on names that were asked for and are not installed
    owners: dict[str, str] = field(default_factory=dict)  # provider → plugin, of the last offers

    def call(self, hook: str, only: str | None = None, **kwargs: Any) -> list[tuple[str, Any]]:
        """(plugin name, result) of all that implement `hook`; one that raises is dropped.

        `only` asks one plugin alone. Pure hooks are called once per process (`asking`).
        """
        results = []
        for name, function, arguments in self._implementations(hook):
            if only is not None and name != only:
                continue
            self.calls += 1
            try:
                results.append((name, ask(name, hook, function, [kwargs[a] for a in arguments])))
            except Misuse as e:
                self.drop(name, _broken(str(e)))
            except BaseException as e:
                _unless_interrupted(e, f"in {hook} of plugin {name}")
                self.drop(name, _broken(f"{hook} raised {type(e).__name__}: {e}"))
        return results

    def named(self, attribute: str) -> list[Any]:
        """What the modules of the plugins that are not refused have under this name."""
        modules = map(self.manager.get_plugin, self.reports)
        return [getattr(module, attribute) for module in modules if hasattr(module, attribute)]

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

    def implementing(self, hook: str) -> list[str]:
        """Names of the plugins that implement `hook`, sorted."""
        return [name for name, _, _ in self._implementations(hook)]

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
                collected.setdefault(name, []).extend(offered)
        owners: dict[str, str] = {}
        self.owners = owners
        for name in sorted(collected, key=lambda n: (self.reports[n].third_party, n)):
            if self.reports[name].refusal is None and (why := _bad(collected[name], name, owners)):
                self.drop(name, _broken(why))
        kept = [
            (self.reports[name].third_party, offer)
            for name in sorted(collected)
            if self.reports[name].refusal is None  # else one of its hooks failed: nothing counts
            for offer in collected[name]
        ]
        return Offers(
            tuple(o for _, o in kept if isinstance(o, Kernel)),
            tuple(o for _, o in kept if isinstance(o, Layout)),
            tuple(_guarded(o, owners[o.provider]) for _, o in kept if isinstance(o, QuantLoader)),
            frozenset(o.provider for third, o in kept if third and not isinstance(o, Layout)),
        )

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


def load_plugins(
    names: Iterable[str] | None = None,
    extra: Iterable[Any] = (),
    *,
    lenient: bool = False,
    allowlist: str | None = None,
    failed: Mapping[str, Refusal] = MappingProxyType({}),
    installed: Mapping[str, InstalledPlugin] | None = None,
) -> Plugins:
    """Load the installed plugins, or only `names` of them; `extra` are modules to add.

    `names` None reads DS_PLUGINS, else takes all. `allowlist`: a file that lists which third
    parties' distributions may be imported. `failed`: plugins that are not to be imported, because
    they crash (`platform.isolate`). `installed`: what `installed_plugins` has found before. Raises
    ConfigError for an unknown name, unless `lenient`: then `Plugins.unknown` says so, for commands
    that report on plugins. PluginError where a plugin calls this while it is asked.
    """
    check_outside()
    wanted, source = _wanted(names)
    found = installed_plugins() if installed is None else installed
    allowed = _allowed(allowlist, found)
    plugins = Plugins(_manager())
    if wanted is not None:
        plugins.restricted = f"{source} {','.join(wanted) or repr('')}"
        plugins.unknown = tuple(_unknown(source, wanted, {*found, *ON_REQUEST, *ALWAYS}))
        if plugins.unknown and not lenient:
            raise ConfigError(plugins.unknown[0])
    for name, module in ALWAYS.items():
        _register(plugins, name, module, None)
    for name, module in ON_REQUEST.items():
        if wanted is not None and name in wanted:
            _register(plugins, name, module, None)
    for name, entry in found.items():
        if wanted is None or name in wanted:
            refusal = failed.get(name) or _forbidden(entry, allowed)
            _register(plugins, name, entry.point.value, entry, refusal=refusal)
    for module in extra:
        _register(plugins, module.__name__, module, None, third_party=True)
    return plugins


def load_tools() -> Plugins:
    """Those whose commands are always there, whatever the user restricts plugins to."""
    tools = Plugins(_manager())
    for name, module in TOOLS.items():
        _register(tools, name, module, None)
    return tools


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    return manager


def _wanted(names: Iterable[str] | None) -> tuple[list[str] | None, str]:
    """(the plugins that the user restricts to, the setting that says so)."""
    if names is None and (text := os.environ.get("DS_PLUGINS")):
        return [n.strip() for n in text.split(",") if n.strip()], "DS_PLUGINS"
    return None if names is None else list(names), "--plugins"


def importable(
    installed: Mapping[str, InstalledPlugin],
    names: Iterable[str] | None = None,
    allowlist: str | None = None,
) -> dict[str, str]:
    """The modules that `load_plugins` would import, by the names of the plugins."""
    wanted, allowed = _wanted(names)[0], _allowed(allowlist, installed)
    return {
        name: entry.point.module
        for name, entry in installed.items()
        if (wanted is None or name in wanted) and _forbidden(entry, allowed) is None
    }


def installed_plugins() -> dict[str, InstalledPlugin]:
    """What is installed, under the names that plugins get here."""
    return find({*ALWAYS, *ON_REQUEST})


def _allowed(allowlist: str | None, installed: Mapping[str, InstalledPlugin]) -> Allowlist | None:
    if allowlist is None:
        return None
    third = (e.distribution for e in installed.values() if e.third_party)
    return read_allowlist(allowlist, third)


def _forbidden(entry: InstalledPlugin, allowed: Allowlist | None) -> Refusal | None:
    """Why an installed plugin may not be imported."""
    if entry.refusal is not None or allowed is None or not entry.third_party:
        return entry.refusal
    return allowed.refusal(entry.point)


def _unknown(source: str, wanted: Iterable[str], known: set[str]) -> Iterator[str]:
    """A sentence per wanted name that is not known."""
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = (
                f"did you mean {near[0]!r}?" if near else f"installed: {', '.join(sorted(known))}"
            )
            yield f"{source} {name!r}: no such plugin; {hint}"


def _wrong_argument(module: Any) -> str:
    """Which hook asks for an argument that it does not get, or ""."""
    for hook in hookspecs.HOOKS:
        function: Any = getattr(module, hook, None)
        if getattr(function, f"{GROUP}_impl", None) is None:
            continue  # not marked as a hook
        given = list(inspect.signature(getattr(hookspecs, hook)).parameters)
        for name, asked in inspect.signature(function).parameters.items():
            if name not in given and asked.default is asked.empty:
                said = f"it may take {', '.join(given)}" if given else "it takes none"
                return f"{hook} asks for the argument {name!r}; {said}"
    return ""


def _register(
    plugins: Plugins,
    name: str,
    module: Any,
    entry: InstalledPlugin | None,
    third_party: bool = False,
    refusal: Refusal | None = None,
) -> None:
    """Import, register and validate one plugin; on any failure leave only a refusal.

    refusal: why it is not even imported.
    """
    path = module if isinstance(module, str) else str(module.__name__)
    if name in plugins.reports:
        raise ConfigError(f"plugin {name!r} is given twice, as {plugins.reports[name].module}")
    if entry is not None:
        distribution, version, third_party = entry.distribution, entry.version, entry.third_party
    else:
        distribution, version = ("", "") if third_party else (OWN_DISTRIBUTION, __version__)
    plugins.reports[name] = PluginReport(name, path, distribution, version, third_party, refusal)
    if refusal is not None:
        return
    try:
        with asking(name, "import"):
            loaded = hooks.of(import_module(module) if isinstance(module, str) else module)
        if wrong := _wrong_argument(loaded):
            raise TypeError(wrong)
        plugins.manager.register(loaded, name)
        plugins.manager.check_pending()
    except Misuse as e:
        plugins.drop(name, _broken(str(e)))
    except BaseException as e:
        _unless_interrupted(e, f"in the import of plugin {name}")
        plugins.drop(name, _broken(f"{type(e).__name__}: {e}"))


def _unless_interrupted(error: BaseException, where: str) -> None:
    """A plugin that raises anything is broken, one that leaves, too. An interrupt is the user's."""
    if isinstance(error, KeyboardInterrupt):
        error.add_note(where)
        raise error


def _guarded(loader: QuantLoader, plugin: str) -> QuantLoader:
    """The same; what it raises names it."""

    def guard(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        further = f"ds-runtime plugins --verbose says where plugin {plugin} comes from"

        blamed = blaming(f"loader {loader.name} of plugin {plugin}, {what},", further)

        def asked(*args: Any) -> Any:
            with blamed:
                return function(*args)

        return asked

    def encodings(quantization: Mapping[str, Any]) -> Callable[[str], Encoding]:
        return guard("asked for an encoding", parse(quantization))

    parse = guard("asked for encodings", loader.encodings)
    return replace(
        loader,
        accepts=guard("asked whether it accepts a checkpoint", loader.accepts),
        encodings=encodings,
        refuse=None if loader.refuse is None else guard("asked what it refuses", loader.refuse),
    )


def _broken(reason: str) -> Refusal:
    raised = sys.exc_info()[0] is not None
    return Refusal("broken", reason, traceback.format_exc() if raised else "")


def _bad(offers: Sequence[Any], plugin: str, owners: dict[str, str]) -> str:
    """Why a plugin's offers cannot be used, or ""; claims its provider names in `owners`."""
    names, there = set(), set[str]()
    for offer in offers:
        if not isinstance(offer, Kernel | Layout | QuantLoader):
            return f"offers {offer!r}, which is no Kernel, Layout or QuantLoader"
        if isinstance(offer, Layout):
            continue
        owner = owners.setdefault(offer.provider, plugin)
        if owner != plugin:
            return f"provider name {offer.provider!r} belongs to plugin {owner}"
        if isinstance(offer, Kernel):
            if offer.op.name not in OPS:
                return f"offers {offer.name} for op {offer.op.name!r}, which does not exist"
            if (offer.op.name, offer.name) in names:
                return f"offers two kernels named {offer.name} for {offer.op.name}"
            names.add((offer.op.name, offer.name))
            if why := _absent(offer, there):
                return why
    return ""


def _absent(kernel: Kernel, there: set[str]) -> str:
    """Which function that compiles a kernel's calls is not there, or ""; `there`: those that are,
    to which it adds."""
    for each in fields(Compiles):
        path = getattr(kernel.compiles, each.name)
        if path and path not in there:
            if why := absent(path):
                return f"offers {kernel.name} with compiles.{each.name} {path!r}: {why}"
            there.add(path)
    return ""
