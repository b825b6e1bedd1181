"""Devices that are not here, for tests: what plugins describe in their devices.json.

    from ds_runtime_kit import fake
    plan = fake.plan("deepseek-ai/DeepSeek-V3", "acme-x1").plan

Torch-free: everything is decided, and nothing runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.result import Assembly
from ds_runtime.config import EngineConfig
from ds_runtime.ops.contract import DeviceInfo
from ds_runtime.plugins.described_devices import DescribedPlatform, describe, described
from ds_runtime.plugins.manager import Plugins, load_plugins


def devices(plugins: Plugins | None = None) -> Mapping[str, DescribedPlatform]:
    """Every described device by name, with the platform that would serve it."""
    return dict(described(plugins or load_plugins()))


def device(name: str, without: Iterable[str] = ()) -> DeviceInfo:
    """One of them, by name or architecture, less the features `without`."""
    return describe(load_plugins(), name, without).info()


def plan(
    model: str,
    device: str,
    without: Iterable[str] = (),
    plugins: Plugins | None = None,
    **settings: Any,
) -> Assembly:
    """What would be decided for a model (folder or id) there; `settings` as a user would set them.

    `plugins`: loaded before, to save the time. Raises what a start would raise.
    """
    config = replace(EngineConfig(model=model), **settings)
    return assemble(config, tuple(settings), device=device, without=without, loaded=plugins)
