"""What ranks send each other in a step, and in which groups they are. Torch-free arithmetic.

Bytes are those that one rank receives, in steps whose rows are even over all groups: a sum over n
ranks brings 2 (n − 1) / n of what is summed, a gather or a scatter of the sum (n − 1) / n of the
whole. Backends that send more for the sake of latency are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_runtime.assembly.estimate import ITEM_BYTES
from ds_runtime.assembly.result import Assembly
from ds_runtime.common.progress import amount
from ds_runtime.description.structure import padded
from ds_runtime.parallel.mesh import AXES, AxisName, Mesh

_ROWS = (1, 64)  # requests of the steps that are shown, for every group of attention


@dataclass(frozen=True, slots=True)
class Wire:
    """Of one step. collectives: how many; row: bytes that a rank receives for each row of the step
    (a token that is decoded is one).
    """

    collectives: int
    row: float


def wire(assembly: Assembly) -> Wire:
    """Traffic of a decode step without drafts."""
    config, model, mesh = assembly.config, assembly.model, Mesh.of(assembly.config)
    width = model.hidden * ITEM_BYTES[config.dtype]
    groups, heads, ranks = mesh.attn_dp, mesh.attn_tp, mesh.tp
    inside = 2 * (heads - 1) / heads / groups * width  # a sum over a group, of its own rows
    across = (groups - 1) / groups * width  # a gather over groups, or a scatter of the sum
    logits = (
        (ranks - 1) / ranks * padded(model.vocab_size, ranks) * ranks * ITEM_BYTES[config.dtype]
    )
    attention, entered, left = inside, across, across + inside
    row = model.layers * (attention + entered + left) + left + entered + logits
    sums, moves = int(heads > 1), int(groups > 1)
    layer = sums + moves + (moves + sums)
    count = model.layers * layer + (moves + sums) + 2 * moves + int(ranks > 1)
    return Wire(count, row)


def said(assembly: Assembly) -> list[str]:
    """Lines on the groups of ranks and what crosses between them; none for one rank."""
    mesh, facts = Mesh.of(assembly.config), assembly.facts
    if mesh.size == 1:
        return []
    found, rate = wire(assembly), assembly.device.link_bandwidth
    where = "one machine" if mesh.hosts == 1 else f"{mesh.hosts} machines of {mesh.per_host}"
    link = f", linked by {facts.interconnect}" if facts.interconnect else ""
    speed = f" at {rate / 1e9:g} GB/s" if rate and link else ""
    lines = [f"ranks {mesh.size} on {where}{link}{speed}"]
    lines += [f"group {axis}: {_groups(mesh, axis)}" for axis in AXES if mesh.extent(axis) > 1]
    steps = []
    for rows in _ROWS:
        total = found.row * rows * mesh.attn_dp
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
