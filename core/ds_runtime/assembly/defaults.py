"""Settings that follow from plugins' wishes (`ds_defaults`), and from the caches of the model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from typing import Any

from ds_runtime.common.speculation import Speculation
from ds_runtime.config import EngineConfig, with_changes
from ds_runtime.config.fields import flag_of
from ds_runtime.errors import ConfigError, PluginError, UnsupportedError
from ds_runtime.ops.contract import Change, Facts
from ds_runtime.ops.contracts.caches import CacheGroup, page_multiple
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
Log = list[tuple[str, str, str, str]]  # field, change, who, why
# Of a field, or of one fusion of `fusion`: what is wished, by which plugin, and why.
Wishes = dict[tuple[str, str], tuple[Any, str, str]]


def apply_defaults(
    config: EngineConfig, facts: Facts, explicit: frozenset[str], plugins: Plugins
) -> tuple[EngineConfig, Log]:
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
                        f"plugins {by} and {plugin} ask for {flag} {other!r} and {value!r}: set "
                        f"{flag} yourself"
                    )
    return wishes


def _parts(change: Change) -> dict[tuple[str, str], Any]:
    if change.field != "fusion":
        return {(change.field, ""): change.value}
    return {("fusion", name): state for name, _, state in (v.partition("=") for v in change.value)}


def with_whole_pages(
    config: EngineConfig, groups: Sequence[CacheGroup], explicit: Collection[str], changes: Log
) -> EngineConfig:
    """A page holds whole entries of every group: a size that nobody gave is rounded up, which is
    added to `changes`. Raises ConfigError for one that was given."""
    size, of = config.page_size, page_multiple(groups)
    if size % of == 0:
        return config
    fits = -(-size // of) * of
    which = ", ".join(f"{g.name} ({g.multiple})" for g in groups if g.multiple > 1)
    why = f"an entry covers several tokens in {which}"
    if "page_size" in explicit:
        raise ConfigError(f"--page-size {size}: {why}; give a multiple of {of}, e.g. {fits}")
    changes.append(("page_size", f"{size} → {fits}", "core", f"{why}: a multiple of {of}"))
    return with_changes(config, {"page_size": fits})


def check_states(config: EngineConfig, groups: Sequence[CacheGroup]) -> None:
    """Raises ConfigError for snapshots of nothing, UnsupportedError for trees of drafts where
    requests keep more than pages, or an entry covers several tokens. Only a chain can be taken back
    there."""
    states = [group.name for group in groups if group.per_request]
    if config.state_snapshots is not None and not states:
        raise ConfigError(
            f"--state-snapshots {config.state_snapshots}: requests of this model keep only "
            "pages, and no states: leave the flag out"
        )
    shape = Speculation.of(config)
    if shape is None or shape.topk == 1:
        return
    wide = [group.name for group in groups if group.multiple > 1]
    for which, why in (
        (states, "requests keep a state"),
        (wide, "an entry of a cache covers several tokens"),
    ):
        if which:
            raise UnsupportedError(
                f"--speculative-eagle-topk {shape.topk}: {why} ({', '.join(which)}), and a tree of "
                "drafts cannot be taken back there: give 1"
            )
