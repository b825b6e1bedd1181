"""Changes of settings that plugins wish for: `ds_defaults`."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from ds_runtime.config import EngineConfig, with_changes
from ds_runtime.config.fields import flag_of
from ds_runtime.errors import ConfigError, PluginError
from ds_runtime.ops.contract import Change, Facts
from ds_runtime.plugins.manager import Plugins

# Settled before ds_defaults is asked.
DECIDED = frozenset(
    {"model", "platform", "allow_platform_downgrade", "plugins", "plugin_allowlist"}
    | {
        "tp",
        "dp",
        "nnodes",
        "node_rank",
        "dist_init_addr",
        "dist_token_file",
        "enable_dp_attention",
        "pin",
        "plan",
        "cpu_isa",
        "lora",
    }
)
# Of a field, or of one fusion of `fusion`: what is wished, by which plugin, and why.
Wishes = dict[tuple[str, str], tuple[Any, str, str]]


def apply_defaults(
    config: EngineConfig, facts: Facts, explicit: frozenset[str], plugins: Plugins
) -> tuple[EngineConfig, list[tuple[str, str, str, str]]]:
    """Apply the plugins' Changes to fields that the user left alone, and to fusions that the user
    did not name; conflicts are errors.

    A page size that they wish for is settled first: other wishes follow the one in force.
    """
    wishes, size = _wishes(config, facts, explicit, plugins), ("page_size", "")
    page = wishes.get(size)
    if page is not None and page[0] != config.page_size:
        settled = with_changes(config, {"page_size": page[0]})
        facts, explicit = replace(facts, page_size=page[0]), explicit | {"page_size"}
        wishes = {**_wishes(settled, facts, explicit, plugins), size: page}
    fusions = {name: wishes.pop((field, name)) for field, name in [*wishes] if name}
    if fusions:
        states, said, reasons = zip(*fusions.values(), strict=True)
        value = *config.fusion, *map("=".join, zip(fusions, states, strict=True))
        by, because = ", ".join(dict.fromkeys(said)), "; ".join(dict.fromkeys(reasons))
        wishes["fusion", ""] = value, by, because
    log, values = [], {}
    for (name, _), (value, plugin, because) in sorted(wishes.items()):
        if getattr(config, name) == value:
            continue
        log.append((name, f"{getattr(config, name)!r} → {value!r}", plugin, because))
        values[name] = value
    return with_changes(config, values), log


def _wishes(
    config: EngineConfig, facts: Facts, explicit: frozenset[str], plugins: Plugins
) -> Wishes:
    """What the user left alone."""
    known = {f.name for f in fields(config)} - DECIDED
    settled = {*((name, "") for name in explicit), *(("fusion", name) for name in config.fusions)}
    wishes: Wishes = {}
    for plugin, changes in plugins.call("ds_defaults", config=config, facts=facts):
        for change in changes or ():
            if not isinstance(change, Change):
                raise PluginError(f"plugin {plugin}: ds_defaults returned {change!r}, no Change")
            if change.field not in known:
                raise PluginError(
                    f"plugin {plugin}: ds_defaults may not change {change.field!r}; it may "
                    f"change {', '.join(sorted(known))}"
                )
            for key, value in _parts(change).items():
                if key in settled:
                    continue
                other, by, _ = wishes.setdefault(key, (value, plugin, change.because))
                if other != value:
                    flag = f"{flag_of(key[0])} {key[1]}".rstrip()
                    raise ConfigError(
                        f"plugins {by} and {plugin} want {flag} {other!r} and {value!r}: set "
                        f"{flag} yourself"
                    )
    return wishes


def _parts(change: Change) -> dict[tuple[str, str], Any]:
    if change.field != "fusion":
        return {(change.field, ""): change.value}
    return {("fusion", name): state for name, _, state in (v.partition("=") for v in change.value)}
