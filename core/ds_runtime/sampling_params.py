"""What a request asks of the sampler. Torch-free; checked once, when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ds_runtime.errors import RequestError, shown
from ds_runtime.output_rules import OutputRules


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling settings of one request; defaults generate greedily up to 16 tokens.

    temperature 0 is greedy. top_k 0 is off. `logprobs`: None is off, n ≥ 0 also gives the n best
    alternatives per generated token; `prompt_logprobs` likewise for prompt positions. `stop` are
    strings, `stop_token_ids` ids; both end the text before them unless include_stop.
    `max_tokens` None means up to the context's end. `seed` None draws one per request. `rules`:
    what the output must look like; text that they complete ends with finish_reason "stop".
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
    rules: OutputRules | None = None

    def __post_init__(self) -> None:
        for name in _RANGES:
            check_number(name, getattr(self, name))
        for name in _FLAGS:
            if not isinstance(value := getattr(self, name), bool):
                raise RequestError(f"{name} is {shown(value)}: must be true or false", name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}", "min_tokens"
            )
        if self.repetition_penalty <= 0.0:
            raise RequestError("repetition_penalty is 0: must be above 0", "repetition_penalty")
        if self.top_p <= 0.0:
            raise RequestError("top_p is 0: must be above 0 and at most 1", "top_p")
        if self.rules is not None and not isinstance(self.rules, OutputRules):
            raise RequestError(f"rules is {shown(self.rules)}: must be OutputRules", "rules")
        _check_stops(self.stop)
        _check_stop_ids(self.stop_token_ids)
        _check_bias(self.logit_bias)

    @property
    def penalised(self) -> bool:
        """Whether token counts matter to this request."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 256
_FLAGS = ("ignore_eos", "include_stop", "skip_special_tokens")
_OPTIONAL = frozenset({"max_tokens", "logprobs", "prompt_logprobs", "seed"})
_RANGES: dict[str, tuple[type[int] | type[float], float, float]] = {
    "max_tokens": (int, 1, 1 << 31),
    "min_tokens": (int, 0, 1 << 31),
    "temperature": (float, 0.0, 100.0),
    "top_k": (int, 0, 1 << 31),
    "top_p": (float, 0.0, 1.0),
    "min_p": (float, 0.0, 1.0),
    "presence_penalty": (float, -2.0, 2.0),
    "frequency_penalty": (float, -2.0, 2.0),
    "repetition_penalty": (float, 0.0, 10.0),
    "logprobs": (int, 0, 20),
    "prompt_logprobs": (int, 0, 20),
    "n": (int, 1, 128),
    "seed": (int, -(1 << 63), (1 << 63) - 1),
}


def check_number(field: str, value: Any, name: str | None = None) -> None:
    """RequestError unless `value` is in the range of `field`, which the user wrote as `name`."""
    if value is None and field in _OPTIONAL:
        return
    name = field if name is None else name
    kind, low, high = _RANGES[field]
    if not _is_number(value, kind):
        wanted = "an integer" if kind is int else "a number"
        raise RequestError(f"{name} is {shown(value)}: must be {wanted}", name)
    # Comparisons are exact for integers of any size, and false for NaN.
    if not low <= value <= high:
        raise RequestError(f"{name} is {shown(value)}: must be between {low} and {high}", name)


def _check_stops(stops: Any) -> None:
    if not isinstance(stops, tuple | list) or not all(isinstance(s, str) for s in stops):
        raise RequestError(f"stop is {shown(stops)}: must be a tuple of strings", "stop")
    if len(stops) > MAX_STOPS:
        raise RequestError(
            f"stop holds {len(stops)} strings: at most {MAX_STOPS} are looked for", "stop"
        )
    if any(not s for s in stops):
        raise RequestError("stop holds an empty string: remove it", "stop")
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARS:
        raise RequestError(
            f"stop holds a string of {longest} characters: at most {MAX_STOP_CHARS} are looked for",
            "stop",
        )


def _check_stop_ids(ids: Any) -> None:
    name = "stop_token_ids"
    if not isinstance(ids, tuple | list):
        raise RequestError(f"{name} is {shown(ids)}: must be a tuple of token ids", name)
    if len(ids) > MAX_STOP_IDS:
        raise RequestError(f"{name} holds {len(ids)} ids: at most {MAX_STOP_IDS} fit", name)
    for token in ids:
        if not _is_number(token, int) or token < 0:
            raise RequestError(
                f"{name} holds {shown(token)}: a token id is an integer from 0 on", name
            )


def _check_bias(biases: Any) -> None:
    name = "logit_bias"
    if not isinstance(biases, Mapping):
        raise RequestError(f"{name} is {shown(biases)}: must map token ids to numbers", name)
    for token, bias in biases.items():
        good = _is_number(token, int) and _is_number(bias, float)
        if not good or token < 0 or not -100.0 <= bias <= 100.0:
            raise RequestError(
                f"{name} {{{shown(token)}: {shown(bias)}}}: ids are integers from 0 on, biases "
                "numbers within ±100",
                name,
            )


def _is_number(value: Any, kind: type[int] | type[float]) -> bool:
    allowed = int if kind is int else int | float
    return isinstance(value, allowed) and not isinstance(value, bool)
