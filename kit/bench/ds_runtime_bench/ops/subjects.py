"""Random inputs of true sizes for every op, as calls that can be timed.

A subject is one method of one kernel at one number of tokens, with its minimal work. Its calls
take turns over copies of the weights (or caches), so that each finds them where the model would:
in memory, where the whole model does not fit into the last-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_runtime.model.sites import INDEXER
from ds_runtime.ops.batch import Limits, Segments
from ds_runtime.ops.reference import EXPANDED_PAGES, expanded_width
from ds_runtime.ops.reference.attention import decode_batch
from ds_runtime.ops.reference.cases import Maker
from ds_runtime.ops.reference.formats import is_fp8, torch_dtype
from ds_runtime.ops.reference.rounding import quantise_part
from ds_runtime.ops.spec import Facts, Kernel, Layout, Routing, load_attr
from ds_runtime.ops.weight import Weight
from ds_runtime_bench.ops import sparse_subjects, work
from ds_runtime_bench.ops.work import Work
from ds_runtime_kit.checks.inputs import rebuild

CHOICES = 16  # of experts, per subject: every call has others


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
        """Whether so many copies cannot all stay in the cache, or need not leave it."""
        return self.model <= self.cache or nbytes * copies > self.cache


@dataclass(frozen=True, slots=True)
class Subject:
    """What is timed: the calls, one after the other and again; `work` is that of one call."""

    method: str
    calls: Sequence[Callable[[], Any]]
    work: Work
    copies: int = 1
    cold: bool = True
    note: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a kernel is measured. width: of the rows of a small op, where its site has no shape.

    context: cached tokens per sequence. vocab: rows of logits and embedding on this rank.
    """

    kernel: Kernel
    facts: Facts
    width: int
    routing: Routing | None
    layout: Layout
    context: int
    vocab: int
    device: torch.device
    memory: Memory

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return torch_dtype(self.facts.dtype)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Gaussian numbers on the device."""
        return torch.randn(shape, device=self.device).to(dtype or self.dtype)

    def positions(self, tokens: int) -> Tensor:
        return torch.arange(tokens, device=self.device)

    def made(self) -> Any:
        """The function, or the object that it makes."""
        fn = load_attr(self.kernel.fn)
        return fn if self.kernel.op.kind == "function" else fn(self.facts)

    def cos_sin(self, positions: int) -> Tensor:
        return torch.rand(max(1, positions), self.facts.dims["qk_rope"], device=self.device)

    @property
    def cached(self) -> int:
        """Values of a cached token but for its rotated key."""
        dims = self.facts.dims
        expanded = self.layout.tag == EXPANDED_PAGES.tag
        return expanded_width(dims) - dims["qk_rope"] if expanded else dims["kv_lora"]

    def cache(self, pages: int) -> Tensor:
        """One layer's cache in the bound layout, with small random contents."""
        made: Tensor = load_attr(self.layout.allocate)(pages, self.facts, self.device)
        if made.dtype.is_floating_point and not is_fp8(made.dtype):
            return made.normal_()
        made.view(torch.uint8).random_(0, 64)  # small numbers in FP8, whatever else it is
        return made

    def segments(self, tokens: int) -> Segments:
        """One sequence."""
        return Segments((tokens,), torch.tensor([0, tokens], dtype=torch.int32, device=self.device))


def random_weight(place: Place, rows: int, cols: int, fmt: str) -> Weight:
    """A [rows, cols] weight in format `fmt` on the device."""
    make = Maker(place.facts, f"{rows}x{cols}")
    if fmt.startswith("int") and fmt != "int4_actorder":
        part = make.weight(rows, cols, dtype=torch.float32).parts[0]
        return copied(Weight((quantise_part(part, fmt),)), place.device)
    return copied(make.weight(rows, cols, fmt), place.device)


def copied(weight: Weight, device: torch.device) -> Weight:
    """The same values in tensors of their own: a kernel may keep, change or drop them."""

    def convert(leaf: Any) -> Any:
        return leaf.to(device, copy=True) if isinstance(leaf, Tensor) else leaf

    found: Weight = rebuild(weight, convert)
    return found


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


def pack_copies(place: Place, pack: Callable[[], Any]) -> list[Any]:
    """One packed weight, and as many more as keep it out of the cache."""
    first = pack()
    return [first, *(pack() for _ in range(place.memory.copies(first.nbytes) - 1))]


def subject(
    place: Place,
    method: str,
    calls: Sequence[Callable[[], Any]],
    todo: Work,
    packed: Sequence[Any],
    note: str = "",
) -> Subject:
    """A subject that owns weights."""
    cold = place.memory.cold(packed[0].nbytes, len(packed))
    return Subject(method, calls, todo, len(packed), cold, note)


