"""POST /generate: text or ids in, text and ids out, no chat template."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ds_runtime.engine.messages import TokenLogprob
from ds_runtime.errors import FieldPath, RequestError
from ds_runtime.sampling_params import SamplingParams, check_number
from ds_runtime.server.errors import shown
from ds_runtime.server.generate.chat import MAX_PROMPTS, Prompt, plain_prompts
from ds_runtime.server.generate.choice import Choice, Piece
from ds_runtime.server.generate.formats import Chunks
from ds_runtime.server.generate.logprobs import native_logprobs, native_top
from ds_runtime.server.generate.prepare import Job, Service, fitted
from ds_runtime.server.generate.protocol import (
    Body,
    CacheSalt,
    Drawing,
    Priority,
    Rid,
    Sampling,
    TokenIds,
)
from ds_runtime.server.generate.run import PerPrompt, Run, Submission
from ds_runtime.server.generate.sampling import build_params, check_ids
from ds_runtime.server.protocols.fields import NATIVE_SAMPLING, Fields
from ds_runtime.server.protocols.translate import ClientNames, Json, Pattern
from ds_runtime.text.tokenizer import Tokenizer


def _many(limit: int = MAX_PROMPTS) -> Any:
    return Field(max_length=limit, fail_fast=True)


class GenerateParams(Drawing):
    """`sampling_params` of /generate. None means the model's default."""

    KNOWN: ClassVar[Fields] = NATIVE_SAMPLING

    max_new_tokens: int | None = 128
    min_new_tokens: int | None = None
    no_stop_trim: bool | None = None
    sampling_seed: int | None = None


_PLAIN = GenerateParams()
# Names of a GenerateParams' fields, by those that all generating routes share.
_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "include_stop_str_in_output": "no_stop_trim",
    "seed": "sampling_seed",
}


class GenerateRequest(Body):
    """POST /generate: exactly one of `text` and `input_ids`, each one prompt or a list of them.

    What may be a list besides these has an entry for each prompt; a null is one that was left out.
    """

    PER_PROMPT: ClassVar[bool] = True

    text: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    input_ids: TokenIds | None = None
    sampling_params: GenerateParams | Annotated[list[GenerateParams | None], _many()] = _PLAIN
    return_logprob: bool | Annotated[list[bool | None], _many()] | None = None
    logprob_start_len: int | Annotated[list[int | None], _many()] | None = None
    top_logprobs_num: int | Annotated[list[int | None], _many()] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    lora_path: str | Annotated[list[str | None], _many()] | None = None  # the name of an adapter
    priority: Priority | None = None
    rid: Rid | Annotated[list[Rid | None], _many()] | None = None
    cache_salt: CacheSalt | Annotated[list[CacheSalt | None], _many()] | None = None


def generate_job(service: Service, body: GenerateRequest) -> Job:
    """The prompts, tokenised and checked."""
    ready, tokenizer = service.client.require(), service.tokenizer
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("send exactly one of text and input_ids", "text")
    if body.input_ids and not isinstance(body.input_ids[0], list):
        check_ids(body.input_ids[:1], ready.vocab_size, "input_ids")  # no text here
    given, param = (body.input_ids, "input_ids") if body.text is None else (body.text, "text")
    found = plain_prompts(given, param, tokenizer, ready)
    many = isinstance(given, list) and not (given and isinstance(given[0], int))
    count = len(given or ()) if many else 1
    for name in () if many else ("rid", "cache_salt"):
        if isinstance(getattr(body, name), list):
            raise RequestError.of(name, " is a list, but there is one prompt: send a string")
    form = GenerateFormat(tokenizer, many, bool(body.return_text_in_logprobs))
    fields: dict[Pattern, Pattern] = {(shared,): (own,) for shared, own in _NAMES.items()}
    if not isinstance(body.sampling_params, list):  # else nobody knows here whose it is
        fields |= {(rule,): ("sampling_params", rule) for rule in ("json_schema", "regex", "ebnf")}
    names = ClientNames(fields=fields)
    with names.kept():
        prompts = list(_prompts(service, body, found, count, param, form))
        next(found, None)  # an empty list says so
    own = [
        PerPrompt(
            _rid(body, i, count, many),
            _adapter(service, body, i, count),
            _each(body.cache_salt, "cache_salt", i, count),
        )
        for i in range(count)
    ]
    rid = body.rid if many and isinstance(body.rid, str) else None
    return Job(Submission(prompts, body.priority, rid, own=own), form, body.stream, names)


