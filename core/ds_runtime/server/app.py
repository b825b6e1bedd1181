"""The routes. Each parses its body, makes a `Run` and words the answer with a `Format`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from ds_runtime.config import ServerConfig
from ds_runtime.errors import DsRuntimeError
from ds_runtime.server.engines.client import EngineClient
from ds_runtime.server.engines.replicas import Replicas
from ds_runtime.server.errors import ApiError, ClientGoneError, as_api_error, http_error
from ds_runtime.server.generate.answer import answer, as_json
from ds_runtime.server.generate.prepare import (
    ModelInfo,
    Service,
    chat_job,
    completion_job,
    text_of,
    token_ids,
    tokenizer_info,
)
from ds_runtime.server.generate.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from ds_runtime.server.http.bodies import Bodies
from ds_runtime.server.http.body import parse
from ds_runtime.server.http.guard import BrowserGuard, Guard, json_only
from ds_runtime.server.http.keys import Keys
from ds_runtime.server.http.openapi import describe, request_body
from ds_runtime.server.metrics import EngineView, Metrics
from ds_runtime.server.observe.log import access
from ds_runtime.server.observe.request_record import REQUEST_ID, Exchange, Observe, exchange_of
from ds_runtime.server.operate.adapters import adapter_routes
from ds_runtime.server.operate.admin import admin_routes, open_routes, operator_routes
from ds_runtime.server.operate.dashboard import dashboard_routes
from ds_runtime.server.protocols.anthropic import (
    CountRequest,
    MessagesRequest,
    count_tokens,
    messages_job,
)
from ds_runtime.server.protocols.native import GenerateRequest, generate_job
from ds_runtime.server.protocols.responses import (
    InputTokensRequest,
    ResponsesRequest,
    count_input,
    kept_response,
    responses_job,
)
from ds_runtime.server.protocols.responses_format import as_stream
from ds_runtime.server.protocols.store import Kept, Shelf
from ds_runtime.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


def create_app(
    client: Replicas,
    tokenizer: Tokenizer,
    config: ServerConfig,
    model: ModelInfo,
    tell: Iterable[Callable[[Exchange], None]] = (),
) -> FastAPI:
    """The ASGI application. `client` must have been started on the loop that runs it.

    `tell` are called with every exchange that is over, after the metrics and the access log.
    """
    views = [_view(engine) for engine in client.clients]
    metrics = Metrics(views, model.name, model.text_ended)
    service = Service(client, tokenizer, metrics, config, model)
    # No redirects: their address would be what the client's Host header says.
    app = FastAPI(title="ds-runtime", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    bodies = app.state.bodies = Bodies(config.max_body, lambda: _context(client))
    metrics.watch("body_bytes", "bytes of bodies that are read or worked on", lambda: bodies.held)
    metrics.watch(
        "stream_turn_seconds",
        "time for which tokens gather in a busy front end before they are sent; 0: none",
        lambda: max(engine.turns.pause for engine in client.clients),
    )
    keys = Keys.of(config)
    if keys.any or keys.has_admin:
        app.add_middleware(Guard, keys=keys)
    app.add_middleware(BrowserGuard, config=config, keys=keys)
    if config.cors_origins:  # outermost: a browser asks first, without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID],
        )
    told = [_counted(metrics), access, *tell]
    app.add_middleware(Observe, tell=told)  # added last, it sees the refusals too
    for kind in (ApiError, DsRuntimeError, ClientGoneError, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    for routes in (
        open_routes(service),
        dashboard_routes(),
        _openai_routes(service),
        _later_routes(service),
        _native_routes(service),
        admin_routes(service),
        operator_routes(service),
        adapter_routes(service),
    ):
        app.include_router(routes, dependencies=[Depends(json_only)])
    describe(app, keys.any)
    return app


def _context(client: Replicas) -> int:
    return 0 if client.ready is None else client.ready.context_length


def _view(client: EngineClient) -> EngineView:
    return EngineView(
        stats=lambda: client.stats,
        ready=lambda: client.ready,
        alive=lambda: client.dead is None,
        restarts=lambda: client.restarts,
    )


def _counted(metrics: Metrics) -> Callable[[Exchange], None]:
    def count(exchange: Exchange) -> None:
        metrics.requests.labels(exchange.route, str(exchange.status)).inc()

    return count


def _openai_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=request_body(ChatRequest))
    async def chat(request: Request) -> Any:
        """OpenAI's chat completions."""
        job = await parse(request, ChatRequest, partial(chat_job, service))
        return await answer(service, request, "chatcmpl", job)

    @router.post("/v1/completions", openapi_extra=request_body(CompletionRequest))
    async def completions(request: Request) -> Any:
        """OpenAI's (legacy) completions."""
        job = await parse(request, CompletionRequest, partial(completion_job, service))
        return await answer(service, request, "cmpl", job)

    @router.get("/v1/models")
    async def models() -> Response:
        """The model that is served, and its adapters."""
        found = [_model(service, name) for name in service.names]
        pages = {"first_id": found[0]["id"], "last_id": found[-1]["id"], "has_more": False}
        return as_json({"object": "list", "data": found} | pages)

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        """The model, if the name is right."""
        service.check_model(name)
        return as_json(_model(service, name))

    return router


