"""The routes. Each parses its body, makes a `Run` and words the answer with a `Format`."""

from __future__ import annotations

import hmac
import logging
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ds_runtime.config import ServerConfig
from ds_runtime.errors import DsRuntimeError, RequestError
from ds_runtime.sampling_params import SamplingParams
from ds_runtime.server.body import parse
from ds_runtime.server.chat import Prompt, chat_prompt, completion_prompts, encode
from ds_runtime.server.client import EngineClient
from ds_runtime.server.errors import ApiError, ClientGoneError, as_api_error, http_error
from ds_runtime.server.formats import ChatFormat, CompletionFormat, Format, GenerateFormat
from ds_runtime.server.metrics import CountRequests, Metrics
from ds_runtime.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    OpenAIRequest,
    TokenizeRequest,
)
from ds_runtime.server.run import Run
from ds_runtime.server.sampling import GenerationDefaults, build_params, check_ids, fit
from ds_runtime.server.stream import stream_response, until_disconnect
from ds_runtime.text.template import ChatTemplate
from ds_runtime.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the front end knows of the model: its name in the API, template and defaults."""

    name: str
    template: ChatTemplate | None = None
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True, slots=True)
class Service:
    """What every route needs."""

    client: EngineClient
    tokenizer: Tokenizer
    config: ServerConfig
    model: ModelInfo
    metrics: Metrics

    def check_model(self, name: str | None) -> None:
        """ApiError 404 unless `name` is the served one (or left out)."""
        if name is not None and name != self.model.name:
            raise ApiError(
                404,
                f"model {name!r} is not served here: use {self.model.name!r}",
                param="model",
                code="model_not_found",
            )

    async def answer(
        self,
        request: Request,
        prefix: str,
        prompts: list[tuple[Prompt, SamplingParams]],
        form: Format,
        stream: bool,
        priority: int | None,
    ) -> Any:
        """Run the prompts and answer whole or as a stream; a client that leaves ends both."""
        run = Run(prefix, prompts, priority or 0, self.client, self.tokenizer, self.metrics)
        try:
            if stream:
                return await stream_response(run, form, request)
            await until_disconnect(request.receive, _finish(run))
        except BaseException:
            run.close()
            raise
        run.close()
        return _json(form.reply(run))


async def _finish(run: Run) -> None:
    async for _ in run.pieces():
        pass


def create_app(
    client: EngineClient, tokenizer: Tokenizer, config: ServerConfig, model: ModelInfo
) -> FastAPI:
    """The ASGI application. `client` must have been started on the loop that runs it."""
    metrics = Metrics(lambda: client.stats)
    service = Service(client, tokenizer, config, model, metrics)
    app = FastAPI(title="ds-runtime", docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_middleware(CountRequests, metrics=metrics)
    for kind in (ApiError, DsRuntimeError, ClientGoneError, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.include_router(_open_routes(service))
    guarded = APIRouter(dependencies=[Depends(_authorise(config.api_key))])
    _openai_routes(guarded, service)
    _native_routes(guarded, service)
    app.include_router(guarded)
    return app


def _open_routes(service: Service) -> APIRouter:
    router = APIRouter()
    client = service.client

    @router.get("/health")
    async def health() -> Response:
        """200 when the engine is ready; 503 while it loads and, with the reason, once it died."""
        if client.dead is not None:
            return _json({"status": "dead", "reason": client.dead}, 503)
        if client.ready is None:
            return _json({"status": "starting"}, 503)
        return _json({"status": "ok"})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    return router


def _openai_routes(router: APIRouter, service: Service) -> None:
    limit, tokenizer, model = service.config.max_body, service.tokenizer, service.model

    @router.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        """OpenAI's chat completions."""
        body = await parse(request, ChatRequest, limit)
        service.check_model(body.model)
        ready = service.client.require()
        params = build_params(
            body,
            model.defaults,
            ready.vocab_size,
            max_tokens=_max_tokens(body),
            logprobs=_chat_logprobs(body),
            prompt_logprobs=body.prompt_logprobs,
        )
        usage = _include_usage(body)
        prompt = await chat_prompt(body, model.template, tokenizer)
        prompts = [(prompt, fit(params, len(prompt.ids), ready, "messages"))]
        form = ChatFormat(model.name, tokenizer, bool(body.logprobs), usage)
        return await service.answer(
            request, "chatcmpl", prompts, form, bool(body.stream), body.priority
        )

    @router.post("/v1/completions")
    async def completions(request: Request) -> Any:
        """OpenAI's (legacy) completions."""
        body = await parse(request, CompletionRequest, limit)
        service.check_model(body.model)
        ready = service.client.require()
        asked = body.logprobs if body.echo else None
        params = build_params(
            body,
            model.defaults,
            ready.vocab_size,
            max_tokens=body.max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=asked if body.prompt_logprobs is None else body.prompt_logprobs,
        )
        usage = _include_usage(body)
        texts = await completion_prompts(body.prompt, tokenizer, ready.vocab_size)
        prompts = [(p, fit(params, len(p.ids), ready, "prompt")) for p in texts]
        wished = body.logprobs is not None
        form = CompletionFormat(model.name, tokenizer, wished, usage, bool(body.echo))
        return await service.answer(
            request, "cmpl", prompts, form, bool(body.stream), body.priority
        )

    @router.get("/v1/models")
    async def models() -> Response:
        """The one model that is served."""
        return _json({"object": "list", "data": [_model(service)]})

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        """The model, if the name is right."""
        service.check_model(name)
        return _json(_model(service))


