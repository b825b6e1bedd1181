"""Which platform serves: the user's choice, else the best score among those that work here.

Platforms whose score is below 0 are for those who name them."""

from __future__ import annotations

import difflib
import os
from contextlib import suppress

from ds_runtime.errors import ConfigError, PluginError, UnsupportedError
from ds_runtime.ops.contract import Refusal
from ds_runtime.platform.contract import Platform
from ds_runtime.plugins.described_devices import described
from ds_runtime.plugins.manager import Plugins


def select_platform(
    plugins: Plugins, wanted: str = "auto", downgrade: bool = False
) -> tuple[Platform, tuple[tuple[str, Refusal], ...]]:
    """(platform, refusals of the others). `auto` reads DS_PLATFORM first.

    A broken plugin, one whose packages are installed but fail on hardware that is there, stops
    the start (PluginError) unless the user named another platform or allows the `downgrade`.
    """
    source, wanted = asked_for(wanted)
    found = plugins.platforms()
    refusals = tuple((name, r) for name, (_, r) in sorted(found.items()) if r is not None)
    here = [p for _, (p, _) in sorted(found.items()) if p is not None]
    if wanted != "auto":
        return _named(source, wanted, here, refusals, plugins), refusals
    for name, refusal in refusals:
        if refusal.kind == "broken" and not downgrade:
            names = ", ".join(p.name for p in here) or "none works here"
            raise stopped(name, refusal, f" ({names})")
    able = [p for p in here if p.score >= 0]
    if not able:
        named = [f"{p.name}: only where it is named: pass --platform {p.name}" for p in here]
        said = [*named, *(f"{name}: {r}" for name, r in refusals), *_restriction(plugins)]
        raise UnsupportedError(f"no platform works here: {'; '.join(said)}")
    return max(able, key=lambda p: (p.score, p.name)), refusals


def stopped(name: str, refusal: Refusal, known: str = "") -> PluginError:
    """Why nothing starts where a plugin is broken. `known`: the platforms that work."""
    return PluginError(
        f"plugin {name} is {refusal}; mend it, or name a platform with --platform{known}, or take "
        "the best that works with --allow-platform-downgrade; ds-runtime doctor says more"
    )


def asked_for(wanted: str) -> tuple[str, str]:
    """(the setting, the platform that it names): `auto` reads DS_PLATFORM."""
    named = os.environ.get("DS_PLATFORM") if wanted == "auto" else None
    return ("DS_PLATFORM", named) if named else ("--platform", wanted)


def _restriction(plugins: Plugins) -> list[str]:
    """What to say where only some plugins were loaded."""
    if not plugins.restricted:
        return []
    loaded = ", ".join(sorted(plugins.reports))
    return [f"{plugins.restricted} loads only {loaded}: add the plugin that brings a platform"]


def _named(
    source: str,
    wanted: str,
    here: list[Platform],
    refusals: tuple[tuple[str, Refusal], ...],
    plugins: Plugins,
) -> Platform:
    for platform in here:
        if platform.name == wanted:
            return platform
    for name, refusal in refusals:
        if name == wanted:
            raise UnsupportedError(f"{source} {wanted}: {refusal}")
    names = sorted({p.name for p in here} | {n for n, _ in refusals})
    near = difflib.get_close_matches(wanted, names, n=1)
    known = [f"known: {', '.join(names)}"] if names else []
    hints = [f"did you mean {near[0]!r}?"] if near else [*known, *_restriction(plugins)]
    with suppress(PluginError):  # of a plugin that nobody has named
        if any(name == wanted for name, _ in described(plugins)):
            hints = [f"it is a device: ds-runtime plan --device {wanted}", *known]
    raise ConfigError(f"{source} {wanted!r}: no such platform; {'; '.join(hints)}")
