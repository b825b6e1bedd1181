"""One client request through the engine: choices are submitted, pieces come back."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Container, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ds_runtime.engine.messages import SubmitGroup, Tokens
from ds_runtime.errors import LogitsError, RequestError
from ds_runtime.sampling_params import SamplingParams
from ds_runtime.server.engines.replicas import Replicas
from ds_runtime.server.errors import shown
from ds_runtime.server.generate.chat import Prompt
from ds_runtime.server.generate.choice import Choice, Piece, StartParser, make_choices
from ds_runtime.server.generate.sampling import draw_seed
from ds_runtime.server.http.keys import Caller
from ds_runtime.server.metrics import Metrics, Timer
from ds_runtime.text.tokenizer import Tokenizer

MAX_CHOICES = 1024
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PerPrompt:
    """What one prompt of several has for itself. rid: None for an id that is drawn."""

    rid: str | None = None
    adapter: str = ""
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Submission:
    """What one request asks of the engine.

    prompts: each with its parameters. rid: the client's own id for the request; None draws one.
    adapter: its name. own: for each prompt, in place of adapter and cache_salt.
    """

    prompts: list[tuple[Prompt, SamplingParams]]
    priority: int | None = None
    rid: str | None = None
    start_parser: StartParser | None = None
    adapter: str = ""
    cache_salt: str | None = None
    own: Sequence[PerPrompt] = ()

    def each(self) -> Sequence[PerPrompt]:
        """What each prompt has for itself."""
        return self.own or [PerPrompt(None, self.adapter, self.cache_salt)] * len(self.prompts)

    def check_size(self, limit: int) -> None:
        """RequestError if it makes more choices than a request may, or than may wait."""
        count = len(self.prompts)
        total = sum(params.n for _, params in self.prompts)
        if total > MAX_CHOICES:
            raise RequestError(
                f"{count} prompts with n make {total} choices: at most {MAX_CHOICES} fit one "
                "request",
                "n",
            )
        if total > limit:
            # It would be refused for ever, on an idle server too.
            param, how = ("n", "n") if total > count else ("prompt", "the prompts")
            raise RequestError(
                f"{how} make {total} choices at once, but {limit} may wait "
                f"(--max-queued-requests): ask for at most {limit}, or start the server with a "
                "larger --max-queued-requests",
                param,
            )

    def check_ids(self, taken: Container[str], caller: Caller) -> None:
        """RequestError for an id that a request of this caller has, or that is given twice."""
        given = [one for one in (self.rid, *(each.rid for each in self.own)) if one is not None]
        for one in given:
            if caller.own(one) in taken:
                raise RequestError.of(
                    "rid", f" {shown(one)} is that of a running request: draw a new one"
                )
            if given.count(one) > 1:
                raise RequestError.of(
                    "rid", f" has {shown(one)} twice: each prompt needs an id of its own"
                )


@dataclass(frozen=True, slots=True)
class Engines:
    """What all requests run on. running: the open ones by id."""

    client: Replicas
    tokenizer: Tokenizer
    metrics: Metrics
    running: dict[str, Run] = field(default_factory=dict, kw_only=True)


class Run:
    """Submits on construction; `close` aborts whatever has not finished by then.

    `caller`s do not see each other's runs, which may have the same id. asker: who asks.
    begin: when its HTTP request arrived, by `time.perf_counter`; None: now.
    """

    def __init__(
        self,
        prefix: str,
        submission: Submission,
        engines: Engines,
        caller: Caller,
        begin: float | None = None,
        asker: str = "",
    ) -> None:
        submission.check_size(engines.client.require().queue_limit)
        submission.check_ids(engines.running, caller)
        self.id = f"{prefix}-{uuid.uuid4().hex}" if submission.rid is None else submission.rid
        self.caller, self.asker = caller, asker
        each = submission.each()
        self.adapters = {one.adapter for one in each}
        self.created = int(time.time())
        self.prompts = [p for p, _ in submission.prompts]
        key = caller.own(self.id)
        self.choices = make_choices(
            key, submission.prompts, engines.tokenizer, submission.start_parser
        )
        self._by_rid = {c.rid: c for c in self.choices}
        # `ids`: by which it is aborted, or a prompt of it, with the choices of each.
        self.ids = {self.id: [*self._by_rid]}
        self._names = {
            id(prompt): one.rid or self.id for prompt, one in zip(self.prompts, each, strict=True)
        }
        for choice in self.choices if submission.own else ():
            self.ids.setdefault(self.id_of(choice), []).append(choice.rid)
        self._running = set(self._by_rid)
        self._metrics = engines.metrics
        self.timer = Timer(engines.metrics, time.perf_counter() if begin is None else begin)
        self._flight = engines.client.open(self._groups(submission, each))
        self._runs = engines.running
        self._runs.update(dict.fromkeys(map(caller.own, self.ids), self))

    def _groups(self, submission: Submission, each: Sequence[PerPrompt]) -> list[SubmitGroup]:
        rids = iter(self._by_rid)
        return [
            SubmitGroup(
                rids=list(islice(rids, params.n)),
                prompt=prompt.ids,
                params=params,
                seed=draw_seed(params.seed),
                priority=submission.priority or 0,
                adapter=own.adapter,
                client=self.asker,
                salt=self.caller.salt(own.cache_salt),
            )
            for (prompt, params), own in zip(submission.prompts, each, strict=True)
        ]

    def id_of(self, choice: Choice) -> str:
        """The id of the prompt that it answers: its own, or the request's."""
        return self._names[id(choice.prompt)]

    def runs(self, name: str) -> bool:
        """Whether some choice of one of `ids` has not ended."""
        return not self._running.isdisjoint(self.ids.get(name, ()))

    async def pieces(self, whole: bool = False) -> AsyncGenerator[tuple[Choice, Piece]]:
        """Pieces in the order in which the engine makes them, until every choice has ended.

        LogitsError, if that ended some of them: after the others' last piece, or `whole`, where an
        answer without these is none, at once.
        """
        broken: LogitsError | None = None
        while self._running:
            try:
                message = await self._flight.next()
            except LogitsError as e:
                if e.rid not in self._running:
                    continue
                if broken is None:
                    _log.error("%s: %s", self.id, e)
                    broken = e
                if whole:
                    break
                self._running.discard(e.rid)
                self._metrics.finished("abort")
                continue
            if message.rid not in self._running:
                continue  # sent before the engine saw the abort
            choice = self._by_rid[message.rid]
            if message.prompt_logprobs is not None:
                self._spread(choice, message)
            piece = choice.take(message)
            self.timer.tokens(choice.rid, len(piece.tokens), message.prefill_seconds)
            if piece.finish_reason is not None:
                self._running.discard(message.rid)
                self._flight.drop(message.rid)
                self._metrics.finished(piece.finish_reason)
            yield choice, piece
        if broken is not None:
            raise broken

    def _spread(self, choice: Choice, message: Tokens) -> None:
        """Every choice of a prompt shows the prompt's log-probabilities; one message has them."""
        for other in self.choices:
            if other.prompt is choice.prompt:
                other.prompt_logprobs = message.prompt_logprobs

    def abort(self, name: str | None = None) -> None:
        """End now: every choice that runs finishes with "abort" and what it has. name: one of
        `ids`, whose choices alone do."""
        self._flight.abort(None if name is None else self.ids[name])

    def close(self) -> None:
        """The end, whether it was reached or not. May be called twice."""
        for key in map(self.caller.own, self.ids):
            if self._runs.get(key) is self:
                del self._runs[key]
        self._flight.close()
        while self._running:
            self._running.pop()
            self._metrics.finished("abort")
        self.timer.close(self.prompt_tokens, self.generated_tokens)

    @property
    def prompt_tokens(self) -> int:
        """A prompt counts once, however many its choices."""
        return sum(len(p.ids) for p in self.prompts)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had."""
        cached: dict[int, int] = {}
        for c in self.choices:
            key = id(c.prompt)
            cached[key] = max(cached.get(key, 0), c.cached_tokens)
        return sum(cached.values())

    def cached_by_tier(self, choices: Sequence[Choice]) -> dict[str, int] | None:
        """Where those of some choices' prompts were, if there is more than one place."""
        most: dict[int, dict[str, int]] = {}
        for c in choices:
            if (told := c.cached_by_tier) is not None:
                known = most.get(id(c.prompt), told)
                most[id(c.prompt)] = max(known, told, key=lambda one: sum(one.values()))
        if not most:
            return None
        tiers = dict.fromkeys(tier for told in most.values() for tier in told)
        return {tier: sum(told.get(tier, 0) for told in most.values()) for tier in tiers}

    @property
    def generated_tokens(self) -> int:
        """Of all choices so far."""
        return sum(len(c.tokens) for c in self.choices)

    def usage(self, only: Choice | None = None) -> dict[str, Any]:
        """Token counts of the whole request; a prompt counts once however many its choices. `only`:
        of this choice and its prompt, so far."""
        if only is None:
            prompt, completion, cached = (
                self.prompt_tokens,
                self.generated_tokens,
                self.cached_tokens,
            )
        else:
            prompt, completion = len(only.prompt.ids), len(only.tokens)
            cached = only.cached_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        choices = self.choices if only is None else [only]
        if (by_tier := self.cached_by_tier(choices)) is not None:
            usage["prompt_tokens_details"]["cached_tokens_details"] = by_tier
        if parsers := [c.parser for c in choices if c.parser is not None]:
            reasoning = sum(p.reasoning_tokens for p in parsers)
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return usage
