"""Request fields and the model's defaults become `SamplingParams`."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ds_runtime.checkpoint.base import part_of
from ds_runtime.checkpoint.files import read_settings
from ds_runtime.engine.messages import Ready
from ds_runtime.errors import CheckpointError, FieldPath, RequestError, Said
from ds_runtime.sampling_params import SamplingParams
from ds_runtime.server.errors import ApiError, shown
from ds_runtime.server.generate.protocol import Sampling
from ds_runtime.server.generate.rules import plain_rules
from ds_runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What generation_config.json says; OpenAI's defaults where it says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0

    @classmethod
    def load(cls, folder: str | Path) -> GenerationDefaults:
        """From the checkpoint folder; a file without the fields, or no file, is fine."""
        path = part_of(Path(folder), "generation_config.json")
        found = read_settings(path)
        values: dict[str, Any] = {}
        for name in ("temperature", "top_p", "top_k", "repetition_penalty"):
            value = found.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise CheckpointError(f"{path}: {name} is {value!r}: a number is needed")
            if name == "top_k" and isinstance(value, float) and not value.is_integer():
                raise CheckpointError(f"{path}: top_k is {value!r}: an integer is needed")
            values[name] = int(value) if name == "top_k" else value
        try:
            # -1 is another way to say that top_k is off.
            SamplingParams(**values | ({"top_k": 0} if values.get("top_k") == -1 else {}))
        except RequestError as e:
            raise CheckpointError(f"{path}: {e}; mend the file or take the key out") from e
        if found.get("do_sample") is False:
            values["temperature"] = 0.0
        return cls(**values)


def build_params(
    fields: Sampling,
    defaults: GenerationDefaults,
    vocab_size: int,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Checked parameters; RequestError names the field that is impossible."""
    stop = fields.stop or ()
    top_k = _or(fields.top_k, defaults.top_k)
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens or 0,
        temperature=_or(fields.temperature, defaults.temperature),
        top_k=0 if top_k == -1 else top_k,
        top_p=_or(fields.top_p, defaults.top_p),
        min_p=fields.min_p or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=_or(fields.repetition_penalty, defaults.repetition_penalty),
        logit_bias=_logit_bias(fields.logit_bias or {}),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special_tokens=_or(fields.skip_special_tokens, True),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        n=_or(fields.n, 1),
        seed=fields.seed,
        rules=plain_rules(fields),
    )
    check_ids(params.logit_bias, vocab_size, "logit_bias")
    check_ids(params.stop_token_ids, vocab_size, "stop_token_ids")
    return params


def fit(
    params: SamplingParams, prompt_len: int, ready: Ready, param: str, clamp: bool = False
) -> SamplingParams:
    """`params` with max_tokens set for a prompt that came in field `param`. clamp: to what the
    context has left, if it is above that.

    RequestError for an empty prompt; ApiError context_length_exceeded when the context is too
    short for the prompt, or for prompt and max_tokens together.
    """
    limit = ready.context_length
    check_length(prompt_len, ready, param)
    left = limit - prompt_len
    fills = params.max_tokens is None or (clamp and params.max_tokens > left)
    name, asked = "max_tokens", params.max_tokens or 0
    remedy = "shorten the prompt, or start the server with --clamp-max-tokens"
    if fills:
        name, asked, remedy = "min_tokens", params.min_tokens, "or shorten the prompt"
    if asked > left:
        said = (
            f"the prompt's {prompt_len} tokens and ",
            FieldPath.of(name),
            f" {asked} make {prompt_len + asked}, but the context holds {limit}: ask for at most "
            f"{left} tokens, {remedy}",
        )
        raise _too_long(said, name)
    return msgspec.structs.replace(params, max_tokens=left) if fills else params


def check_length(prompt_len: int, ready: Ready, param: str) -> None:
    """RequestError for an empty prompt, ApiError for one that leaves no room for an answer."""
    limit = ready.context_length
    if prompt_len == 0:
        raise RequestError.of(param, ": the prompt is empty, send at least one token")
    if prompt_len >= limit:
        raise _too_long(
            f"the prompt has {prompt_len} tokens, but the context holds {limit} with the answer: "
            "shorten the prompt, or start the server with a larger --context-length",
            param,
        )


def check_room(
    tokenizer: Tokenizer, text: str, ready: Ready, param: str, contexts: int = 1
) -> None:
    """ApiError context_length_exceeded for text that cannot fit into this many contexts, whatever
    its tokens are: encoding it would take half a minute and gigabytes."""
    if (least := tokenizer.least(text)) >= contexts * ready.context_length:
        counted = f" (what needs {contexts} times as many is not counted)" if contexts > 1 else ""
        raise _too_long(
            f"the prompt has {least} tokens or more, but the context holds {ready.context_length} "
            f"with the answer{counted}: shorten the prompt, or start the server with a larger "
            "--context-length",
            param,
        )


def _too_long(said: Said, param: str) -> ApiError:
    return ApiError(400, said, param=param, code="context_length_exceeded")


def check_ids(ids: Iterable[Any], vocab_size: int, param: str) -> None:
    """RequestError for the first that is not an id of the vocabulary."""
    for index, token in enumerate(ids):
        if type(token) is not int:
            raise RequestError.of(param, f"[{index}] is {shown(token)}: a token id is an integer")
        if not 0 <= token < vocab_size:
            raise RequestError.of(
                param,
                f" holds token id {shown(token)}: the vocabulary's ids are 0 to {vocab_size - 1}",
            )


def draw_seed(asked: int | None) -> int:
    """The client's seed, or one drawn for this prompt."""
    return secrets.randbits(63) if asked is None else asked


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _logit_bias(raw: dict[str, float]) -> dict[int, float]:
    out: dict[int, float] = {}
    for key, bias in raw.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise RequestError.of("logit_bias", f" key {shown(key)}: must be a token id")
        out[int(key)] = bias
    return out
