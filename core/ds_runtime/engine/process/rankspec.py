"""What crosses to a rank's process at its start. Torch-free: the front end makes these."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.result import Assembly
from ds_runtime.config import EngineConfig
from ds_runtime.config.ranks import check_secret
from ds_runtime.engine.process.transport import ipc
from ds_runtime.errors import ConfigError
from ds_runtime.parallel.link.end import LinkKeys, is_free, secret
from ds_runtime.parallel.link.messages import Hello
from ds_runtime.parallel.mesh import Mesh, local_ranks
from ds_runtime.platform.contract import Platform
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.plugins.select_platform import select_platform

_COMPARED = 2048  # tensors of a checkpoint of which parts are read


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a rank's process needs to know; picklable. `plugins`: names of modules to add.

    `replica`: of the engines that one server runs on this machine. Their ranks are numbered
    through: a platform knows a rank by its `local_rank`, which is the index of its device.
    """

    config: EngineConfig
    explicit: tuple[str, ...]
    plugins: tuple[str, ...]
    folder: Path
    rank: int
    replica: int = 0

    @property
    def mesh(self) -> Mesh:
        """All ranks of the engine."""
        return Mesh.of(self.config)

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.mesh.size

    @property
    def local_rank(self) -> int:
        """Of this rank among those of all replicas on this node."""
        return self.replica * self.mesh.per_host + self.rank % self.mesh.per_host

    @property
    def local_ranks(self) -> int:
        """Ranks of all replicas on this node."""
        return local_ranks(self.config)

    @property
    def nodes(self) -> int:
        """Ranks of each node, where there are several; else 0."""
        return self.mesh.per_host if self.mesh.hosts > 1 else 0

    @property
    def address(self) -> str:
        """Where rank 0 listens to the others."""
        at = self.config.dist_init_addr
        return f"tcp://{at}" if self.nodes else ipc(self.folder, "ranks")

    def meeting(self) -> str:
        """Where the communicators of all ranks meet: rank 0 chooses, and tells the others."""
        if not self.nodes:
            return f"file://{self.folder / 'rendezvous'}"
        host, _, port = str(self.config.dist_init_addr).rpartition(":")
        beside = int(port) + 1
        if self.rank == 0 and not is_free(host, beside):
            raise ConfigError(
                f"--dist-init-addr {host}:{port}: torch.distributed meets at the next port, and "
                f"{beside} is in use: give another"
            )
        return f"tcp://{host}:{beside}"

    @property
    def keys(self) -> LinkKeys | None:
        """What ranks of nodes prove to know. Raises ConfigError where they have to, and cannot."""
        check_secret(self.config)
        return secret(self.config.dist_token_file) if self.nodes else None

    def hello(self, assembly: Assembly) -> Hello:
        """What this rank says of itself to rank 0."""
        plan = json.dumps(assembly.plan.to_dict(), default=list)
        model = hashlib.sha256((assembly.folder / "config.json").read_bytes()).hexdigest()
        return Hello(self.rank, self.size, plan, model, self._weights(assembly))

    def _weights(self, assembly: Assembly) -> str:
        """Digests of what this node loads, where others have files of their own."""
        if not self.nodes or self.config.load_format == "dummy":
            return ""
        from ds_runtime.kv.digest import weights_digest  # reads tensors, by torch

        drafts = [] if assembly.nextn is None else [assembly.nextn.folder]
        adapters = [] if assembly.lora is None else [a.folder for a in assembly.lora.adapters]
        folders = dict.fromkeys([assembly.folder, *drafts, *adapters])
        return " ".join(weights_digest(f, assembly.stamps, _COMPARED) for f in folders)

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

    def check_device(self, platform: Platform) -> None:
        """ConfigError if there is no device for this rank."""
        try:
            platform.info(self.local_rank)
        except Exception as e:
            replicas = self.config.replicas
            dp = f"--dp {replicas} " if replicas > 1 else ""
            raise ConfigError(
                f"{dp}--tp {self.size}: {self.local_ranks} devices are needed, and number "
                f"{self.local_rank} cannot be had: {e}; give less, or let more devices be seen"
            ) from e
