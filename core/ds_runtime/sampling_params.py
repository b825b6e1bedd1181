"""What a request asks of the sampler. Torch-free; checked once, when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ds_runtime.errors import FieldPath, RequestError, shown
from ds_runtime.output_rules import OutputRules


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling settings of one request. The defaults generate greedily up to 16 tokens.

    * max_tokens: None: up to the context's end. min_tokens: no end before these.
    * temperature: 0 is greedy. top_k: 0 is off. top_p, min_p: 1 and 0 are off.
    * presence_penalty, frequency_penalty: as in OpenAI's API; 0 is off. repetition_penalty: above
      1, tokens that occurred become less likely; 1 is off.
    * logit_bias: token id → what is added to its logit.
    * stop: strings. stop_token_ids: ids. Both end the text before them unless include_stop.
    * ignore_eos: continue after the model's end token.
    * skip_special_tokens: leave special tokens out of the text.
    * logprobs: None is off. n ≥ 0 also returns the n best alternatives per generated token.
    * prompt_logprobs: the same for positions of the prompt.
    * n: choices per prompt.
    * seed: None draws one per request.
    * rules: what the output must look like. Text that completes them ends with finish_reason
      "stop".

    Raises RequestError for a value out of range.
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
                raise RequestError.of(name, f" is {shown(value)}: must be true or false")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError.of(
                "min_tokens",
                f" {self.min_tokens} is above ",
                FieldPath.of("max_tokens"),
                f" {self.max_tokens}",
            )
        if self.repetition_penalty <= 0.0:
            raise RequestError.of("repetition_penalty", " is 0: must be above 0")
        if self.top_p <= 0.0:
            raise RequestError.of("top_p", " is 0: must be above 0 and at most 1")
        if self.rules is not None and not isinstance(self.rules, OutputRules):
            raise RequestError.of("rules", f" is {shown(self.rules)}: must be OutputRules")
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
        raise RequestError.of(name, f" is {shown(value)}: must be {wanted}")
    # Comparisons are exact for integers of any size, and false for NaN.
    if not low <= value <= high:
        raise RequestError.of(name, f" is {shown(value)}: must be between {low} and {high}")


def _check_stops(stops: Any) -> None:
    if not isinstance(stops, tuple | list) or not all(isinstance(s, str) for s in stops):
        raise RequestError.of("stop", f" is {shown(stops)}: must be a tuple of strings")
    if len(stops) > MAX_STOPS:
        raise RequestError.of(
            "stop", f" holds {len(stops)} strings: at most {MAX_STOPS} are looked for"
        )
    if any(not s for s in stops):
        raise RequestError.of("stop", " holds an empty string: remove it")
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARS:
        raise RequestError.of(
            "stop",
            f" holds a string of {longest} characters: at most {MAX_STOP_CHARS} are looked for",
        )


def _check_stop_ids(ids: Any) -> None:
    name = "stop_token_ids"
    if not isinstance(ids, tuple | list):
        raise RequestError.of(name, f" is {shown(ids)}: must be a tuple of token ids")
    if len(ids) > MAX_STOP_IDS:
        raise RequestError.of(name, f" holds {len(ids)} ids: at most {MAX_STOP_IDS} fit")
    for token in ids:
        if not _is_number(token, int) or token < 0:
            raise RequestError.of(
                name, f" holds {shown(token)}: a token id is an integer from 0 on"
            )


def _check_bias(biases: Any) -> None:
    name = "logit_bias"
    if not isinstance(biases, Mapping):
        raise RequestError.of(name, f" is {shown(biases)}: must map token ids to numbers")
    for token, bias in biases.items():
        good = _is_number(token, int) and _is_number(bias, float)
        if not good or token < 0 or not -100.0 <= bias <= 100.0:
            raise RequestError.of(
                name,
                f" {{{shown(token)}: {shown(bias)}}}: ids are integers from 0 on, biases "
                "numbers within ±100",
            )


def _is_number(value: Any, kind: type[int] | type[float]) -> bool:
    allowed = int if kind is int else int | float
    return isinstance(value, allowed) and not isinstance(value, bool)
