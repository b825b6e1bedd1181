"""Every op call of a running model as a case of its own, judged where it happened.

A `WatchedOps` stands in for the runner's bound ops. Each call is recorded with copies of its
inputs. Caches are cut to the pages that it uses, and experts to those that were chosen. The copies
are handed to `on_call` with what the kernel made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ds_runtime.ops.batch import Batch, Limits
from ds_runtime.ops.binding.bind import Binding
from ds_runtime.ops.binding.bound import BoundOps
from ds_runtime.ops.contract import Facts, Kernel, Offers
from ds_runtime.ops.reference.attention.dense import decode_batch
from ds_runtime.ops.reference.cases import Call, Case, PagedCache, SampleExperts, Saved
from ds_runtime.ops.weight import ExpertSource, MlaWeights, Packed, Weight
from ds_runtime_kit.checks.conformance import Ran
from ds_runtime_kit.checks.inputs import CacheCodec, rebuild

_ASKED = ("state", "quantizes", "gives_float32")  # methods that compute nothing


@dataclass(frozen=True)
class Seen:
    """One call: where, by whom, the case that it was (judged by its last call), what came of it."""

    path: str
    kernel: Kernel
    case: Case
    ran: Ran


class WatchedOps(BoundOps):
    """The chosen kernels, each call of which is shown to `on_call`, except while `quiet`."""

    def __init__(self, binding: Binding, offers: Offers, on_call: Callable[[Seen], None]) -> None:
        self.offers = offers
        self.on_call = on_call
        self.quiet = True
        self.steps: dict[int, Batch] = {}  # id of a step state → what it was prepared for
        # By id of a Packed: it, and its weight. Two kernels may share what one of them has packed.
        self.sources: dict[int, tuple[Packed, Any]] = {}
        super().__init__(binding)

    def checking(self, owners: Mapping[str, str]) -> AbstractContextManager[None]:
        """Nothing more: every call is judged already, by more than its form."""
        return nullcontext()

    def _load(self, kernel: Kernel, key: tuple[str, int, str]) -> object:
        made = super()._load(kernel, key)
        place = _Place(self, kernel, self._facts[key], made)
        for state_key, holder in self.stateful.items():
            if holder is made:
                self.stateful[state_key] = place
        return place if kernel.op.kind == "object" else place.function


class _Place:
    """One kernel at one place."""

    def __init__(self, ops: WatchedOps, kernel: Kernel, facts: Facts, made: Any) -> None:
        self._ops = ops
        self._kernel = kernel
        self._facts = facts
        self._made = made

    def function(self, *args: Any) -> Any:
        """A call of a function op."""
        if self._ops.quiet:
            return self._made(*args)
        op, at = self._kernel.op, self._kernel.op.place("cache")
        used, rest = self._cut_cache(at, args)
        before = tuple(_host(a) for a in rest)
        written = tuple(i for i in map(op.place, op.writes) if i is not None)
        result = self._made(*args)
        after = list(rest)
        if used is not None and at is not None:
            after[at] = self._codec(args[at]).cut(args[at], self._facts.page_size, used)
        self._show(op.name, (Call(before, written=written),), tuple(after), result)
        return result

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._made, name)
        return (lambda *args: self._applied(name, found, args)) if callable(found) else found

    def pack(self, source: Any, facts: Facts) -> Any:
        """Keeps a copy of the weight on the host."""
        if isinstance(source, Weight | MlaWeights):
            kept: Any = _host(source)
            packed = self._made.pack(source, facts)
        else:
            kept = _Reading(source)
            packed = self._made.pack(kept, facts)
        self._ops.sources[id(packed)] = (packed, kept)
        return packed

    def prepare(self, state: Any, batch: Batch) -> None:
        """Remembers the step."""
        self._ops.steps[id(state)] = batch
        self._made.prepare(state, batch)

    def _applied(self, name: str, function: Any, args: tuple[Any, ...]) -> Any:
        # Optional fusions are not asked: what they fuse is, where prefill computes it.
        if self._ops.quiet or name in _ASKED or self._kernel.op.optional:
            return function(*args)
        if name == "apply_float32":  # where the result is put does not change it
            result = function(*args)
            args = args[:2]
            self._show(name, self._weighed(name, args), args, result)
            return result
        calls = self._decode(args) if name == "run" else self._weighed(name, args)
        after = tuple(args)
        result = function(*args)
        if calls:
            self._show(name, calls, after, result)
        return result

    def _weighed(self, name: str, args: tuple[Any, ...]) -> tuple[Call, ...]:
        """pack, then the method."""
        packed = next(a for a in args if isinstance(a, Packed))
        source = self._ops.sources[id(packed)][1]
        plain = [a for a in args if not isinstance(a, Packed)]
        facts = self._facts
        if isinstance(source, _Reading):
            used, ids = torch.unique(plain[2].cpu().long(), return_inverse=True)
            chosen = used.tolist() or [0]
            source = SampleExperts([source.experts[e] for e in chosen])
            facts = replace(facts, shape=(len(chosen), *facts.shape[1:]))
            plain[2] = ids.view(plain[2].shape).to(torch.int32)
        given = (*(_host(a) for a in plain), Saved("packed"))
        pack = Call((source, facts), method="pack", save="packed")
        return pack, Call(given, method=name)

    def _decode(self, args: tuple[Any, ...]) -> tuple[Call, ...]:
        """state, prepare, run, over the pages of this step's sequences alone."""
        state, *queries, cache, scale = args
        part = self._ops.steps[id(state)].decode
        if part is None or not part.rows:
            return ()
        size = self._facts.page_size
        spans = [range(-(-n // size)) for n in part.host_kv_lens]
        used, table = _used_pages(part.page_table.cpu(), spans)
        paged = self._paged(cache, used)
        most = max(part.q_lens, default=1)
        limits = Limits(
            max(1, part.rows),
            max(1, part.size),
            table.shape[1],
            size,
            queries[0].shape[1],
            torch.device("cpu"),
            most,
        )
        step = decode_batch(part.host_kv_lens, table, part.q_lens)
        return (
            Call((limits,), method="state", save="state"),
            Call((Saved("state"), step), "prepare", save="none"),
            Call((Saved("state"), *map(_host, queries), paged, scale), method="run"),
        )

    def _cut_cache(self, at: int | None, args: tuple[Any, ...]) -> tuple[Tensor | None, list[Any]]:
        """(the pages that matter, arguments over these alone). at: which argument is the cache."""
        rest = list(args)
        if at is None:
            return None, rest
        op, cache, size = self._kernel.op, args[at], self._facts.page_size
        if (named := op.place("slots")) is not None:
            slots = args[named].cpu()
            real = slots >= 0
            used = torch.unique(slots[real].long() // size)
            used = used if used.numel() else torch.zeros(1, dtype=torch.int64)
            new = torch.searchsorted(used, slots.long() // size) * size + slots % size
            rest[named] = torch.where(real, new.to(slots.dtype), slots)
        elif op.place("segs") is not None:
            _, table, starts, segs, *_ = args
            pairs = zip(starts.tolist(), segs.lens, strict=True)
            spans = [range(s // size, -(-(s + n) // size)) for s, n in pairs]
            used, rest[1] = _used_pages(table.cpu(), spans)
        else:  # it is about all pages
            used = torch.arange(cache.shape[0])
        used = used.to(cache.device)
        rest[at] = self._paged(cache, used)
        return used, rest

    def _codec(self, cache: Tensor) -> CacheCodec:
        return CacheCodec.of(self._kernel, self._facts, cache.device, self._ops.offers)

    def _paged(self, cache: Tensor, pages: Tensor) -> PagedCache:
        """What these pages hold, as logical rows."""
        size, codec = self._facts.page_size, self._codec(cache)
        return PagedCache(codec.decode(cache, size, pages).clone(), size, codec.role)

    def _show(
        self, name: str, calls: tuple[Call, ...], after: tuple[Any, ...], result: Any
    ) -> None:
        facts = self._facts
        at = f"layers.{facts.layer}.{facts.module}" if facts.layer >= 0 else facts.module
        results = [r for r in (result if isinstance(result, tuple) else (result,))
                   if isinstance(r, Tensor)]  # fmt: skip
        label = f"{at} {name}"
        seen = Seen(at, self._kernel, Case(label, facts, calls), Ran(after, results))
        self._ops.on_call(seen)


class _Reading:
    """An ExpertSource that keeps a host copy of what is read from another."""

    def __init__(self, source: ExpertSource) -> None:
        self._source = source
        self.experts: list[tuple[Weight, Weight, Weight]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def expert(self, index: int) -> tuple[Weight, Weight, Weight]:
        """See ExpertSource.expert."""
        found = self._source.expert(index)
        self.experts.append(_host(found))
        return found


def _host(value: Any) -> Any:
    """A copy on the host, segments included."""
    return rebuild(value, lambda leaf: _copied(leaf) if isinstance(leaf, Tensor) else leaf)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _used_pages(table: Tensor, spans: list[range]) -> tuple[Tensor, Tensor]:
    """(the distinct pages in these columns of each row, a table that numbers them anew)."""
    named = [table[i, span.start : span.stop].long() for i, span in enumerate(spans)]
    used = torch.unique(torch.cat([*named, torch.zeros(0, dtype=torch.int64)]))
    if not used.numel():
        used = table.new_zeros(1).long()
    width = max((s.stop for s in spans), default=0) + 1
    made = torch.zeros(table.shape[0], width, dtype=torch.int32)
    for i, (span, pages) in enumerate(zip(spans, named, strict=True)):
        made[i, span.start : span.stop] = torch.searchsorted(used, pages).to(torch.int32)
    return used, made
