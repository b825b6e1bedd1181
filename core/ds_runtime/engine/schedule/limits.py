"""What an engine can hold, and which requests it can never serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import msgspec

from ds_runtime.engine.speculate.draft_length import Pace
from ds_runtime.errors import QueueFullError, RequestError
from ds_runtime.ops.contracts.attention.absorbing import Absorbing
from ds_runtime.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one engine can hold. Lengths in tokens; `policy` is "fifo" or "priority".

    `drafts`: tokens that are drafted behind a sampled one; `draft_room`: places after it that
    drafting them takes; `pace`: how many a step drafts, where that varies. `max_itl`: seconds of a
    step that decodes and carries prompts, 0 for any. `prefill_sizes`: tokens of the steps with
    prompts that are captured, rising. `absorbing`: which chunks attend as decode does, None: none.
    """

    context_length: int
    vocab_size: int
    page_size: int
    max_running: int = 64
    max_step_tokens: int = 2048
    prefill_chunk: int = 512
    queue_limit: int = 1024
    policy: str = "fifo"
    eos: tuple[int, ...] = ()
    drafts: int = 0
    draft_room: int = 0
    pace: Pace | None = None
    max_itl: float = 0.0
    prefill_sizes: tuple[int, ...] = ()
    absorbing: Absorbing | None = None

    def check_queue(self, waiting: int) -> None:
        """Raise QueueFullError if no request may join the `waiting` ones."""
        if waiting >= self.queue_limit:
            raise QueueFullError(
                f"{waiting} requests are waiting, the limit is {self.queue_limit} "
                "(--max-queued-requests): try again later"
            )


def check_prompt(prompt: Sequence[int], limits: SchedulerLimits, pool_tokens: int) -> None:
    """Raise RequestError if this can never run. pool_tokens: what the whole KV cache holds."""
    if not prompt:
        raise RequestError("the prompt is empty: it needs at least one token", "prompt")
    if len(prompt) >= limits.context_length:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, the context {limits.context_length} "
            "(--context-length): shorten it so that a token can follow",
            "prompt",
        )
    if len(prompt) > pool_tokens:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, the KV cache holds {pool_tokens}: "
            "shorten it, or start with a larger --kv-memory",
            "prompt",
        )
    _check_ids("prompt", prompt, limits.vocab_size)


def check_params(params: SamplingParams, limits: SchedulerLimits) -> None:
    """Raise RequestError for ids that the vocabulary has not."""
    _check_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    _check_ids("logit_bias", tuple(params.logit_bias), limits.vocab_size)


@cache
def _ids_below(vocab_size: int) -> Any:
    """The type of a list of ids, for msgspec: one pass over a prompt instead of min's and max's."""
    return list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]


def _check_ids(what: str, ids: Sequence[int], vocab_size: int) -> None:
    if not ids:
        return
    try:
        msgspec.convert(ids, _ids_below(vocab_size))
    except msgspec.ValidationError as e:
        low, high = min(ids), max(ids)
        raise RequestError.of(
            what, f" holds id {low if low < 0 else high}: ids are 0 to {vocab_size - 1}"
        ) from e
