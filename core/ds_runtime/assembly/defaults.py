"""Changes of settings that plugins wish for: `ds_defaults`."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from ds_runtime.config import EngineConfig, with_changes
from ds_runtime.errors import ConfigError, PluginError
from ds_runtime.ops.contract import Change, Facts
from ds_runtime.plugins.manager import Plugins

# Settled before ds_defaults is asked.
DECIDED = frozenset(
    {"model", "platform", "allow_platform_downgrade", "plugins", "plugin_allowlist"}
    | {"tp", "enable_dp_attention", "pin", "plan", "cpu_isa", "lora"}
)
ADDED = frozenset({"disable_fusion"})  # wishes are added to what is given, and to each other


def apply_defaults(
    config: EngineConfig, facts: Facts, explicit: frozenset[str], plugins: Plugins
) -> tuple[EngineConfig, list[tuple[str, str, str, str]]]:
    """Apply the plugins' Changes to fields that the user left alone; conflicts are errors. Fusions
    that they wish apart come behind those that the user named (`_add`).

    A page size that they wish for is settled first: other wishes follow the one in force.
    """
    wishes = _wishes(config, facts, explicit, plugins)
    page = wishes.get("page_size")
    if page is not None and page[0] != config.page_size:
        settled = with_changes(config, {"page_size": page[0]})
        facts, explicit = replace(facts, page_size=page[0]), explicit | {"page_size"}
        wishes = {**_wishes(settled, facts, explicit, plugins), "page_size": page}
    log, values = [], {}
    for name, (value, plugin, because) in sorted(wishes.items()):
        if getattr(config, name) == value:
            continue
        log.append((name, f"{getattr(config, name)!r} → {value!r}", plugin, because))
        values[name] = value
    return with_changes(config, values), log


def _wishes(
    config: EngineConfig, facts: Facts, explicit: frozenset[str], plugins: Plugins
) -> dict[str, tuple[Any, str, str]]:
    """Field → (value, plugin, because) of what the user left alone."""
    known = {f.name for f in fields(config)} - DECIDED
    wishes: dict[str, tuple[Any, str, str]] = {}
    for plugin, changes in plugins.call("ds_defaults", config=config, facts=facts):
        for change in changes or ():
            if not isinstance(change, Change):
                raise PluginError(f"plugin {plugin}: ds_defaults returned {change!r}, no Change")
            if change.field not in known:
                raise PluginError(
                    f"plugin {plugin}: ds_defaults may not change {change.field!r}; it may "
                    f"change {', '.join(sorted(known))}"
                )
            other = wishes.get(change.field)
            if change.field in ADDED:
                _add(wishes, change, plugin, getattr(config, change.field), explicit)
                continue
            if change.field in explicit:
                continue
            if other is not None and other[0] != change.value:
                flag = "--" + change.field.replace("_", "-")
                raise ConfigError(
                    f"plugins {other[1]} and {plugin} want {flag} {other[0]!r} and "
                    f"{change.value!r}: set {flag} yourself"
                )
            wishes.setdefault(change.field, (change.value, plugin, change.because))
    return wishes


def _add(
    wishes: dict[str, tuple[Any, str, str]],
    change: Change,
    plugin: str,
    given: tuple[str, ...],
    explicit: frozenset[str],
) -> None:
    """A wish for a list: behind what is given and wished already. A list that the user gave empty
    stays so, and what it has as "-NAME" is not added."""
    wished = tuple(name for name in change.value if f"-{name}" not in given)
    if (change.field in explicit and not given) or not set(wished) - set(given):
        return
    before, plugins, reasons = wishes.get(change.field, (given, "", ""))
    wishes[change.field] = (
        tuple(dict.fromkeys((*before, *wished))),
        ", ".join(filter(None, dict.fromkeys((plugins, plugin)))),
        "; ".join(filter(None, dict.fromkeys((reasons, change.because)))),
    )
