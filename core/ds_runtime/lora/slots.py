"""Low-rank adapters on the device: a pair per slot for every Linear that may have one.

Slots are allocated once, so that captured steps read in place what is loaded later. An adapter is
read and checked as a whole (`stage`) before any slot changes (`put`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_runtime.description.adapter import LoraPlan
from ds_runtime.description.config import ModelConfig
from ds_runtime.description.tree import Stored
from ds_runtime.errors import CheckpointError, DsRuntimeError
from ds_runtime.lora.read import Adapter
from ds_runtime.model.rope import paired_rows
from ds_runtime.ops.contracts.lora import LoraDelta
from ds_runtime.parallel.layout import Shards
from ds_runtime.platform.contract import Communicator

Staged = dict[str, tuple[Tensor, Tensor]]  # module → this rank's (A [r, in], B [out, r])


class Pairs:
    """All slots of one Linear: a [1, slots, rank, in], b [1, slots, rank, out]."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a = a
        self.b = b

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def clear(self, slot: int) -> None:
        """Make the slot add nothing."""
        self.a[:, slot].zero_()
        self.b[:, slot].zero_()

    def put(self, slot: int, a: Tensor, b: Tensor) -> None:
        """Fill a cleared slot."""
        self.a[0, slot, : a.shape[0]].copy_(a)
        self.b[0, slot, : a.shape[0]].copy_(b.T)


class HeadPairs(Pairs):
    """All slots of kv_b: the rows of B by head, as `b` [heads, slots, rank, nope] for the keys and
    `v` [heads, slots, rank, v] for the values.
    """

    def __init__(self, a: Tensor, b: Tensor, v: Tensor) -> None:
        super().__init__(a, b)
        self.v = v

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.v.nbytes

    def clear(self, slot: int) -> None:
        super().clear(slot)
        self.v[:, slot].zero_()

    def put(self, slot: int, a: Tensor, b: Tensor) -> None:
        rank, nope = a.shape[0], self.b.shape[3]
        self.a[0, slot, :rank].copy_(a)
        per_head = b.view(self.b.shape[0], -1, rank).transpose(1, 2)  # [heads, rank, nope + v]
        self.b[:, slot, :rank].copy_(per_head[..., :nope])
        self.v[:, slot, :rank].copy_(per_head[..., nope:])


class Delta:
    """What the adapters add to columns [first, first + width) of a product."""

    __slots__ = ("_first", "_op", "_pairs", "_width")

    def __init__(self, op: LoraDelta, pairs: Pairs, first: int) -> None:
        self._op = op
        self._pairs = pairs
        self._first = first
        self._width = pairs.b.shape[3]

    def add(self, y: Tensor, x: Tensor, adapters: Tensor) -> None:
        """y [tokens, out] in place, from x [tokens, in] and adapters [tokens] int32."""
        columns = y.narrow(1, self._first, self._width)
        pairs = self._pairs
        self._op(columns.unsqueeze(1), x.unsqueeze(1), pairs.a, pairs.b, adapters)


class AbsorbDelta:
    """kv_b's, in its three uses: absorption multiplies by B first and by A last, or the other way
    round, so it goes through both products like the weight itself.
    """

    __slots__ = ("_op", "_pairs")

    def __init__(self, op: LoraDelta, pairs: HeadPairs) -> None:
        self._op = op
        self._pairs = pairs

    def expand(self, k_nope: Tensor, v: Tensor, latent: Tensor, adapters: Tensor) -> None:
        """k_nope [T, heads, nope] and v [T, heads, v] in place, from latent [T, kv_lora]."""
        x, pairs = latent.unsqueeze(1), self._pairs
        self._op(k_nope, x, pairs.a, pairs.b, adapters)
        self._op(v, x, pairs.a, pairs.v, adapters)

    def apply_q(self, out: Tensor, q_nope: Tensor, adapters: Tensor) -> None:
        """out [T, heads, kv_lora] in place, from q_nope [T, heads, nope]."""
        self._op(out, q_nope, self._pairs.b, self._pairs.a, adapters)

    def apply_v(self, out: Tensor, x: Tensor, adapters: Tensor) -> None:
        """out [T, heads, v] in place, from x [T, heads, kv_lora]."""
        self._op(out, x, self._pairs.a, self._pairs.v, adapters)


