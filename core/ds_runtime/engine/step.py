"""One step as plain data, between scheduler and runner, and from rank 0 to the other ranks.

Scheduler → StepPlan → runner (every rank) → StepResult → scheduler. No tensors in here, so that a
plan crosses processes as msgpack. Decode works come first, then prefill works.
"""

from __future__ import annotations

import msgspec

from ds_runtime.engine.messages import TokenLogprob
from ds_runtime.sampling_params import SamplingParams


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

    `tokens` None means a decode step of length 1 whose input is the row's last sampled token,
    which never left the device. `pages` cover at least start + length tokens. `sample`: draw the
    token at position start + length. `prompt_logprobs`: n alternatives wanted for the prompt
    positions start + 1 … start + length that lie inside the prompt (None: not wanted); such a
    work lies within the prompt itself.
    """

    rid: str
    row: int
    start: int
    length: int
    pages: list[int]
    tokens: list[int] | None = None
    sample: bool = True
    prompt_logprobs: int | None = None
    logprobs: int | None = None


class StepPlan(msgspec.Struct, kw_only=True):
    """What to compute now."""

    step: int
    works: list[Work]
    init: list[RowInit] = []


class WorkResult(msgspec.Struct, kw_only=True):
    """What one work gave. token None where nothing was sampled.

    `prompt_logprobs` has one entry per prompt position start + 1 … that this work covers.
    """

    rid: str
    token: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob] = []


class StepResult(msgspec.Struct, kw_only=True):
    """Results in the order of the plan's works."""

    step: int
    works: list[WorkResult]
