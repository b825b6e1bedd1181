"""The engine that a plugin's routes get: prompts in, text and tokens out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from ds_runtime.errors import RequestError
from ds_runtime.plugins.routes import Generated, RoutedEngine
from ds_runtime.sampling_params import SamplingParams
from ds_runtime.server.generate.chat import Prompt
from ds_runtime.server.generate.prepare import Service, fitted
from ds_runtime.server.generate.run import Run, Submission
from ds_runtime.server.generate.sampling import check_ids, check_room
from ds_runtime.server.http.keys import Caller


class ServedEngine(RoutedEngine):
    """The `RoutedEngine` of a server: requests go the way of its own routes'."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @property
    def ready(self) -> bool:
        return bool(self._service.client.serving)

    @property
    def model(self) -> str:
        return self._service.model.name

    def encode(self, text: str) -> list[int]:
        return self._service.tokenizer.encode(text, add_special=True)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._service.tokenizer.decode(tokens)

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        priority: int = 0,
        adapter: str = "",
    ) -> AsyncGenerator[Generated]:
        """As RoutedEngine says."""
        params = SamplingParams() if params is None else params
        run = self._run(prompt, params, priority, adapter)
        try:
            async for _, piece in run.pieces():
                if piece.tokens or piece.text or piece.finish_reason:
                    yield Generated(piece.text, piece.tokens, piece.finish_reason)
        finally:
            run.close()

    def _run(
        self, prompt: str | Sequence[int], params: SamplingParams, priority: int, adapter: str
    ) -> Run:
        """The request, on its way."""
        service = self._service
        ready, tokenizer = service.client.require(), service.tokenizer
        if params.n != 1:
            raise RequestError.of("n", f" {params.n}: generate makes one answer, call it again")
        if adapter and not service.has_adapter(adapter):
            raise RequestError.of(
                "adapter",
                f" {adapter!r} is not loaded; loaded: {', '.join(service.names[1:]) or 'none'}",
            )
        if isinstance(prompt, str):
            check_room(tokenizer, prompt, ready, "prompt")
            ids = self.encode(prompt)
        else:
            ids = list(prompt)
            check_ids(ids, ready.vocab_size, "prompt")
        for field in ("logit_bias", "stop_token_ids"):
            check_ids(getattr(params, field), ready.vocab_size, field)
        whole = Prompt(ids, prompt if isinstance(prompt, str) else None)
        prompts = [(whole, fitted(service, params, whole, "prompt"))]
        return Run("route", Submission(prompts, priority, adapter=adapter), service, Caller())
