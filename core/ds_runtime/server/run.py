"""One client request through the engine: choices are submitted, pieces come back."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from itertools import islice
from typing import Any

from ds_runtime.engine.messages import SubmitGroup, Tokens
from ds_runtime.errors import RequestError
from ds_runtime.sampling_params import SamplingParams
from ds_runtime.server.chat import Prompt
from ds_runtime.server.choice import Choice, Piece, make_choices
from ds_runtime.server.client import EngineClient
from ds_runtime.server.metrics import Metrics
from ds_runtime.server.sampling import draw_seed
from ds_runtime.text.tokenizer import Tokenizer

MAX_CHOICES = 1024


class Run:
    """Submits on construction; `close` aborts whatever has not finished by then."""

    def __init__(
        self,
        prefix: str,
        prompts: list[tuple[Prompt, SamplingParams]],
        priority: int,
        client: EngineClient,
        tokenizer: Tokenizer,
        metrics: Metrics,
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
                f"{how} make {total} choices at once, but {limit} may wait (--queue-limit): "
                f"ask for at most {limit}, or start the server with a larger --queue-limit",
                param,
            )
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.prompts = [p for p, _ in prompts]
        self.choices = make_choices(self.id, prompts, tokenizer)
        self._by_rid = {c.rid: c for c in self.choices}
        self._running = set(self._by_rid)
        self._timer = metrics.start(sum(len(p.ids) for p in self.prompts))
        self._flight = client.open(self._groups(prompts, priority))

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
                group=f"{self.id}/{n}",
                priority=priority,
            )
            for n, (prompt, params) in enumerate(prompts)
        ]

    async def pieces(self) -> AsyncGenerator[tuple[Choice, Piece]]:
        """Pieces in the order in which the engine makes them, until every choice has ended."""
        while self._running:
            message = await self._flight.next()
            if message.rid not in self._running:
                continue  # sent before the engine saw the abort
            choice = self._by_rid[message.rid]
            self._spread(choice, message)
            piece = choice.take(message)
            self._timer.tokens(choice.rid, len(piece.tokens))
            if piece.finish_reason is not None:
                self._running.discard(message.rid)
                self._flight.drop(message.rid)
                self._timer.finished(piece.finish_reason)
            yield choice, piece

    def _spread(self, choice: Choice, message: Tokens) -> None:
        """Every choice of a prompt shows the prompt's log-probabilities; one message has them."""
        if message.prompt_logprobs is not None:
            for other in self.choices:
                if other.prompt is choice.prompt:
                    other.prompt_logprobs = message.prompt_logprobs

    def close(self) -> None:
        """The end, whether it was reached or not. May be called twice."""
        self._flight.close()
        while self._running:
            self._running.pop()
            self._timer.finished("abort")
        self._timer.close()

    def usage(self) -> dict[str, Any]:
        """Token counts of the whole request; a prompt counts once however many its choices."""
        prompt = sum(len(p.ids) for p in self.prompts)
        completion = sum(len(c.tokens) for c in self.choices)
        cached: dict[int, int] = {}
        for c in self.choices:
            key = id(c.prompt)
            cached[key] = max(cached.get(key, 0), c.cached_tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        }
