"""Every op as calls that can be timed, with random inputs of true sizes.

A subject is one method of one kernel at one number of tokens, with its minimal work. Its calls
take turns over copies of the weights (or caches), so that each finds them where the model would:
in memory, where the whole model does not fit into the last-level cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_runtime.description.structure import INDEXER
from ds_runtime.ops.batch import Limits
from ds_runtime.ops.reference.attention.dense import decode_batch
from ds_runtime.ops.weight import Weight
from ds_runtime_bench.ops import work
from ds_runtime_bench.ops.inputs import INPUTS
from ds_runtime_bench.ops.place import (
    Place,
    Subject,
    copied,
    held,
    pack_copies,
    random_weight,
    subject,
)
from ds_runtime_kit.checks.inputs import rebuild

CHOICES = 16  # of experts, per subject: every call has others


class Function:
    """A kernel that is called with tensors alone."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.call = place.made()

    def at(self, tokens: int) -> Iterator[Subject]:
        args, todo = INPUTS[self.place.kernel.op.name](self.place, tokens)
        yield Subject("", [partial(self.call, *args)], todo)


class Linear:
    """`apply` over copies of one packed weight."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.kernel = place.made()
        out, cols = place.facts.shape
        self.base = random_weight(place, out, cols, place.facts.weight_format)
        self.packed = pack_copies(place, lambda: self.pack(self.base))

    def pack(self, base: Weight) -> Any:
        return self.kernel.pack(copied(base, self.place.device), self.place.facts)

    def at(self, tokens: int) -> Iterator[Subject]:
        place, (out, cols) = self.place, self.place.facts.shape
        x = place.normal(tokens, cols)
        calls = [partial(self.kernel.apply, x, p) for p in self.packed]
        todo = work.linear(out, cols, held(place), place.facts.dtype, tokens)
        yield subject(place, "", calls, todo, self.packed)


class Absorb(Linear):
    """`apply_q`, `apply_v` and `expand` over copies of one packed kv_b."""

    def at(self, tokens: int) -> Iterator[Subject]:
        place, dims = self.place, self.place.facts.dims
        heads, nope, rope = dims["heads"], dims["qk_nope"], dims["qk_rope"]
        sizes = heads, nope, rope, dims["v"], (lora := dims["kv_lora"])
        inputs: dict[str, tuple[Tensor, ...]] = {
            "apply_q": (place.normal(tokens, heads, nope), place.normal(tokens, heads, rope)),
            "apply_v": (place.normal(tokens, heads, lora),),
            "expand": (place.normal(tokens, lora),),
        }
        for method, given in inputs.items():
            calls = [partial(getattr(self.kernel, method), *given, p) for p in self.packed]
            todo = work.mla_absorb(method, *sizes, place.facts.dtype, tokens)
            yield subject(place, method, calls, todo, self.packed)


class Experts:
    """`apply` over copies of one layer's experts, and over choices of them."""

    def __init__(self, place: Place) -> None:
        self.kernel = place.made()
        count, inter, hidden = place.facts.shape
        fmt = place.facts.weight_format
        one = 2 * work.matrix_bytes(inter, hidden, fmt, place.facts.dtype)
        one += work.matrix_bytes(hidden, inter, fmt, place.facts.dtype)
        assert place.routing is not None
        self.slots = max(0, count - place.routing.num_experts)  # that every token takes
        self.top_k = place.routing.top_k + self.slots
        self.count = max(self.top_k, min(count, int(place.memory.most // one)))
        self.note = "" if self.count == count else f"{self.count} of {count} experts fit"
        facts = replace(place.facts, shape=(self.count, inter, hidden))
        self.place = replace(place, facts=facts)
        up, down = (random_weight(place, *s, fmt) for s in ((inter, hidden), (hidden, inter)))
        self.packed = pack_copies(
            self.place, lambda: self.kernel.pack(_Source(self.count, up, down, place.device), facts)
        )

    def at(self, tokens: int) -> Iterator[Subject]:
        place, (_, inter, hidden) = self.place, self.place.facts.shape
        x = place.normal(tokens, hidden)
        ids = [self._choose(tokens) for _ in range(CHOICES)]
        weights = torch.rand(tokens, self.top_k, device=place.device)
        calls = [
            partial(self.kernel.apply, x, weights, ids[i % CHOICES], p)
            for i, p in enumerate(self.packed * -(-CHOICES // len(self.packed)))
        ]
        distinct = sum(len(set(i.flatten().tolist())) for i in ids) / CHOICES
        todo = work.experts(
            inter, hidden, held(place), place.facts.dtype, tokens, self.top_k, distinct
        )
        yield subject(place, "", calls, todo, self.packed, self.note)

    def _choose(self, tokens: int) -> Tensor:
        """Distinct experts for each token, all as likely, and the slots of shared ones."""
        scores = torch.rand(tokens, self.count)
        scores[:, self.count - self.slots :] += 1
        return scores.topk(self.top_k).indices.to(torch.int32).to(self.place.device)


class _Source:
    """An ExpertSource whose experts have the same values in memory of their own."""

    def __init__(self, count: int, up: Weight, down: Weight, device: torch.device) -> None:
        self.num_experts, self.format = count, up.format
        self.intermediate, self.hidden = up.shape
        self._of = (up, up, down)
        self._device = device

    def expert(self, index: int) -> tuple[Weight, Weight, Weight]:
        gate, up, down = (copied(w, self._device) for w in self._of)
        return gate, up, down


class Decode:
    """`run` over several caches; `prepare` once, as in a step."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.kernel = place.made()

    def at(self, tokens: int) -> Iterator[Subject]:
        place, facts, dims = self.place, self.place.facts, self.place.facts.dims
        size, heads = facts.page_size, dims["heads"]
        each = -(-place.context // size)
        table = torch.randperm(tokens * each).view(tokens, each).to(torch.int32)
        batch = rebuild(
            decode_batch((place.context,) * tokens, table),
            lambda leaf: leaf.to(place.device) if isinstance(leaf, Tensor) else leaf,
        )
        state = self.kernel.state(Limits(tokens, tokens, each, size, heads, place.device))
        self.kernel.prepare(state, batch)
        first = place.cache(tokens * each)
        copies = place.memory.copies(first.nbytes)
        caches = [first, *(place.cache(tokens * each) for _ in range(copies - 1))]
        queries, scale = self.queries(tokens)
        calls = [partial(self.kernel.run, state, *queries, cache, scale) for cache in caches]
        lens = (place.context,) * tokens
        todo = self.todo(lens)
        cold = place.memory.cold(first.nbytes, copies)
        note = f"{place.context} tokens each"
        yield Subject("", calls, todo, copies, cold, note)

    def queries(self, rows: int) -> tuple[tuple[Tensor, ...], float]:
        """Those of so many rows, and the scale of their scores."""
        dims = self.place.facts.dims
        width = dims["kv_lora"] + dims["qk_rope"]
        return (self.place.normal(rows, dims["heads"], width),), width**-0.5

    def todo(self, lens: Iterable[int]) -> work.Work:
        """Of one row per sequence of these lengths."""
        facts, dims = self.place.facts, self.place.facts.dims
        sizes = dims["heads"], dims["kv_lora"], dims["qk_rope"]
        return work.mla_decode(*sizes, facts.dtype, facts.kv_dtype, lens)


class ExpandedDecode(Decode):
    """The same over keys and values of all heads."""

    def queries(self, rows: int) -> tuple[tuple[Tensor, ...], float]:
        """Those of so many rows, and the scale of their scores."""
        heads, nope, rope = (self.place.facts.dims[k] for k in ("heads", "qk_nope", "qk_rope"))
        parts = self.place.normal(rows, heads, nope), self.place.normal(rows, heads, rope)
        return parts, (nope + rope) ** -0.5

    def todo(self, lens: Iterable[int]) -> work.Work:
        """Of one row per sequence of these lengths."""
        facts, dims = self.place.facts, self.place.facts.dims
        sizes = dims["heads"], dims["qk_nope"], dims["qk_rope"], dims["v"]
        return work.mha_decode(*sizes, facts.dtype, facts.kv_dtype, lens)


class Router(Function):
    """Router logits over copies of the weight."""

    def at(self, tokens: int) -> Iterator[Subject]:
        place, dims = self.place, self.place.facts.dims
        x = place.normal(tokens, dims["hidden"])
        out = dims["index_heads" if place.facts.module == INDEXER else "experts"]
        first = place.normal(out, dims["hidden"], dtype=torch.float32)
        weights = [first.clone() for _ in range(place.memory.copies(first.nbytes))]
        calls = [partial(self.call, x, weight) for weight in weights]
        todo = work.router_logits(out, dims["hidden"], place.facts.dtype, tokens)
        cold = place.memory.cold(first.nbytes, len(weights))
        yield Subject("", calls, todo, len(weights), cold)