def held(place: Place) -> str:
    """The format in which the kernel keeps its weight: its own or the compute dtype."""
    fmt = place.facts.weight_format
    return fmt if fmt in place.kernel.keeps else "dense"


Inputs = tuple[tuple[Any, ...], Work]


def _rms_norm(p: Place, tokens: int) -> Inputs:
    args = (p.normal(tokens, p.width), p.normal(p.width), 1e-6)
    return args, work.rms_norm(p.width, p.facts.dtype, tokens)


def _add_rms_norm(p: Place, tokens: int) -> Inputs:
    x, residual = p.normal(tokens, p.width), p.normal(tokens, p.width)
    return (x, residual, p.normal(p.width), 1e-6), work.add_rms_norm(p.width, p.facts.dtype, tokens)


def _rms_norm_quantize(p: Place, tokens: int) -> Inputs:
    args = (p.normal(tokens, p.width), p.normal(p.width), 1e-6, _GROUP, False)
    return args, work.rms_norm_quantize(p.width, _GROUP, p.facts.dtype, tokens)


def _add_rms_norm_quantize(p: Place, tokens: int) -> Inputs:
    x, residual = p.normal(tokens, p.width), p.normal(tokens, p.width)
    args = (x, residual, p.normal(p.width), 1e-6, _GROUP, False)
    return args, work.add_rms_norm_quantize(p.width, _GROUP, p.facts.dtype, tokens)


def _silu_mul_quantize(p: Place, tokens: int) -> Inputs:
    args = (p.normal(tokens, 2 * p.width), _GROUP, False)
    return args, work.silu_mul_quantize(p.width, _GROUP, p.facts.dtype, tokens)


def _silu_mul(p: Place, tokens: int) -> Inputs:
    args = (p.normal(tokens, 2 * p.width),)
    return args, work.silu_mul(p.width, p.facts.dtype, tokens)


def _rope(p: Place, tokens: int) -> Inputs:
    heads, nope, d = (p.facts.dims[k] for k in ("heads", "qk_nope", "qk_rope"))
    q = p.normal(tokens, heads, nope + d)[..., nope:]
    args = (q, p.normal(tokens, d), p.positions(tokens), p.cos_sin(tokens))
    return args, work.rope(heads, d, p.facts.dtype, tokens)


