"""What a request asks of the sampler. Torch-free; checked once, when it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from ds_runtime.errors import RequestError


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling settings of one request; defaults generate greedily up to 16 tokens.

    temperature 0 is greedy. top_k 0 is off. `logprobs`: None is off, n ≥ 0 also gives the n best
    alternatives per generated token; `prompt_logprobs` likewise for prompt positions. `stop` are
    strings, `stop_token_ids` ids; both end the text before them unless include_stop.
    `max_tokens` None means up to the context's end. `seed` None draws one per request.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is None:
                continue
            if not math.isfinite(value) or not low <= value <= high:
                raise RequestError(f"{name} is {value}: must be between {low} and {high}", name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}", "min_tokens"
            )
        if self.repetition_penalty <= 0.0:
            raise RequestError("repetition_penalty is 0: must be above 0", "repetition_penalty")
        if self.top_p <= 0.0:
            raise RequestError("top_p is 0: must be above 0 and at most 1", "top_p")
        if any(not s for s in self.stop):
            raise RequestError("stop holds an empty string: remove it", "stop")
        for token, bias in self.logit_bias.items():
            if token < 0 or not -100.0 <= bias <= 100.0:
                raise RequestError(
                    f"logit_bias {{{token}: {bias}}}: ids are at least 0, biases within ±100",
                    "logit_bias",
                )

    @property
    def penalised(self) -> bool:
        """Whether token counts matter to this request."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, 1 << 31),
    ("min_tokens", 0, 1 << 31),
    ("temperature", 0.0, 100.0),
    ("top_k", 0, 1 << 31),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 10.0),
    ("logprobs", 0, 20),
    ("prompt_logprobs", 0, 20),
    ("n", 1, 128),
    ("seed", -(1 << 63), (1 << 63) - 1),
)
