"""One step as plain data, between scheduler and runner, and from rank 0 to the other ranks.

Scheduler → StepPlan → runner (every rank) → StepResult → scheduler. No tensors in here, so that a
plan crosses processes as msgpack. Decode works come first, then prefill works, of which those that
are absorbed come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from ds_runtime.engine.messages import TokenLogprob
from ds_runtime.sampling_params import SamplingParams

T = TypeVar("T")


class RowInit(msgspec.Struct, kw_only=True):
    """A request takes a row: an index below max_running that owns its device-side state.

    `prompt` is the original prompt and `output` what was generated before a preemption; both
    feed the penalties. `stop_ids` are the ids that min_tokens keeps from being drawn.
    """

    row: int
    params: SamplingParams
    seed: int
    choice: int
    prompt: list[int]
    output: list[int] = []
    stop_ids: list[int] = []


class Work(msgspec.Struct, kw_only=True):
    """One request's share of a step: tokens [start, start + length) of its sequence.

    `tokens` None means a decode step, whose input never left the device. It is the row's last
    sampled token, and after it length − 1 drafts, each of which counts if all before it were right.
    `group`: of ranks, the one that has its pages and computes its attention, where that is divided
    by sequences. `pages` cover at least start + length tokens. `sample`: draw the token at position
    start + length, and in a decode step those before it that follow a draft. `prompt_logprobs`: n
    alternatives wanted for the prompt positions start + 1 … start + length that lie inside the
    prompt (None: not wanted). Such a work lies within the prompt itself. `masks`: the tokens that
    may be drawn, as rows of MaskLogits' masks, for the first of the drawn tokens; an empty one,
    and those behind, allow every token. `next_token`: the one at start + length where it is
    known. `tell_drafts`: bring back what is drafted for the next step. `adapter`: the slot of its
    low-rank adapter, −1 for none. `absorbed`: tokens of a prompt that attend as a decode step's do.
    """

    rid: str
    row: int
    group: int = 0
    start: int
    length: int
    pages: list[int]
    tokens: list[int] | None = None
    sample: bool = True
    prompt_logprobs: int | None = None
    logprobs: int | None = None
    masks: list[bytes] = []
    next_token: int | None = None
    tell_drafts: bool = False
    adapter: int = -1
    absorbed: bool = False

    @property
    def as_decode(self) -> bool:
        """Whether its rows attend the cache as it lies there."""
        return self.tokens is None or self.absorbed

    @property
    def draws(self) -> int:
        """Tokens that it draws: one after each of a decode step's, one behind a prompt."""
        return self.length if self.sample and self.tokens is None else int(self.sample)

    @property
    def logit_rows(self) -> int:
        """Rows of logits: where it draws, and of all tokens for prompt_logprobs.

        Row j of the latter predicts the prompt token at start + 1 + j; if it samples too, its last
        row is the one to sample from.
        """
        return self.length if self.prompt_logprobs is not None else self.draws


class PutAdapter(msgspec.Struct, tag=True):
    """Between steps: read an adapter from `folder` into a slot that no request uses."""

    slot: int
    folder: str


class StepPlan(msgspec.Struct, tag=True, kw_only=True):
    """What to compute now. `drafts`: tokens to draft after each sampled one, in the same step.
    `copies`: before that (group, source, target). On the ranks of this group a block of every state
    becomes a copy of another, in this order. −1 − n is slot n of host memory. `saves` (group, page,
    slot) and `loads` (group, slot, page): in front of the step, too, pages go to host memory, and
    then from there. Another order may give the same. `hurried`: the step may write to pages that it
    saves.
    """

    step: int
    works: list[Work]
    init: list[RowInit] = []
    copies: list[tuple[int, int, int]] = []
    saves: list[tuple[int, int, int]] = []
    loads: list[tuple[int, int, int]] = []
    hurried: bool = False
    drafts: int = 0


class WorkResult(msgspec.Struct, kw_only=True):
    """What one work gave: new tokens in order, one more than drafts were right.

    `logprobs`: of these tokens, where asked. `prompt_logprobs` has one entry per prompt position
    start + 1 … that this work covers. `drafts`: for the next step, where asked. Where they
    branch, `draft_parents` says after which of them each comes, counted from 1, or 0. `broken`: the
    position of the first token, drawn or scored, whose logits were not finite; `tokens` are
    then those before it.
    """

    rid: str
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []
    drafts: list[int] = []
    draft_parents: list[int] = []
    broken: int | None = None


def arranged(works: Sequence[Work], others: Sequence[T]) -> tuple[list[Work], list[T]]:
    """Works in the order of a plan, decode works being first, and what belongs to each."""
    order = sorted(range(len(works)), key=lambda i: not works[i].as_decode)
    return [works[i] for i in order], [others[i] for i in order]


class StepResult(msgspec.Struct, kw_only=True):
    """Results in the order of the plan's works."""

    step: int
    works: list[WorkResult]