def _rid(body: GenerateRequest, i: int, count: int, many: bool) -> str | None:
    """The id of a prompt: one that all were given becomes one of each by its number."""
    rid: str | None = _each(body.rid, "rid", i, count)
    if rid is None and isinstance(body.rid, list):
        return f"gen-{uuid.uuid4().hex}"  # the request's own would end its neighbours as well
    if rid is None or not many or isinstance(body.rid, list):
        return rid
    return f"{rid}_{i}"


def _adapter(service: Service, body: GenerateRequest, i: int, count: int) -> str:
    """The adapter of a prompt, "" for none."""
    name: str = _each(body.lora_path, "lora_path", i, count) or ""
    if name and not service.has_adapter(name):
        known = " or ".join(service.names[1:])
        remedy = f"name {known}" if known else "load it first (/v1/load_lora_adapter)"
        raise RequestError.of("lora_path", f" {shown(name)} is no loaded adapter: {remedy}")
    return name


def _prompts(
    service: Service,
    body: GenerateRequest,
    found: Iterator[Prompt],
    count: int,
    param: str,
    form: GenerateFormat,
) -> Iterator[tuple[Prompt, SamplingParams]]:
    """Each prompt with its parameters; `form` is told what to word of it."""
    before: tuple[Any, ...] = ()
    params = SamplingParams()
    for i in range(count):
        fields = _each(body.sampling_params, "sampling_params", i, count) or _PLAIN
        wished = bool(_each(body.return_logprob, "return_logprob", i, count))
        top = _each(body.top_logprobs_num, "top_logprobs_num", i, count) or 0
        check_number("logprobs", top, "top_logprobs_num")
        start = _each(body.logprob_start_len, "logprob_start_len", i, count)
        prompt = next(found)
        start = _start(start if wished else None, len(prompt.ids))
        asked = (fields, top if wished else None, top if start < len(prompt.ids) else None)
        if not all(a is b for a, b in zip(asked, before, strict=False)) or not before:
            params, before = _params(service, *asked), asked
        form.expect(prompt, start, alone=fields.max_new_tokens == 0)
        yield prompt, fitted(service, params, prompt, param)


def _each(value: Any, name: str, i: int, count: int) -> Any:
    """The value for prompt `i`."""
    if not isinstance(value, list):
        return value
    if len(value) != count:
        raise RequestError.of(
            name,
            f" holds {len(value)} entries, but there are {count} prompts: send one entry for "
            "each, or one value for all",
        )
    return value[i]


def _start(asked: int | None, length: int) -> int:
    """The first position of a prompt whose log-probability is told; `length` for none."""
    name = "logprob_start_len"
    if asked is None or asked == -1:
        return length
    if not 0 <= asked <= length:
        raise RequestError.of(
            name, f" is {shown(asked)}: must be -1, or a position of the prompt's {length} tokens"
        )
    return asked


