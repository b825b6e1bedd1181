"""The two steps that a runner runs before it serves: a prefill and a decode step."""

from __future__ import annotations

from typing import NamedTuple

from ds_runtime.config import EngineConfig
from ds_runtime.engine.step.plan import RowInit, StepPlan, Work
from ds_runtime.sampling_params import SamplingParams


class WarmUp(NamedTuple):
    """Plans to launch one after the other, over pages of their own."""

    plans: tuple[StepPlan, StepPlan]
    num_pages: int


def sequences_apart(config: EngineConfig) -> int:
    """Sequences at most that are in groups of their own."""
    return min(config.attn_dp, config.max_running_requests)


def warm_up_length(config: EngineConfig, context_length: int) -> int:
    """Tokens of each sequence's prompt."""
    length = min(context_length - 1, config.chunked_prefill_size, 2 * config.page_size)
    return max(1, min(length, config.max_step_tokens // sequences_apart(config)))


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
    for group in range(sequences_apart(config)):
        init.append(RowInit(row=group, params=SamplingParams(), seed=0, choice=0, prompt=prompt))
        for plan, start, count, tokens in (
            (prefill, 0, length, prompt),
            (decode, length, verified, None),
        ):
            work = Work(rid="", row=group, group=group, start=start, length=count, pages=pages)
            work.tokens, work.logprobs = tokens, 1  # whose kernel is to be warm, too
            plan.works.append(work)
    return WarmUp((prefill, decode), len(pages))
