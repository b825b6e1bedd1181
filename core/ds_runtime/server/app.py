"""The routes. Each parses its body, makes a `Run` and words the answer with a `Format`."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ds_runtime.config import ServerConfig
from ds_runtime.errors import DsRuntimeError
from ds_runtime.server.body import parse
from ds_runtime.server.client import EngineClient
from ds_runtime.server.errors import ApiError, ClientGoneError, as_api_error, http_error
from ds_runtime.server.guard import Guard
from ds_runtime.server.metrics import CountRequests, Metrics
from ds_runtime.server.prepare import (
    Job,
    ModelInfo,
    Service,
    chat_job,
    completion_job,
    generate_job,
    text_of,
    token_ids,
)
from ds_runtime.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from ds_runtime.server.run import Run
from ds_runtime.server.stream import stream_response, until_disconnect
from ds_runtime.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


async def _answer(service: Service, request: Request, prefix: str, job: Job) -> Any:
    """Run the prompts and answer whole or as a stream; a client that leaves ends both."""
    priority, tokenizer = job.priority or 0, service.tokenizer
    run = Run(prefix, job.prompts, priority, service.client, tokenizer, service.metrics)
    try:
        if job.stream:
            return await stream_response(run, job.form, request)
        await until_disconnect(request.receive, _finish(run))
    except BaseException:
        run.close()
        raise
    run.close()
    return _json(job.form.reply(run))


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
    if config.api_key is not None:
        app.add_middleware(Guard, api_key=config.api_key)
    app.add_middleware(CountRequests, metrics=metrics)  # added last, it sees the refusals too
    for kind in (ApiError, DsRuntimeError, ClientGoneError, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.include_router(_open_routes(service))
    app.include_router(_openai_routes(service))
    app.include_router(_native_routes(service))
    return app


def _open_routes(service: Service) -> APIRouter:
    router = APIRouter()
    client = service.client

    @router.get("/health")
    @router.head("/health", include_in_schema=False)
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


def _openai_routes(service: Service) -> APIRouter:
    router, limit = APIRouter(), service.config.max_body

    @router.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        """OpenAI's chat completions."""
        job = await parse(request, ChatRequest, limit, partial(chat_job, service))
        return await _answer(service, request, "chatcmpl", job)

    @router.post("/v1/completions")
    async def completions(request: Request) -> Any:
        """OpenAI's (legacy) completions."""
        job = await parse(request, CompletionRequest, limit, partial(completion_job, service))
        return await _answer(service, request, "cmpl", job)

    @router.get("/v1/models")
    async def models() -> Response:
        """The one model that is served."""
        return _json({"object": "list", "data": [_model(service)]})

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        """The model, if the name is right."""
        service.check_model(name)
        return _json(_model(service))

    return router


def _native_routes(service: Service) -> APIRouter:
    router, limit = APIRouter(), service.config.max_body

    @router.post("/generate")
    async def generate(request: Request) -> Any:
        """Text or ids in, text and ids out; no chat template."""
        job = await parse(request, GenerateRequest, limit, partial(generate_job, service))
        return await _answer(service, request, "gen", job)

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """Ids of a text or of rendered messages."""
        ids = await parse(request, TokenizeRequest, limit, partial(token_ids, service))
        ready = service.client.ready
        context = None if ready is None else ready.context_length
        return _json({"tokens": ids, "count": len(ids), "max_model_len": context})

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """Text of ids."""
        text = await parse(request, DetokenizeRequest, limit, partial(text_of, service))
        return _json({"prompt": text})

    @router.get("/flush_cache")
    @router.post("/flush_cache")
    async def flush_cache() -> Response:
        """Empty the prefix cache; pages in use stay."""
        return _json({"pages_freed": await service.client.flush()})

    return router


def _model(service: Service) -> dict[str, Any]:
    ready = service.client.ready
    return {
        "id": service.model.name,
        "object": "model",
        "created": service.model.created,
        "owned_by": "ds-runtime",
        "max_model_len": None if ready is None else ready.context_length,
    }


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    answer = as_api_error(error)
    if answer.status == 500 and isinstance(error, DsRuntimeError):  # others are logged anyway
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    response = _json(answer.body(), answer.status)
    response.headers.update(answer.headers)
    if answer.status == 500:
        response.headers["Connection"] = "close"  # the web server does so: the client must know
    return response


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return await _on_error(
        request, http_error(error.status_code, str(error.detail), request.url.path, error.headers)
    )
