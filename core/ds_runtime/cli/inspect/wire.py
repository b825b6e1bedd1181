"""What ranks send each other in a step, and in which groups they are, in words."""

from __future__ import annotations

from ds_runtime.assembly.crossing import Crossing
from ds_runtime.assembly.result import Assembly
from ds_runtime.common.progress import amount
from ds_runtime.parallel.mesh import AXES, AxisName, Mesh

_ROWS = (1, 64)  # requests of the steps that are shown, for every group of attention


def said(assembly: Assembly) -> list[str]:
    """Lines on the groups of ranks and what crosses between them; none for one rank."""
    mesh, facts = assembly.mesh, assembly.facts
    if mesh.size == 1:
        return []
    crossing, layers = Crossing.of(assembly), assembly.model.layers
    found, rate = crossing.wire(layers), assembly.device.link_bandwidth
    where = "one machine" if mesh.hosts == 1 else f"{mesh.hosts} machines of {mesh.per_host}"
    link = f", linked by {facts.interconnect}" if facts.interconnect else ""
    speed = f" at {rate / 1e9:g} GB/s" if rate and link else ""
    lines = [f"ranks {mesh.size} on {where}{link}{speed}"]
    lines += [f"group {axis}: {_groups(mesh, axis)}" for axis in AXES if mesh.extent(axis) > 1]
    if crossing.routed:
        form = "FP8 codes, one scale per 128, which their experts multiply anyway"
        if not crossing.coded:
            form = f"{assembly.config.dtype}: their kernels do not say that they take codes"
        lines.append(f"rows for experts of other ranks cross as {form}")
    steps = []
    for rows in _ROWS:
        total = crossing.wire(layers, rows).row * rows * mesh.attn_dp
        time = f", {total / rate * 1e6:.1f} µs of the link" if rate and mesh.hosts == 1 else ""
        steps.append(f"{amount(total)} for {rows * mesh.attn_dp} requests{time}")
    lines.append(
        f"wire {amount(found.row)} a token that each rank receives, in {found.collectives} "
        f"collectives a step: {'; '.join(steps)}"
    )
    return lines


def _groups(mesh: Mesh, axis: AxisName) -> str:
    """`0-3, 4-7`; machines that a group crosses are told."""
    crossing = ", across machines" if mesh.crosses(axis) else ""
    return "; ".join(_ranks(group) for group in mesh.groups(axis)) + crossing


def _ranks(group: tuple[int, ...]) -> str:
    if len(group) > 2 and group[-1] - group[0] == len(group) - 1:
        return f"{group[0]}-{group[-1]}"
    return " ".join(map(str, group))
