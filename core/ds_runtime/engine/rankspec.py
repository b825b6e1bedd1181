"""What crosses to a rank's process at its start. Torch-free: the front end makes these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from ds_runtime.assemble import Assembly, assemble
from ds_runtime.config import EngineConfig
from ds_runtime.platform.select import select_platform
from ds_runtime.plugins import load_plugins


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a rank's process needs to know; picklable. `plugins`: names of modules to add."""

    config: EngineConfig
    explicit: tuple[str, ...]
    plugins: tuple[str, ...]
    folder: Path
    rank: int

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self.config.tp

    def process_env(self) -> Mapping[str, str]:
        """What the platform wants in the environment of a rank's process."""
        config, extra = self.config, [import_module(m) for m in self.plugins]
        plugins = load_plugins(config.plugins, extra, allowlist=config.plugin_allowlist)
        platform, _ = select_platform(plugins, config.platform, config.allow_platform_downgrade)
        platform.configure(config)
        return platform.process_env()

    def assemble(self) -> Assembly:
        """Decide everything, as every rank does for itself."""
        return assemble(self.config, self.explicit, [import_module(m) for m in self.plugins])
