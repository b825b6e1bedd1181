"""One client request through the engine: choices are submitted, pieces come back."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
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


class Run:
    """Submits on construction; `close` aborts whatever has not finished by then.

    `running` holds every open run. `rid` is the client's own id for it; None draws one. `caller`s
    do not see each other's: their runs may have the same id.
    begin: when its HTTP request arrived, by `time.perf_counter`; None: now. adapter: its name.
    asker: who asks. own: for each prompt, in place of adapter and cache_salt.
    """

    def __init__(
        self,
        prefix: str,
        prompts: list[tuple[Prompt, SamplingParams]],
        priority: int,
        caller: Caller,
        client: Replicas,
        tokenizer: Tokenizer,
        metrics: Metrics,
        running: dict[str, Run],
        rid: str | None = None,
        start_parser: StartParser | None = None,
        begin: float | None = None,
        adapter: str = "",
        cache_salt: str | None = None,
        asker: str = "",
        own: Sequence[PerPrompt] = (),
    ) -> None:
        total = sum(params.n for _, params in prompts)
        if total > MAX_CHOICES:
            raise RequestError(
                f"{len(prompts)} prompts with n make {total} choices: at most {MAX_CHOICES} fit "
                "one request",
                "n",
            )
        limit = client.require().queue_limit
        if total > limit:
            # It would be refused for ever, on an idle server too.
            param, how = ("n", "n") if total > len(prompts) else ("prompt", "the prompts")
            raise RequestError(
                f"{how} make {total} choices at once, but {limit} may wait "
                f"(--max-queued-requests): ask for at most {limit}, or start the server with a "
                "larger --max-queued-requests",
                param,
            )
        given = [one for one in (rid, *(each.rid for each in own)) if one is not None]
        for one in given:
            if caller.own(one) in running:
                raise RequestError.of(
                    "rid", f" {shown(one)} is that of a running request: draw a new one"
                )
            if given.count(one) > 1:
                raise RequestError.of(
                    "rid", f" has {shown(one)} twice: each prompt needs an id of its own"
                )
        self.id = f"{prefix}-{uuid.uuid4().hex}" if rid is None else rid
        self.caller, self.asker = caller, asker
        self._key = caller.own(self.id)
        self._own = own or [PerPrompt(None, adapter, cache_salt)] * len(prompts)
        self.adapters = {each.adapter for each in self._own}
        self.created = int(time.time())
        self.prompts = [p for p, _ in prompts]
        self.choices = make_choices(self._key, prompts, tokenizer, start_parser)
        self._by_rid = {c.rid: c for c in self.choices}
        # `ids`: by which it is aborted, or a prompt of it, with the choices of each.
        self.ids = {self.id: [*self._by_rid]}
        self._names = {
            id(prompt): each.rid or self.id
            for prompt, each in zip(self.prompts, self._own, strict=True)
        }
        for choice in self.choices if own else ():
            self.ids.setdefault(self.id_of(choice), []).append(choice.rid)
        self._running = set(self._by_rid)
        self._metrics = metrics
        self.timer = Timer(metrics, time.perf_counter() if begin is None else begin)
        self._flight = client.open(self._groups(prompts, priority))
        self._runs = running
        running.update(dict.fromkeys(map(caller.own, self.ids), self))

    def _groups(
        self, prompts: list[tuple[Prompt, SamplingParams]], priority: int
    ) -> list[SubmitGroup]:
        rids = iter(self._by_rid)
        return [
            SubmitGroup(
                rids=list(islice(rids, params.n)),
                prompt=prompt.ids,
                params=params,
                seed=draw_seed(params.seed),
                priority=priority,
                adapter=own.adapter,
                client=self.asker,
                salt=self.caller.salt(own.cache_salt),
            )
            for (prompt, params), own in zip(prompts, self._own, strict=True)
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
