"""What rows of a step cost on their way between ranks: bytes that cross, and bytes that are held.

Bytes that cross are those that one rank receives, in steps whose rows are even over all groups: a
sum over n ranks brings 2 (n - 1) / n of what is summed, a gather or a scatter of the sum
(n - 1) / n of the whole. Backends that send more for the sake of latency are not counted. Bytes
held are those of the step in which one group has the most rows: every group is filled up to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_runtime.assembly.estimate import ITEM_BYTES
from ds_runtime.assembly.result import Assembly
from ds_runtime.description.structure import padded
from ds_runtime.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Wire:
    """Of one step. collectives: how many; row: bytes that a rank receives for each row of the step
    (a token that is decoded is one).
    """

    collectives: int
    row: float


@dataclass(frozen=True, slots=True)
class Crossing:
    """Of a mesh. width: bytes of a row's hidden state; logits: of its logits, in the compute dtype,
    those that fill up the last rank's included. choices: bytes of a row's weights and ids of
    experts; routed: layers in which these cross, too, as experts are divided by number.
    """

    mesh: Mesh
    width: int
    logits: int
    choices: int = 0
    routed: int = 0

    @staticmethod
    def of(assembly: Assembly) -> Crossing:
        """That of a model's ranks."""
        mesh, item = assembly.mesh, ITEM_BYTES[assembly.config.dtype]
        vocab = padded(assembly.model.vocab_size, mesh.tp) * mesh.tp
        width, model = assembly.facts.dims["hidden"] * item, assembly.model
        routed = 0
        if mesh.ep > 1 and mesh.attn_dp > 1:
            routed = sum(map(model.is_moe, range(model.layers)))
        return Crossing(mesh, width, vocab * item, 8 * assembly.facts.dims.get("top_k", 0), routed)

    def wire(self, layers: int) -> Wire:
        """Traffic of a decode step without drafts."""
        groups, heads, ranks = self.mesh.attn_dp, self.mesh.attn_tp, self.mesh.tp
        inside = 2 * (heads - 1) / heads / groups * self.width  # a sum, of a group's own rows
        across = (groups - 1) / groups * self.width  # a gather over groups, or a scatter of the sum
        logits = (ranks - 1) / ranks * self.logits
        attention, entered, left = inside, across, across + inside
        row = layers * (attention + entered + left) + left + entered + logits
        row += self.routed * (groups - 1) / groups * self.choices
        sums, moves = int(heads > 1), int(groups > 1)
        count = layers * (sums + moves + (moves + sums)) + self.routed
        return Wire(count + (moves + sums) + 2 * moves + int(ranks > 1), row)

    def received(self, rows: Sequence[int], wanted: int, layers: int) -> float:
        """Bytes that a rank receives in a step of so many rows in each group, of which `wanted` go
        through the head: groups are filled up to the one with the most. Rows that fill up captured
        steps, and those of drafts, are not counted.
        """
        logits = (self.mesh.tp - 1) / self.mesh.tp * self.logits
        every = self.mesh.attn_dp * max(rows)
        return every * (self.wire(layers).row - logits) + wanted * logits

    def held(self, rows: int) -> int:
        """Bytes of the exchange at its widest, beside the rows that this rank gives and gets, where
        the group that has the most has so many and there are as many in all: they go in and come
        out; with groups a place of every group's lies between.
        """
        if self.mesh.tp == 1:
            return 0
        every = self.mesh.attn_dp * rows if self.mesh.attn_dp > 1 else 0
        return (every + 2 * rows) * self.width

    def gathered(self, rows: int) -> int:
        """Bytes of the logits of so many rows while those of all ranks come together: each rank's,
        and then one behind the other."""
        return 2 * rows * self.logits if self.mesh.tp > 1 else 0