def _params(
    service: Service, fields: GenerateParams, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    own = {name: getattr(fields, name) for name in Sampling.model_fields.keys() & _OWN}
    own |= {shared: getattr(fields, native) for shared, native in _NAMES.items()}
    alone = fields.max_new_tokens == 0  # the prompt's log-probabilities
    if alone and fields.min_new_tokens:
        raise RequestError.of(
            "min_tokens", f" {fields.min_new_tokens} is above ", FieldPath.of("max_tokens"), " 0"
        )
    return build_params(
        Sampling.model_construct(**own),
        service.model.defaults,
        service.client.require().vocab_size,
        max_tokens=1 if alone else fields.max_new_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


_OWN = GenerateParams.model_fields.keys()


@dataclass(frozen=True, slots=True)
class _Told:
    """What is worded of one prompt. alone: as if no token had been made."""

    start: int
    alone: bool


class GenerateFormat(Chunks):
    """Text and ids side by side, with `meta_info`. Stream events carry all that there is so far.

    many: a list of prompts came, so a list is the answer. texts: log-probabilities have tokens'
    texts.
    """

    cumulative = True

    def __init__(self, tokenizer: Tokenizer, many: bool = False, texts: bool = False) -> None:
        self._tokenizer, self._many = tokenizer, many
        self._texts = tokenizer if texts else None
        self._told: dict[int, _Told] = {}

    def expect(self, prompt: Prompt, start: int, alone: bool) -> None:
        """A prompt of the request, the first of its positions that is told, and whether none of its
        answer is."""
        self._told[id(prompt)] = _Told(start, alone)

    def _entry(self, run: Run, choice: Choice) -> Json:
        told = self._told[id(choice.prompt)]
        tokens = [] if told.alone else choice.tokens
        meta: Json = {
            "id": run.id_of(choice),
            "finish_reason": self._finish(choice, told),
            "prompt_tokens": len(choice.prompt.ids),
            "completion_tokens": len(tokens),
            "cached_tokens": choice.cached_tokens,
        }
        if choice.cached_by_tier is not None:
            meta["cached_tokens_details"] = choice.cached_by_tier
        if choice.params.logprobs is not None:
            meta |= self._logprobs(choice, told)
        if choice.finish_reason is not None:
            meta["e2e_latency"] = time.perf_counter() - run.timer.begin
        text = "" if told.alone else choice.text
        return {"text": text, "output_ids": tokens, "meta_info": meta}

    def _finish(self, choice: Choice, told: _Told) -> Json | None:
        reason, matched = choice.finish_reason, choice.stop_reason
        if reason is None:
            return None
        if reason == "abort":
            return {"type": "abort", "message": "the request was aborted"}
        if reason == "length" or told.alone:
            return {"type": "length", "length": 0 if told.alone else len(choice.tokens)}
        if matched is None and choice.tokens[-1:] and choice.tokens[-1] in self._tokenizer.eos_ids:
            matched = choice.tokens[-1]
        return {"type": "stop", "matched": matched}

    def _logprobs(self, choice: Choice, told: _Told) -> Json:
        """Those of the prompt begin with a null, as nothing is said of what is before them."""
        ids = choice.prompt.ids[told.start :]
        known: list[TokenLogprob | None] = list((choice.prompt_logprobs or ())[told.start :])
        inputs = [None, *known[1:]] if ids and known else [None] * len(ids)
        outputs = [] if told.alone else choice.logprobs
        made = [e.token for e in outputs]
        out: Json = {
            "input_token_logprobs": native_logprobs(inputs, ids, self._texts),
            "output_token_logprobs": native_logprobs(outputs, made, self._texts),
        }
        if choice.params.logprobs:
            out["input_top_logprobs"] = native_top(inputs, self._texts)
            out["output_top_logprobs"] = native_top(outputs, self._texts)
        return out

    def reply(self, run: Run) -> Any:
        """An object, or a list of them for a list of prompts or n above 1."""
        out = [self._entry(run, choice) for choice in run.choices]
        return out if self._many or len(out) > 1 else out[0]

    def chunks(self, run: Run, choice: Choice, piece: Piece) -> Iterator[Json]:
        """One event per piece; which of several choices it is of, says `index`."""
        several = self._many or len(run.choices) > 1
        yield self._entry(run, choice) | ({"index": choice.index} if several else {})

    def last(self, run: Run) -> Iterator[Json]:
        """Nothing more."""
        return iter(())
