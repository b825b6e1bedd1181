"""Every op as calls that can be timed, as its contract declares them, with inputs of true sizes.

A subject is one method of one kernel at one number of tokens, with its minimal work. Its calls take
turns over copies of the weights (or caches), so that each finds them where the model would. That is
in memory if the whole model does not fit into the last-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_runtime.ops.batch import Limits
from ds_runtime.ops.binding.bound import ByRows
from ds_runtime.ops.binding.by_rows import Shares
from ds_runtime.ops.contract import Dims, Kernel, load_attr
from ds_runtime.ops.contracts.work import matrix_bytes
from ds_runtime.ops.declare import Cost, OpWork
from ds_runtime.ops.reference.attention.dense import decode_batch
from ds_runtime.ops.reference.inputs import Copies, TrueInputs
from ds_runtime.ops.weight import Weight
from ds_runtime_kit.checks.inputs import rebuild


@dataclass(frozen=True, slots=True)
class Memory:
    """How weights are kept out of the caches.

    cache: bytes of the last-level cache. model: bytes of the model's weights. most: bytes that
    the copies of one op may take.
    """

    cache: int
    model: int
    most: int

    def copies(self, nbytes: float) -> int:
        """How many of `nbytes` are twice as large as the cache; one if the model fits into it."""
        if self.model <= self.cache or not nbytes:
            return 1
        wanted = -(-2 * self.cache // int(nbytes))
        return max(1, min(wanted, self.most // int(nbytes)))

    def cold(self, nbytes: float, copies: int) -> bool:
        """Whether this many copies cannot all stay in the cache, or need not leave it."""
        return self.model <= self.cache or nbytes * copies > self.cache


@dataclass(frozen=True, slots=True)
class Subject:
    """What is timed: the calls, one after the other and again; `work` is that of one call."""

    method: str
    calls: Sequence[Callable[[], Any]]
    work: OpWork
    copies: int = 1
    cold: bool = True
    note: str = ""


class Timed:
    """One kernel at one place, or those that share its calls, with as many copies of its weight as
    take turns."""

    def __init__(
        self, kernel: Kernel, place: TrueInputs, memory: Memory, shares: Shares | None = None
    ) -> None:
        self.op, self.memory = kernel.op, memory
        self.place, self.note = _fitting(place, memory)
        facts = self.place.facts
        self.kernel: Any
        if self.op.kind == "function":
            self.kernel = load_attr(kernel.fn)
        elif shares is None:
            self.kernel = load_attr(kernel.fn)(facts)
        else:
            self.kernel = ByRows(shares, [load_attr(k.fn)(facts) for k in shares.kernels])
        self.packed = Copies()
        if self.op.owns_weights:
            source = _source(self.cost, self.place)

            def pack() -> Any:
                return self.kernel.pack(_on_device(source, place.device), self.place.facts)

            first = pack()
            self.packed += [first, *(pack() for _ in range(memory.copies(first.nbytes) - 1))]

    @property
    def cost(self) -> Cost:
        """As the op declares it."""
        assert self.op.cost is not None
        return self.op.cost

    def at(self, tokens: int) -> Iterator[Subject]:
        """A subject per method."""
        for method, (inputs, work) in self.cost.calls.items():
            args, note = [*inputs(self.place, tokens)], self.note
            if "state" in self.op.parameters[method]:
                args, note = [self._state(tokens), *args], f"{self.place.context} tokens each"
            if self.packed:
                args.append(self.packed)
            function = getattr(self.kernel, method) if method else self.kernel
            copies = next((a for a in args if isinstance(a, Copies)), Copies())
            count = len(copies) or 1
            most = max((len(a) for a in args if isinstance(a, list)), default=1)
            calls = [
                partial(function, *(a[i % len(a)] if isinstance(a, list) else a for a in args))
                for i in range(count * -(-most // count))
            ]
            todo = work(self.place, tokens)
            cold = not copies or self.memory.cold(copies[0].nbytes, count)
            name = method if len(self.cost.calls) > 1 else ""
            yield Subject(name, calls, todo, count, cold, note)

    def _state(self, tokens: int) -> Any:
        """Of a step whose sequences have a token each, prepared."""
        place, (table, _, _) = self.place, self.place.rows(tokens)
        size, heads = place.facts.page_size, place.facts.dims["heads"]
        step = decode_batch((place.context,) * tokens, table.cpu())
        limits = Limits(tokens, tokens, table.shape[1], size, heads, place.device)
        state = self.kernel.state(limits)
        self.kernel.prepare(state, _on_device(step, place.device))
        return state


def _fitting(place: TrueInputs, memory: Memory) -> tuple[TrueInputs, str]:
    """The place with as many experts of a layer as memory holds, and a note if not all."""
    facts = place.facts
    if len(facts.shape) != 3:
        return place, ""
    count, inter, hidden = facts.shape
    shapes = ((inter, hidden), (inter, hidden), (hidden, inter))
    one = sum(matrix_bytes(*shape, facts.weight_format, facts.dtype) for shape in shapes)
    shared = count - facts.dims["experts"] // facts.ranks.get("ep", 1)
    fit = max(facts.dims["top_k"] + shared, min(count, int(memory.most // one)))
    if fit == count:
        return place, ""
    dims = Dims({**facts.dims, "experts": fit - shared})
    fewer = replace(facts, shape=(fit, inter, hidden), dims=dims)
    return replace(place, facts=fewer), f"{fit} of {count} experts fit"


def _source(cost: Cost, place: TrueInputs) -> Any:
    """What `pack` gets: one weight, a layer's experts, or what the op says."""
    if cost.source is not None:
        return cost.source(place)
    *count, rows, cols = place.facts.shape
    if not count:
        return place.weight(rows, cols)
    return _Experts(count[0], place.weight(rows, cols), place.weight(cols, rows), place.device)


def _on_device(value: Any, device: torch.device) -> Any:
    """The same values in tensors of their own: a kernel may keep, change or drop them."""
    return rebuild(value, lambda x: x.to(device, copy=True) if isinstance(x, Tensor) else x)


class _Experts:
    """An ExpertSource whose experts have the same values in memory of their own."""

    def __init__(self, count: int, up: Weight, down: Weight, device: torch.device) -> None:
        self.num_experts, self.format = count, up.format
        self.intermediate, self.hidden = up.shape
        self._of = (up, up, down)
        self._device = device

    def expert(self, index: int) -> tuple[Weight, Weight, Weight]:
        gate, up, down = (_on_device(w, self._device) for w in self._of)
        return gate, up, down
