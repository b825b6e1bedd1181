"""One client request through the engine: choices are submitted, pieces come back."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from ds_runtime.engine.messages import Submit
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
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.prompts = [p for p, _ in prompts]
        self.choices = make_choices(self.id, prompts, tokenizer)
        self._by_rid = {c.rid: c for c in self.choices}
        self._timer = metrics.start(sum(len(p.ids) for p in self.prompts))
        self._flight = client.open(self._submits(prompts, priority))

    def _submits(self, prompts: list[tuple[Prompt, SamplingParams]], priority: int) -> list[Submit]:
        out: list[Submit] = []
        for n, (prompt, params) in enumerate(prompts):
            seed = draw_seed(params.seed)
            for choice in range(params.n):
                out.append(
                    Submit(
                        rid=self.choices[len(out)].rid,
                        prompt=prompt.ids,
                        params=params,
                        seed=seed,
                        choice=choice,
                        group=f"{self.id}/{n}",
                        priority=priority,
                    )
                )
        return out

    async def pieces(self) -> AsyncGenerator[tuple[Choice, Piece]]:
        """Pieces in the order in which the engine makes them, until every choice has ended."""
        running = set(self._by_rid)
        while running:
            message = await self._flight.next()
            choice = self._by_rid[message.rid]
            if message.rid not in running:
                continue  # sent before the engine saw the abort
            piece = choice.take(message)
            self._timer.tokens(choice.rid, len(piece.tokens))
            if piece.finish_reason is not None:
                running.discard(message.rid)
                self._flight.drop(message.rid)
                self._timer.finished(piece.finish_reason)
            yield choice, piece

    def close(self) -> None:
        """The end, whether it was reached or not. May be called twice."""
        self._flight.close()
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
