"""Devices that are not here, described by plugins as data: what would be decided on them.

A plugin ships `devices.json` next to its `__init__.py`:

    {"platform": "acme.platform:AcmePlatform",
     "installed": ["acme_lib"],
     "devices": {"x1": {"name": "Acme X1", "arch": "x1", "type": "acme", "memory_gb": 96,
                        "cores": 64, "fast_dtypes": ["bfloat16"], "features": ["fp8"]}}}

`installed` are the features that stand for the software of the plugin's extra; every device gets
them. `"link": "fast", "link_gb_s": 450` says how it reaches others of its host, and how many GB a
second it receives so; `"multicast": true` that a store may reach all. `"unrun": true` says of a
device that nothing has run on one. A plugin that cannot serve its devices yet gives the properties
of a platform that plans look at instead of a class: `"platform": {"name": "acme", "captures":
true}`. Torch-free.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import resources
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Any

from ds_runtime.errors import ConfigError, PluginError, UnsupportedError
from ds_runtime.ops.contract import DeviceInfo, load_attr
from ds_runtime.platform.contract import MemoryInfo, Platform
from ds_runtime.plugins.manager import Plugins

if TYPE_CHECKING:
    import torch

FILE = "devices.json"
_PROPERTIES = (
    "name",
    "family",
    "asynchronous",
    "captures",
    "branches",
    "on_host",
    "own_memory",
    "kv_share",
    "ordered_sums",
    "fast_sums",
)
_DTYPES = frozenset({"bf16", "fp16", "fp8"})  # features that say in what a device computes
_OPTIONAL = {"features", "unrun", "bandwidth_gb_s", "link", "link_gb_s", "multicast"}
_REQUIRED = {"name", "arch", "type", "memory_gb", "cores", "fast_dtypes"}


class DescribedPlatform(Platform):
    """A platform on a device that is only described: it decides, and nothing runs."""

    def __init__(
        self, properties: Mapping[str, Any], info: DeviceInfo, unrun: bool = False
    ) -> None:
        for key, value in properties.items():
            setattr(self, key, value)
        self._info = info
        self._info = self.device_info()
        self.unrun = unrun

    def info(self, rank: int = 0) -> DeviceInfo:
        return self._info

    def properties(self) -> dict[str, Any]:
        """What plans look at."""
        return {key: getattr(self, key) for key in _PROPERTIES}

    def device(self, rank: int = 0) -> torch.device:
        raise UnsupportedError(f"{self._info.name} is described, not here: nothing runs on it")

    def memory(self, rank: int = 0) -> MemoryInfo:
        """As of a device that nobody uses."""
        return MemoryInfo(total=self._info.memory, free=self._info.memory)


def describe(plugins: Plugins, wanted: str, without: Iterable[str] = ()) -> DescribedPlatform:
    """The platform of a described device, by its name, architecture or the name that plans print.

    `without`: features, such as libraries, that it is to lack. Raises ConfigError for an unknown
    device or a feature that it has not, PluginError for a plugin's broken file.
    """
    found = dict(described(plugins))
    for name, platform in found.items():
        info = platform.info()
        if wanted.lower() in (name, info.arch, info.name.lower()):
            lacking = _lacking(info, tuple(without))
            return DescribedPlatform(platform.properties(), lacking, platform.unrun)
    known = sorted({*found, *(p.info().arch for p in found.values())})
    near = [k for k in known if k in wanted.lower().split()]  # a driver's own name has more words
    near = near or difflib.get_close_matches(wanted.lower(), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"
    if not near:
        hint += "; --platform names a platform that is here"
    raise ConfigError(f"--device {wanted!r}: no plugin describes it; {hint}")


def _lacking(info: DeviceInfo, without: tuple[str, ...]) -> DeviceInfo:
    """Without these features and the parts of them: "lib" takes "lib.function" along. What a device
    computes in stays: its kernels are made for what it is."""
    for name in without:
        able = info.features - _DTYPES
        if name in info.features & _DTYPES:
            raise ConfigError(
                f"--without {name!r}: {info.name} computes in it, which is nothing that can be "
                "missing; name another --device, or leave it out"
            )
        if name not in able:
            near = difflib.get_close_matches(name, able, n=1)
            known = ", ".join(f for f in whole(info) if f in able)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {known}"
            raise ConfigError(f"--without {name!r}: {info.name} has no such feature; {hint}")
    kept = (f for f in info.features if not any(f == n or f.startswith(f"{n}.") for n in without))
    return replace(info, features=frozenset(kept))


def whole(info: DeviceInfo) -> list[str]:
    """Features that are no parts of others, sorted."""
    every = info.features
    parts = {f for f in every if any(f.startswith(f"{other}.") for other in every)}
    return sorted(every - parts)


def folders(plugins: Plugins) -> Iterator[tuple[str, Traversable]]:
    """(plugin, folder of its module) of all that did not refuse and have one."""
    for name, report in sorted(plugins.reports.items()):
        if report.refusal is None:
            try:
                yield name, resources.files(report.module)
            except (TypeError, ModuleNotFoundError):  # a single-file plugin, or one made in a test
                continue


def described(plugins: Plugins) -> Iterator[tuple[str, DescribedPlatform]]:
    """(device, its platform) of everything that the loaded plugins describe, plugin by plugin."""
    for name, folder in folders(plugins):
        file = folder / FILE
        if not file.is_file():
            continue
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
            properties = _properties(raw["platform"])
            for device, values in raw["devices"].items():
                info = _info(values, raw.get("installed", ()))
                yield device, DescribedPlatform(properties, info, _unrun(values))
        except Exception as e:
            raise PluginError(f"plugin {name}: {FILE}: {type(e).__name__}: {e}") from e


def _properties(platform: str | Mapping[str, Any]) -> dict[str, Any]:
    """What plans look at, of a platform class or as written down."""
    if isinstance(platform, str):
        made = load_attr(platform)()
        return {key: getattr(made, key) for key in _PROPERTIES}
    unknown = sorted(platform.keys() - _PROPERTIES)
    if "name" not in platform or unknown:
        raise ValueError(f"platform: a name is needed; unknown: {unknown}")
    return dict(platform)


def _unrun(values: Mapping[str, Any]) -> bool:
    said = values.get("unrun", False)
    if not isinstance(said, bool):
        raise ValueError(f"unrun: {said!r} is neither true nor false")
    return said


def _info(values: dict[str, Any], installed: Iterable[str]) -> DeviceInfo:
    missing = _REQUIRED - values.keys()
    unknown = values.keys() - _REQUIRED - _OPTIONAL
    if missing or unknown:
        raise ValueError(f"missing {sorted(missing)}, unknown {sorted(unknown)}")
    return DeviceInfo(
        type=values["type"],
        name=values["name"],
        arch=values["arch"],
        features=frozenset({*values.get("features", ()), *installed}),
        fast_dtypes=frozenset(values["fast_dtypes"]),
        memory=int(values["memory_gb"] * 1e9),
        cores=values["cores"],
        bandwidth=int(values.get("bandwidth_gb_s", 0) * 1e9),
        link=values.get("link", ""),
        link_bandwidth=int(values.get("link_gb_s", 0) * 1e9),
        multicast=values.get("multicast", False),
    )