def _slots(p: Place, tokens: int) -> tuple[Tensor, Tensor]:
    """A cache, and a free slot in it for each token."""
    return p.cache(-(-tokens // p.facts.page_size)), p.positions(tokens)


def _cache_write(p: Place, tokens: int) -> Inputs:
    cache, slots = _slots(p, tokens)
    lora, d = p.cached, p.facts.dims["qk_rope"]
    args = (cache, p.normal(tokens, lora), p.normal(tokens, d), slots)
    return args, work.cache_write(lora + d, p.facts.dtype, p.facts.kv_dtype, tokens)


def _cache_gather(p: Place, tokens: int) -> Inputs:
    lora, d = p.cached, p.facts.dims["qk_rope"]
    pages = -(-tokens // p.facts.page_size)
    table = torch.randperm(pages).to(torch.int32).unsqueeze(0).to(p.device)
    starts = torch.zeros(1, dtype=torch.int64, device=p.device)
    args = (p.cache(pages), table, starts, p.segments(tokens), lora, p.dtype)
    return args, work.cache_gather(lora + d, p.facts.dtype, p.facts.kv_dtype, tokens)


def _cache_move(p: Place, tokens: int) -> Inputs:
    """Each of `tokens` sequences keeps one entry."""
    cache, width = p.cache(-(-2 * tokens // p.facts.page_size)), p.cached + p.facts.dims["qk_rope"]
    slots = p.positions(2 * tokens).view(2, tokens, 1)
    made = work.cache_move(width, p.facts.kv_dtype, tokens)
    return (cache, slots[0], slots[1]), made


def _mla_prologue(p: Place, tokens: int) -> Inputs:
    dims = p.facts.dims
    heads, nope, d, lora = (dims[k] for k in ("heads", "qk_nope", "qk_rope", "kv_lora"))
    cache, slots = _slots(p, tokens)
    args = (
        p.normal(tokens, heads, nope + d),
        p.normal(tokens, lora + d),
        p.normal(lora),
        1e-6,
        p.positions(tokens),
        p.cos_sin(tokens),
        cache,
        slots,
    )
    return args, work.mla_prologue(heads, lora, d, p.facts.dtype, p.facts.kv_dtype, tokens)


def _mha_prefill(p: Place, tokens: int) -> Inputs:
    dims, segs = p.facts.dims, p.segments(tokens)
    heads, nope, rope, v = (dims[n] for n in ("heads", "qk_nope", "qk_rope", "v"))
    queries = p.normal(tokens, heads, nope), p.normal(tokens, heads, rope)
    keys = p.normal(tokens, heads, nope), p.normal(tokens, rope)
    args = (*queries, *keys, p.normal(tokens, heads, v), segs, segs, True, (nope + rope) ** -0.5)
    return args, work.mha_prefill(heads, nope, rope, v, p.facts.dtype, tokens)


def _mha_prefill_quantize(p: Place, tokens: int) -> Inputs:
    (*parts, segs, _, _, scale), _ = _mha_prefill(p, tokens)
    heads, nope, rope, v = (p.facts.dims[n] for n in ("heads", "qk_nope", "qk_rope", "v"))
    todo = work.mha_prefill_quantize(heads, nope, rope, v, p.facts.dtype, tokens)
    return (*parts, segs, scale, v, False), todo


def _merge_state(p: Place, tokens: int) -> Inputs:
    heads, v = p.facts.dims["heads"], p.facts.dims["v"]
    parts = [
        (p.normal(tokens, heads, v), p.normal(tokens, heads, dtype=torch.float32)) for _ in range(2)
    ]
    return (*parts[0], *parts[1]), work.merge_state(heads, v, p.facts.dtype, tokens)


def _route(p: Place, tokens: int) -> Inputs:
    assert p.routing is not None
    count = p.routing.num_experts
    bias = None
    if p.routing.method == "noaux_tc":
        bias = p.normal(count, dtype=torch.float32) * 0.05
    args = (p.normal(tokens, count, dtype=torch.float32), bias, p.routing)
    return args, work.route(count, p.routing.top_k, tokens)


def _embed(p: Place, tokens: int) -> Inputs:
    table = torch.zeros(p.vocab, p.facts.dims["hidden"], dtype=p.dtype, device=p.device)
    ids = torch.randint(p.vocab, (tokens,), device=p.device)
    return (ids, table, 0), work.embed(p.facts.dims["hidden"], p.facts.dtype, tokens)


def _quantize_group(p: Place, tokens: int) -> Inputs:
    width = p.facts.dims["hidden"]
    args = (p.normal(tokens, width), _GROUP, False)
    return args, work.quantize_group(width, _GROUP, p.facts.dtype, tokens)


def _sample(p: Place, tokens: int) -> Inputs:
    """Temperature alone, as most requests have it."""
    ones = torch.ones(tokens, device=p.device)
    none = torch.zeros(tokens, device=p.device)
    uniform = torch.rand(tokens, dtype=torch.float64, device=p.device)
    logits = p.normal(tokens, p.vocab, dtype=torch.float32)
    args = (logits, ones, none.to(torch.int32), ones, none, uniform)
    return args, work.sample(p.vocab, tokens)


def _mask_logits(p: Place, tokens: int) -> Inputs:
    logits = p.normal(tokens, p.vocab, dtype=torch.float32)
    masks = torch.full((tokens, -(-p.vocab // 32)), 0x5555, dtype=torch.int32, device=p.device)
    which = torch.arange(tokens, dtype=torch.int32, device=p.device)
    return (logits, masks, which), work.mask_logits(p.vocab, tokens)


def _lora_delta(p: Place, tokens: int) -> Inputs:
    out, cols = p.facts.shape
    rank, slots = _LORA
    adapters = torch.arange(tokens, device=p.device, dtype=torch.int32) % slots
    args = (
        p.normal(tokens, 1, out),
        p.normal(tokens, 1, cols),
        p.normal(1, slots, rank, cols),
        p.normal(1, slots, rank, out),
        adapters,
    )
    reached = min(slots, tokens)
    return args, work.lora_delta(out, cols, rank, reached, p.facts.dtype, tokens)


def _logprobs(p: Place, tokens: int) -> Inputs:
    logits = p.normal(tokens, p.vocab, dtype=torch.float32)
    args = (logits, torch.randint(p.vocab, (tokens,), device=p.device), 5)
    return args, work.logprobs(p.vocab, 5, tokens)


_GROUP = 128  # of activations that are quantised
_LORA = (16, 4)  # rank and slots of a measured adapter op
INPUTS: Mapping[str, Callable[[Place, int], Inputs]] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "rms_norm_quantize": _rms_norm_quantize,
    "add_rms_norm_quantize": _add_rms_norm_quantize,
    "silu_mul": _silu_mul,
    "silu_mul_quantize": _silu_mul_quantize,
    "rope": _rope,
    "cache_write": _cache_write,
    "cache_gather": _cache_gather,
    "cache_move": _cache_move,
    "mla_prologue": _mla_prologue,
    "mha_prefill": _mha_prefill,
    "mha_prefill_quantize": _mha_prefill_quantize,
    "merge_state": _merge_state,
    "route": _route,
    "embed": _embed,
    "quantize_group": _quantize_group,
    "sample": _sample,
    "mask_logits": _mask_logits,
    "lora_delta": _lora_delta,
    "logprobs": _logprobs,
    **sparse_subjects.INPUTS,
}
