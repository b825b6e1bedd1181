"""The routed experts of a layer, read from a checkpoint one by one."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from ds_runtime.description.tree import MoeNode, Stored
from ds_runtime.ops.weight import Weight, WeightPart
from ds_runtime.parallel.layout import Shards

AHEAD = 6  # experts that are read side by side before they are asked for


class Reads(Protocol):
    """What is asked of a loader."""

    shards: Shards
    readers: ThreadPoolExecutor | None

    def shared_slots(self, moe: MoeNode) -> int: ...

    def whole(self, linears: Iterable[Stored]) -> AbstractContextManager[None]: ...

    def part(self, stored: Stored, target: str, piece: int, pieces: int) -> WeightPart: ...


class LayerExperts:
    """ExpertSource over a checkpoint: reads an expert when asked, keeps nothing.

    Where the device computes in parallel with the host, the next ones are read while one is packed.
    """

    def __init__(self, loader: Reads, moe: MoeNode, target: str) -> None:
        self.slots = loader.shared_slots(moe)
        self.num_experts = len(moe.experts) + self.slots
        self.intermediate, self.hidden = moe.experts[0].parts[0].local(loader.shards.ranks)
        self.format = target
        self._moe = moe
        self._loader = loader
        self._coming: dict[int, Future[tuple[Weight, Weight, Weight]]] = {}

    def expert(self, index: int) -> tuple[Weight, Weight, Weight]:
        """(gate, up, down) of one expert, this rank's width. After the routed experts come equal
        pieces of the shared ones."""
        readers = self._loader.readers
        if readers is None:
            return self._read(index)
        for number in range(index, min(index + AHEAD + 1, self.num_experts)):
            if number not in self._coming:
                self._coming[number] = readers.submit(self._read, number)
        return self._coming.pop(index).result()

    def _read(self, index: int) -> tuple[Weight, Weight, Weight]:
        routed, mlp, piece, pieces = self._moe.experts, self._moe.shared, 0, 1
        if index < len(routed):
            mlp = routed[index]
        else:
            piece, pieces = index - len(routed), self.slots
        assert mlp is not None
        parts = [s._replace(cut=s.cut and s.cut._replace(over="expert")) for s in mlp.parts]
        with self._loader.whole(mlp.parts) if pieces == 1 else nullcontext():
            gate, up, down = (
                Weight((self._loader.part(stored, self.format, piece, pieces),)) for stored in parts
            )
        return gate, up, down