def _later_routes(service: Service) -> APIRouter:
    router = APIRouter()
    kept, threads = (Kept(service.metrics.dropped.inc) for _ in range(2))
    service.metrics.watch(
        "kept_answers", "responses and threads that are kept", lambda: len(kept) + len(threads)
    )

    @router.post("/v1/responses", openapi_extra=request_body(ResponsesRequest))
    async def create(request: Request) -> Any:
        """OpenAI's responses."""
        prepare = partial(responses_job, service, _shelf(kept, request))
        job = await parse(request, ResponsesRequest, prepare)
        return await answer(service, request, "resp", job)

    @router.post("/v1/responses/input_tokens", openapi_extra=request_body(InputTokensRequest))
    async def input_tokens(request: Request) -> Response:
        """Tokens of the prompt that a response would be made from."""
        prepare = partial(count_input, service, _shelf(kept, request))
        count = await parse(request, InputTokensRequest, prepare)
        return as_json({"object": "response.input_tokens", "input_tokens": count})

    @router.get("/v1/responses/{response_id}")
    async def retrieve(request: Request, response_id: str) -> Response:
        """A response that is still kept; with `stream=true` as events, behind `starting_after`."""
        found = kept_response(_shelf(kept, request), response_id)
        if (events := as_stream(found, request.query_params)) is not None:
            return Response(events, media_type="text/event-stream")
        return Response(found, media_type="application/json")

    @router.delete("/v1/responses/{response_id}")
    async def delete(request: Request, response_id: str) -> Response:
        """Forget a response."""
        shelf = _shelf(kept, request)
        kept_response(shelf, response_id)
        shelf.drop(response_id)
        return as_json({"id": response_id, "object": "response", "deleted": True})

    @router.post("/v1/messages", openapi_extra=request_body(MessagesRequest))
    async def messages(request: Request) -> Any:
        """Anthropic's messages."""
        prepare = partial(messages_job, service, _shelf(threads, request))
        job = await parse(request, MessagesRequest, prepare)
        return await answer(service, request, "msg", job)

    @router.post("/v1/messages/count_tokens", openapi_extra=request_body(CountRequest))
    async def count(request: Request) -> Response:
        """Tokens of a prompt in Anthropic's form."""
        return as_json(await parse(request, CountRequest, partial(count_tokens, service)))

    return router


def _shelf(kept: Kept, request: Request) -> Shelf:
    """Callers see what they have kept themselves. Where all are one, each address has its share."""
    exchange = exchange_of(request.scope)
    return kept.shelf(exchange.caller.name, exchange.caller.name or exchange.client)


def _native_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/generate", openapi_extra=request_body(GenerateRequest))
    async def generate(request: Request) -> Any:
        """Text or ids in, text and ids out; no chat template."""
        job = await parse(request, GenerateRequest, partial(generate_job, service))
        return await answer(service, request, "gen", job)

    @router.post("/tokenize", openapi_extra=request_body(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Ids of a text or of rendered messages."""
        ids = await parse(request, TokenizeRequest, partial(token_ids, service))
        ready = service.client.ready
        context = None if ready is None else ready.context_length
        return as_json({"tokens": ids, "count": len(ids), "max_model_len": context})

    @router.post("/detokenize", openapi_extra=request_body(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """Text of ids."""
        text = await parse(request, DetokenizeRequest, partial(text_of, service))
        return as_json({"prompt": text})

    @router.get("/tokenizer_info")
    async def info() -> Response:
        """The tokenizer's settings, its special tokens as text, and the chat template."""
        return as_json(tokenizer_info(service))

    return router


def _model(service: Service, name: str) -> dict[str, Any]:
    ready, base = service.client.ready, service.model.name
    created = service.model.created
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "ds-runtime",
        "type": "model",  # this and what follows are for Anthropic's clients
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "max_model_len": None if ready is None else ready.context_length,
    } | ({} if name == base else {"parent": base})


async def _on_error(request: Request, error: Exception) -> Response:
    answer = as_api_error(error)
    if answer.is_internal and isinstance(error, DsRuntimeError):  # others are logged anyway
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    response = as_json(answer.body(request.url.path), answer.status)
    response.headers.update(answer.headers)
    if answer.status == 500:
        response.headers[REQUEST_ID] = exchange_of(request.scope).request_id
        response.headers["Connection"] = "close"  # the web server does so: the client must know
    return response


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return await _on_error(
        request, http_error(error.status_code, str(error.detail), request.url.path, error.headers)
    )
