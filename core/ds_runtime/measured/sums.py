"""Which kinds of all-reduce an engine has, from what was measured on its device. Torch-free.

Nothing is assumed: where nobody measured this device with as many ranks, the library's own serves
every size, and the plan says so.
"""

from __future__ import annotations

from ds_runtime.config import EngineConfig
from ds_runtime.measured.costs import Costs
from ds_runtime.measured.found import costs_of
from ds_runtime.ops.contract import DeviceInfo
from ds_runtime.parallel.mesh import Mesh
from ds_runtime.parallel.sums.kinds import (
    FAST,
    LIBRARY,
    LIBRARY_SUMS,
    SUMMED,
    Sums,
    SumSizes,
    chosen,
)
from ds_runtime.platform.contract import Platform
from ds_runtime.plugins.manager import Plugins


def decide(config: EngineConfig, platform: Platform, device: DeviceInfo, plugins: Plugins) -> Sums:
    """Of an engine. Raises ConfigError or PluginError for a broken file of costs."""
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
    """What the curves of this number of ranks say; None where the library's or every other one is
    missing."""
    curves = {
        kind: dict(costs.collectives[kind][ranks])
        for kind in (LIBRARY, *FAST)
        if ranks in costs.collectives.get(kind, {})
    }
    return chosen(curves) if LIBRARY in curves and len(curves) > 1 else None