def _native_routes(router: APIRouter, service: Service) -> None:
    limit, tokenizer, model = service.config.max_body, service.tokenizer, service.model

    @router.post("/generate")
    async def generate(request: Request) -> Any:
        """Text or ids in, text and ids out; no chat template."""
        body = await parse(request, GenerateRequest, limit)
        ready = service.client.require()
        if (body.text is None) == (body.input_ids is None):
            raise RequestError("send exactly one of text and input_ids", "text")
        fields = body.sampling_params
        wished = fields.max_new_tokens
        params = build_params(
            fields,
            model.defaults,
            ready.vocab_size,
            max_tokens=fields.max_tokens if wished is None else wished,
            logprobs=fields.logprobs,
            prompt_logprobs=fields.prompt_logprobs,
            include_stop=fields.include_stop,
        )
        if body.text is not None:
            ids = await encode(tokenizer, body.text, add_special=bool(body.text))
        else:
            ids = body.input_ids or []
            check_ids(ids, ready.vocab_size, "input_ids")
        name = "input_ids" if body.text is None else "text"
        prompts = [(Prompt(ids, body.text), fit(params, len(ids), ready, name))]
        form = GenerateFormat(tokenizer)
        return await service.answer(request, "gen", prompts, form, bool(body.stream), body.priority)

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """Ids of a text or of rendered messages."""
        body = await parse(request, TokenizeRequest, limit)
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("send exactly one of prompt and messages", "prompt")
        if body.prompt is not None:
            ids = await encode(tokenizer, body.prompt, body.add_special_tokens is not False)
        else:
            ids = (await chat_prompt(body, model.template, tokenizer)).ids
        ready = service.client.ready
        limit_ = None if ready is None else ready.context_length
        return _json({"tokens": ids, "count": len(ids), "max_model_len": limit_})

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """Text of ids."""
        body = await parse(request, DetokenizeRequest, limit)
        service.check_model(body.model)
        ready = service.client.ready
        size = tokenizer.vocab_size if ready is None else ready.vocab_size
        check_ids(body.tokens, size, "tokens")
        return _json({"prompt": tokenizer.decode(body.tokens, body.skip_special_tokens)})

    @router.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache() -> Response:
        """Empty the prefix cache; pages in use stay."""
        return _json({"pages_freed": await service.client.flush()})


def _model(service: Service) -> dict[str, Any]:
    ready = service.client.ready
    return {
        "id": service.model.name,
        "object": "model",
        "created": service.model.created,
        "owned_by": "ds-runtime",
        "max_model_len": None if ready is None else ready.context_length,
    }


def _max_tokens(body: ChatRequest) -> int | None:
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise RequestError(
            f"max_completion_tokens is {new} and max_tokens {old}: send one of them",
            "max_completion_tokens",
        )
    return old if new is None else new


def _chat_logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    return None


def _include_usage(body: OpenAIRequest) -> bool:
    if body.stream_options is None:
        return False
    if not body.stream:
        raise RequestError("stream_options needs stream: true", "stream_options")
    return bool(body.stream_options.include_usage)


def _authorise(api_key: str | None) -> Any:
    async def check(request: Request) -> None:
        if api_key is None:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode(), api_key.encode()):
            raise ApiError(
                401,
                "the API key is missing or wrong: send 'Authorization: Bearer KEY' with the key "
                "that the server was started with",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    return check


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    answer = as_api_error(error)
    if answer.status == 500 and isinstance(error, DsRuntimeError):  # others are logged anyway
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    response = _json(answer.body(), answer.status)
    response.headers.update(answer.headers)
    return response


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return await _on_error(
        request, http_error(error.status_code, str(error.detail), request.url.path, error.headers)
    )
