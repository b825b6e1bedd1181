"""Which kinds of all-reduce and of the head's gather an engine has. Torch-free.

They follow from what was measured on its device. Nothing is assumed: where nobody measured it with
as many ranks, the library's own serve every size, and the plan says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ds_runtime.config import EngineConfig
from ds_runtime.description.config import ModelConfig
from ds_runtime.description.tree import padded
from ds_runtime.measured.costs import Costs
from ds_runtime.measured.found import costs_of
from ds_runtime.ops.contract import DeviceInfo
from ds_runtime.parallel.mesh import Mesh
from ds_runtime.parallel.sums.kinds import (
    FAST,
    GATHER_LOGITS,
    GATHERED,
    GATHERED_BY,
    LIBRARY,
    LIBRARY_SUMS,
    NORMED,
    SUMMED,
    Sums,
    SumSizes,
    chosen,
)
from ds_runtime.platform.contract import Platform
from ds_runtime.plugins.manager import Plugins


def decide(
    config: EngineConfig,
    model: ModelConfig,
    platform: Platform,
    device: DeviceInfo,
    plugins: Plugins,
) -> Sums:
    """Of an engine. Raises ConfigError or PluginError for a broken file of costs."""
    sums = _sums(config, platform, device, plugins)
    fused = bool(sums.sizes.upto) and config.dtype == NORMED and model.hybrid is None
    gathered = 0
    if padded(model.vocab_size, Mesh.of(config).tp) % GATHERED_BY == 0:
        gathered = _gathered(config, platform, device, plugins)
    return replace(sums, normed=fused, gathered=gathered)


def _gathered(
    config: EngineConfig, platform: Platform, device: DeviceInfo, plugins: Plugins
) -> int:
    """As Sums.gathered: it only moves values, so the order of ranks in sums does not matter."""
    mesh = Mesh.of(config)
    ranks = mesh.extent("tp")
    able = platform.fast_sums.get(device.link, ()) if mesh.hosts == 1 else ()
    off = config.disable_custom_all_reduce or config.dtype != NORMED
    if ranks == 1 or ranks not in able or off:
        return 0
    costs = costs_of(plugins, device.name)
    kinds = (GATHER_LOGITS, GATHERED)
    curves = {} if costs is None else _curves(costs, ranks, kinds)
    return chosen(curves, kinds).most if len(curves) == len(kinds) else 0


def _sums(config: EngineConfig, platform: Platform, device: DeviceInfo, plugins: Plugins) -> Sums:
    mesh = Mesh.of(config)
    ranks = mesh.attn_tp
    kernels = platform.ordered_sums if config.batch_invariant else platform.fast_sums
    able = kernels.get(device.link, ()) if mesh.hosts == 1 else ()
    if ranks == 1 or ranks not in able:
        return LIBRARY_SUMS
    if config.batch_invariant:
        return Sums(at_once=not config.disable_custom_all_reduce)
    of_ranks = f"all-reduces of {ranks} ranks"
    if config.disable_custom_all_reduce:
        return Sums(said=f"{of_ranks} are the library's, for --disable-custom-all-reduce")
    if config.dtype not in SUMMED:
        return Sums(said=f"{of_ranks} are the library's: no other kind sums {config.dtype}")
    costs = costs_of(plugins, device.name)
    sizes = None if costs is None else of(costs, ranks)
    if sizes is None:
        return Sums(
            said=f"{of_ranks} are the library's: no other kind was measured on this device; run "
            f"ds-runtime tune comm --ranks {ranks}"
        )
    return Sums(sizes, f"{of_ranks} by measured sizes: {sizes}")


def of(costs: Costs, ranks: int) -> SumSizes | None:
    """Which kind serves which size, as curves of this many ranks say. None where the library was
    not measured, or no other kind was."""
    curves = _curves(costs, ranks, (*FAST, LIBRARY))
    return chosen(curves) if LIBRARY in curves and len(curves) > 1 else None


def _curves(costs: Costs, ranks: int, kinds: Iterable[str]) -> dict[str, dict[int, float]]:
    """Of those kinds that were measured with as many ranks."""
    found = {kind: costs.collectives.get(kind, {}) for kind in kinds}
    return {kind: dict(by[ranks]) for kind, by in found.items() if ranks in by}
