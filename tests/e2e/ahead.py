"""Engines of this process over a runner that stays, some of which launch steps ahead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ds_runtime.engine.device.runner import Runner
from ds_runtime.engine.engine import Engine
from ds_runtime_cpu.platform import CpuPlatform


class Ahead(CpuPlatform):
    """A step is launched before the last one's tokens are known, as on devices with queues."""

    asynchronous = True


def engine(runner: Runner, ahead: bool, **changes: Any) -> Engine:
    """A new engine. changes: of the runner's settings."""
    assembly = replace(runner.assembly, config=replace(runner.assembly.config, **changes))
    if ahead:
        assembly = replace(assembly, platform=Ahead())
    runner.sampler.clear()
    return Engine(assembly, runner)