class LoraSlots:
    """Every slot of one rank. `modules`: the model's Linears, whole; `shards`: the share of them
    that this rank holds; `nbytes` of all slots.
    """

    def __init__(
        self,
        plan: LoraPlan,
        config: ModelConfig,
        modules: Mapping[str, Stored],
        shards: Shards,
        device: Any,
        dtype: torch.dtype,
    ) -> None:
        self.plan = plan
        self.modules = modules
        self.nbytes = 0
        self._config = config
        self._shards = shards
        self._device = device
        self._dtype = dtype
        self._pairs: dict[str, Pairs] = {}

    def _zeros(self, groups: int, width: int) -> Tensor:
        shape = (groups, self.plan.slots, self.plan.rank, width)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def _local(self, module: str) -> tuple[int, int]:
        """This rank's [out, in]."""
        out, width = self.modules[module].local(self._shards.ranks)
        return out, width

    def _held(self, module: str, pairs: Pairs) -> None:
        self._pairs[module] = pairs
        self.nbytes += pairs.nbytes

    def deltas(self, op: LoraDelta, modules: Sequence[str]) -> tuple[Delta, ...]:
        """Of a product whose columns are those of `modules`, one after the other."""
        found, first = [], 0
        for module in modules:
            out, width = self._local(module)
            if module in self.plan.modules:
                pairs = Pairs(self._zeros(1, width), self._zeros(1, out))
                self._held(module, pairs)
                found.append(Delta(op, pairs, first))
            first += out
        return tuple(found)

    def absorb(self, op: LoraDelta, module: str) -> AbsorbDelta | None:
        """Of kv_b."""
        if module not in self.plan.modules:
            return None
        config = self._config
        heads = config.heads // self._shards.heads.size
        pairs = HeadPairs(
            self._zeros(1, config.kv_lora),
            self._zeros(heads, config.qk_nope),
            self._zeros(heads, config.v_head),
        )
        self._held(module, pairs)
        return AbsorbDelta(op, pairs)

    def read(self, slot: int, folder: Path, comm: Communicator) -> None:
        """Read an adapter into a slot, on every rank or on none: collective.

        Raises CheckpointError, on every rank alike, if one of them could not read it; the slot is
        then as it was.
        """
        staged, said = None, ""
        try:
            with contextlib.closing(Adapter(folder, self.modules)) as adapter:
                staged = self.stage(adapter)
        except DsRuntimeError as e:
            said = str(e)
        except Exception as e:  # of the file system, or for want of memory
            said = f"{folder}: {type(e).__name__}: {e}"
        for other in comm.gather_objects(said):
            if other:
                raise CheckpointError(other)
        assert staged is not None
        self.put(slot, staged)

    def stage(self, adapter: Adapter) -> Staged:
        """This rank's shards of an adapter, on the host in the compute dtype.

        Raises CheckpointError for a pair that no slot was made for.
        """
        plan, config = self.plan, adapter.config
        staged: Staged = {}
        for module, pair in adapter.pairs.items():
            if module not in plan.modules:
                raise CheckpointError(
                    f"{adapter.path}: {module} has no slots in this engine: start it with "
                    "--lora-target-modules that cover it"
                )
            if pair.rank > plan.max_rank:
                raise CheckpointError(
                    f"{config.folder}: rank {pair.rank} of {module} is above --max-lora-rank "
                    f"{plan.max_rank}"
                )
            if module in self._pairs:  # not of an expert of another rank
                staged[module] = self._cut(adapter, module)
        return staged

    def _cut(self, adapter: Adapter, module: str) -> tuple[Tensor, Tensor]:
        a, b = adapter.read(module)
        stored = self.modules[module]
        rows, cols = self._shards.part(stored)
        a, b = a[:, cols], b[rows]
        if short := self._local(module)[0] - b.shape[0]:  # of a vocabulary
            b = torch.cat((b, b.new_zeros(short, b.shape[1])))
        order = paired_rows(self._config, stored, b.shape[0])
        if order is not None:
            b = b[order]
        cast = a.to(self._dtype), b.to(self._dtype)
        if not all(torch.isfinite(t).all() for t in cast):
            raise CheckpointError(
                f"{adapter.path}: {module}: a value overflows {self._dtype}; use another --dtype"
            )
        return cast

    def put(self, slot: int, staged: Staged) -> None:
        """Write an adapter into a slot that no request uses, over what was there."""
        for pairs in self._pairs.values():
            pairs.clear(slot)
        for module, (a, b) in staged.items():
            self._pairs[module].put(slot, a, b)
