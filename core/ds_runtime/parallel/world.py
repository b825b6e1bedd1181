"""All ranks of an engine, and the group of each axis that this rank is in."""

from __future__ import annotations

from dataclasses import replace

from ds_runtime.errors import UnsupportedError
from ds_runtime.parallel.group import SoloCommunicator
from ds_runtime.parallel.mesh import AXES, AxisName, Group, Mesh
from ds_runtime.parallel.sums.by_size import BySize
from ds_runtime.parallel.sums.in_order import InOrder
from ds_runtime.parallel.sums.kinds import LIBRARY_SUMS, Sums
from ds_runtime.parallel.sums.logits import Logits
from ds_runtime.platform.contract import Communicator


class World:
    """The groups of one rank. everyone: the communicator of all ranks, from which they are split.

    Axes whose groups have the same ranks share a communicator, and those of size 1 need none. Every
    rank makes one at the same time. Raises UnsupportedError where `everyone` cannot be split.

    * in_order: sums add the ranks in their order, whatever their size.
    * sums: the kinds of sums that were decided for the ranks that divide heads. The attribute
      `sums` holds the kinds that rank 0's group could set up, without a sentence.
    * shares: whether sums in order may read other ranks' memory; else their parts are gathered,
      with the same bits.

    The attribute `logits` gathers the head's logits.
    """

    def __init__(
        self,
        mesh: Mesh,
        everyone: Communicator,
        in_order: bool = False,
        sums: Sums = LIBRARY_SUMS,
        shares: bool = True,
    ) -> None:
        self.mesh, self.everyone, self.rank = mesh, everyone, everyone.rank
        self.sums = LIBRARY_SUMS
        solo: Communicator = SoloCommunicator()
        whole = (tuple(range(mesh.size)),)
        made = {
            groups: everyone if groups == whole else _split(everyone, groups)
            for groups in mesh.divisions
        }
        self._split = [made[groups] for groups in reversed(mesh.divisions) if groups != whole]
        summing: dict[tuple[Group, ...], Communicator] = dict(made)
        # Groups may set up different kinds: no rank waits for the sums of another group.
        if in_order:
            shares = shares and mesh.hosts == 1
            ordered = {groups: InOrder(own, shares) for groups, own in made.items()}
            summing |= ordered
            if mesh.attn_tp > 1:
                self.sums = Sums(at_once=ordered[mesh.groups("attn_tp")].adds_at_once)
        elif mesh.attn_tp > 1 and sums.sizes.upto:
            heads = mesh.groups("attn_tp")
            by_size = summing[heads] = BySize(made[heads], sums.sizes, sums.normed)
            sizes, norms = everyone.gather_objects((by_size.sizes, by_size.norms))[0]
            self.sums = Sums(sizes, normed=norms)
        self._groups: dict[AxisName, Communicator] = {
            axis: summing[mesh.groups(axis)] if mesh.extent(axis) > 1 else solo for axis in AXES
        }
        head = made[mesh.groups("tp")] if mesh.tp > 1 else solo
        self.logits = Logits(head, sums.gathered)
        self.sums = replace(self.sums, gathered=self.logits.most)

    @classmethod
    def alone(cls) -> World:
        """That of one rank."""
        return cls(Mesh(), SoloCommunicator())

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.mesh.size

    def group(self, axis: AxisName) -> Communicator:
        """The communicator of this rank's group; of one rank where the axis has size 1."""
        return self._groups[axis]

    def close(self) -> None:
        """Leave all groups, that of all ranks last."""
        for group in (*self._split, self.everyone):
            group.close()


def _split(everyone: Communicator, groups: tuple[Group, ...]) -> Communicator:
    if not hasattr(everyone, "split"):
        raise UnsupportedError(
            f"--enable-dp-attention, --ep: groups of {len(groups[0])} ranks are needed, and the "
            f"communicator of this platform ({type(everyone).__name__}) has no split: give --dp "
            "and --ep as many as --tp"
        )
    return everyone.split(groups)
