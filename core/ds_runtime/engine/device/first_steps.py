"""Steps that a runner runs before it serves.

Two that show that it can, a prefill and a decode step; and those that have everything compiled that
a later one needs, one for each variant of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from ds_runtime.config import EngineConfig
from ds_runtime.engine.step.plan import RowInit, StepPlan, Work
from ds_runtime.engine.step.result import SCORE_ROWS
from ds_runtime.ops.binding.bound import BoundOps
from ds_runtime.ops.contract import Facts, Kernel, load_attr
from ds_runtime.sampling_params import SamplingParams

_DECODE = frozenset({"any", "decode", "verify", "tree"})
_LONG = 8192  # tokens from which on no kernel does otherwise for more
PAGES = 2  # that all sequences of these steps share

Variant = Callable[[int], Hashable]


def representatives(variants: Sequence[tuple[Variant, range]]) -> tuple[int, ...]:
    """Numbers of rows, rising, such that each function has every value that it has in its range."""
    found = set[int]()
    for variant, rows in variants:
        firsts = dict[Hashable, int]()
        for count in rows:
            firsts.setdefault(variant(count), count)
        found.update(firsts.values())
    return tuple(sorted(found))


def one_of_each_kind(bound: BoundOps, layers: int) -> tuple[int, ...]:
    """Of layers whose places have the same kernels and shapes the first, and the last layer."""
    kinds: dict[int, set[Hashable]] = {}
    for site, kernels, facts in bound.places():
        names = tuple(kernel.name for kernel in kernels)
        what = site.op, site.module, names, facts.shape, facts.weight_format, facts.dtype
        kinds.setdefault(site.layer, set()).add((*what, facts.phase))
    firsts = dict[frozenset[Hashable], int]()
    for layer in range(layers):
        firsts.setdefault(frozenset(kinds.get(layer, ())), layer)
    return tuple(sorted({*firsts.values(), layers - 1}))


def _variants(bound: BoundOps, phases: Collection[str], most: int) -> list[tuple[Variant, range]]:
    """Of the bound kernels that have any, once per shape and range of rows."""
    found: dict[tuple[object, ...], tuple[Variant, range]] = {}
    for kernel, facts, ranges in bound.served(most):
        if kernel.compiles.variant and facts.phase in phases:
            key = kernel.compiles.variant, facts.shape, facts.weight_format, facts.dtype
            for rows in ranges:
                found.setdefault((*key, rows), (_variant(kernel, facts), rows))
    return list(found.values())


def _variant(kernel: Kernel, facts: Facts) -> Variant:
    return partial(load_attr(kernel.compiles.variant), facts)


class StepLimits(NamedTuple):
    """Of steps. context: tokens of a sequence. width: of a decode work, at most. sparse: how many
    tokens attention chooses where a sequence has more; 0: it does not. vocab: tokens of a mask.
    adapts: there are slots of adapters."""

    context: int
    width: int
    sparse: int
    vocab: int
    adapts: bool


def covering_steps(bound: BoundOps, config: EngineConfig, limits: StepLimits) -> Iterator[StepPlan]:
    """Steps, in any order, after which none that a scheduler can make compiles anything, over
    `PAGES` pages."""
    steps = _Steps(config, limits)
    every = representatives(_variants(bound, {"any", "prefill"}, steps.rows))
    prompts = representatives(_variants(bound, {"prefill"}, steps.rows))
    decoded = representatives(_variants(bound, _DECODE, steps.decoded))
    long = max(_LONG, 2 * limits.sparse)
    starts = (config.page_size, long) if limits.sparse else (config.page_size,)
    for rows in sorted({*every, 1, steps.rows}):
        yield from steps.prompts(rows, 0)
    for start in starts:
        for rows in every if start == long else sorted({*prompts, 1}):
            yield from steps.prompts(rows, start)
        for rows in sorted({*decoded, 1, steps.decoded}):
            for width in {1, limits.width}:
                yield from steps.decodes(rows, width, start)
    yield from steps.decodes(1, 1, config.page_size, masked=True)
    if limits.adapts:
        yield from steps.prompts(min(steps.rows, 2), 0, adapter=0)
        yield from steps.decodes(1, 1, config.page_size, adapter=0)


class _Steps:
    """Steps of some rows: in each group that has sequences of its own, and in all together. rows,
    decoded: the most that there can be in one, and of those the most of decode works."""

    def __init__(self, config: EngineConfig, limits: StepLimits) -> None:
        self._config, self._limits = config, limits
        self._sequences = max(1, config.max_running_requests // config.groups)
        self._width = min(limits.width, limits.context - 1)
        self.rows = max(1, config.max_step_tokens // config.groups)
        self.decoded = min(self.rows, self._sequences * self._width)

    def prompts(self, rows: int, start: int, adapter: int = -1) -> Iterator[StepPlan]:
        """So many tokens of prompts behind `start` others, of as few sequences as can be."""
        room = self._limits.context - 1
        most = max(1, min(self._config.chunked_prefill_size, room))
        start = min(start, max(0, room - min(rows, most)))
        works = [
            Work(rid="", row=0, start=start, length=n, pages=[], tokens=[0] * n, adapter=adapter)
            for n in _divided(rows, min(most, room - start))
        ]
        for work in works:  # the last layer computes the rows whose logits are wanted
            work.prompt_logprobs = 1
        yield from self._plans(works)

    def decodes(
        self, rows: int, width: int, start: int, masked: bool = False, adapter: int = -1
    ) -> Iterator[StepPlan]:
        """So many tokens of decode works of `width` each, and what is left."""
        width = min(width, self._width)
        start = max(0, min(start, self._limits.context - width))
        masks = [b"\xff" * (4 * -(-self._limits.vocab // 32))] if masked else []
        works = [
            Work(rid="", row=0, start=start, length=n, pages=[], masks=masks, adapter=adapter)
            for n in _divided(rows, width)
        ]
        yield from self._plans(works)

    def _plans(self, works: Sequence[Work]) -> Iterator[StepPlan]:
        if len(works) > self._sequences:
            return
        yield self._plan([(group, work) for group in range(self._config.groups) for work in works])
        if self._config.groups > 1:
            yield self._plan([(i % self._config.groups, work) for i, work in enumerate(works)])

    def _plan(self, placed: Sequence[tuple[int, Work]]) -> StepPlan:
        drafts = self._limits.width - 1
        plan = StepPlan(step=-1, works=[], init=[], drafts=drafts)
        for row, (group, work) in enumerate(sorted(placed, key=lambda own: own[0])):
            end = work.start + work.length
            held = min(end + drafts, self._limits.context)
            pages = [page % PAGES for page in range(-(-held // self._config.page_size))]
            prompt = []
            if work.tokens is not None:  # its end would be scored in slices that all are alike
                prompt = [0] * (work.start + 1 + min(work.length, SCORE_ROWS))
            params = SamplingParams()
            plan.init.append(RowInit(row=row, params=params, seed=0, choice=0, prompt=prompt))
            own = replace(work, row=row, group=group, pages=pages, logprobs=1)
            plan.works.append(own)
        return plan


def _divided(rows: int, most: int) -> list[int]:
    whole, rest = divmod(rows, most)
    return [most] * whole + [rest] * (rest > 0)


class WarmUp(NamedTuple):
    """Plans to launch one after the other, over pages of their own."""

    plans: tuple[StepPlan, StepPlan]
    num_pages: int


def warm_up_length(config: EngineConfig, context_length: int) -> int:
    """Tokens of each sequence's prompt."""
    length = min(context_length - 1, config.chunked_prefill_size, 2 * config.page_size)
    return max(1, min(length, config.max_step_tokens // config.groups))


def warm_up_steps(
    config: EngineConfig, context_length: int, width: int, length: int | None = None
) -> WarmUp:
    """For a sequence, or one in each group that has sequences of its own. width: most tokens of a
    decode work; length: tokens of each prompt.
    """
    size = config.page_size
    length = warm_up_length(config, context_length) if length is None else length
    verified, drafts = min(width, context_length - length), width - 1
    pages = list(range(-(-min(length + verified + drafts, context_length) // size)))
    prompt, init = [0] * length, list[RowInit]()
    prefill, decode = StepPlan(step=-2, works=[], init=init), StepPlan(step=-1, works=[])
    prefill.drafts = decode.drafts = drafts
    for group in range(config.groups):
        init.append(RowInit(row=group, params=SamplingParams(), seed=0, choice=0, prompt=prompt))
        for plan, start, count, tokens in (
            (prefill, 0, length, prompt),
            (decode, length, verified, None),
        ):
            work = Work(rid="", row=group, group=group, start=start, length=count, pages=pages)
            work.tokens, work.logprobs = tokens, 1  # whose kernel is to be warm, too
            plan.works.append(work)
    return WarmUp((prefill, decode), len(pages))
