"""Where the costs of a device are: named, the user's own, or shipped by the plugin that describes
it, in a folder `costs` next to its `devices.json`. Torch-free."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ds_runtime.errors import ConfigError, PluginError
from ds_runtime.measured.costs import Costs
from ds_runtime.plugins.described_devices import folders
from ds_runtime.plugins.manager import Plugins

FOLDER = "costs"


def folder() -> Path:
    """Where `tune costs` writes by default."""
    return Path.home() / ".local" / "state" / "ds-runtime" / FOLDER


def own(device: str) -> Path:
    """The user's own file of a device, by its name."""
    return folder() / (re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json")


def costs_of(plugins: Plugins, device: str, named: str | None = None) -> Costs | None:
    """Those in the file that was named, or of the device of this name; None where there are none.

    Raises ConfigError for a file that is no costs, PluginError for one that a plugin ships.
    """
    if named is not None:
        costs = Costs.read(Path(named))
        if costs.device != device:
            raise ConfigError(
                f"--costs {named}: holds costs of {costs.device}, and this plan is for {device}; "
                "name a file that ds-runtime tune costs wrote on one"
            )
        return costs
    if (path := own(device)).is_file():
        costs = Costs.read(path)
        if costs.device != device:
            raise ConfigError(
                f"costs {path}: are of {costs.device}, not of {device}; remove it, or run "
                "ds-runtime tune costs"
            )
        return costs
    return _shipped(plugins, device)


def _shipped(plugins: Plugins, device: str) -> Costs | None:
    """Of the device's own file alone: what is wrong with files of others is told, and no more."""
    for name, within in folders(plugins):
        place = within / FOLDER
        if not place.is_dir():
            continue
        for file in sorted(place.iterdir(), key=lambda f: f.name):
            if not file.name.endswith(".json"):
                continue
            of = f"plugin {name}: {FOLDER}/{file.name}"
            try:
                text = file.read_text(encoding="utf-8")
                wanted = Costs.device_in(text) == device
            except (OSError, ValueError) as e:
                print(f"ds-runtime: {of}: left out, as its device is unknown: {e}", file=sys.stderr)
                continue
            if wanted:
                try:
                    return Costs.parse(text)
                except ValueError as e:
                    raise PluginError(f"{of}: {e}") from e
    return None
