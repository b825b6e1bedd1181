"""Routes for whoever operates the server: health, what runs, aborts, cache, profiles."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from ds_runtime._version import __version__
from ds_runtime.errors import EngineDeadError, LogitsError, RequestError
from ds_runtime.sampling_params import SamplingParams
from ds_runtime.server.errors import BROKEN, ApiError
from ds_runtime.server.generate.answer import as_json, finish
from ds_runtime.server.generate.chat import Prompt
from ds_runtime.server.generate.prepare import Service
from ds_runtime.server.generate.protocol import AbortRequest
from ds_runtime.server.generate.run import Run, Submission
from ds_runtime.server.generate.sampling import fit
from ds_runtime.server.http.body import parse
from ds_runtime.server.http.guard import operators_only
from ds_runtime.server.http.keys import Caller
from ds_runtime.server.http.openapi import request_body
from ds_runtime.server.http.stream import until_disconnect
from ds_runtime.server.observe.request_record import exchange_of

_PROBE_SECONDS = 30.0
_SECRET = ("api_key", "admin_api_key", "ssl_keyfile_password")


def open_routes(service: Service) -> APIRouter:
    """What answers without the API key."""
    router = APIRouter()
    client = service.client

    @router.get("/health")
    @router.head("/health", include_in_schema=False)
    async def health() -> Response:
        """200 when an engine is ready, else 503 and why not; 503 too when the server leaves."""
        found = client.health()
        return as_json(found, 200 if found["status"] == "ok" else 503)

    @router.get("/ping")
    @router.head("/ping", include_in_schema=False)
    async def ping() -> Response:
        """What /health answers."""
        return await health()

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    return router


def admin_routes(service: Service) -> APIRouter:
    """What needs an API key, if there is one."""
    router, client = APIRouter(), service.client

    @router.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        """200 once the engine has made a token; 503 if it has not within 30 s, or its logits are
        NaN or infinite."""
        await until_disconnect(request.receive, _one_token(service))
        return as_json({"status": "ok"})

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def get_model_info() -> Response:
        """The model that is served."""
        model, ready = service.model, client.require()
        return as_json(
            {
                "model_path": model.path,
                "tokenizer_path": model.path,
                "served_model_name": model.name,
                "is_generation": True,
                "context_length": ready.context_length,
                "vocab_size": ready.vocab_size,
                "has_chat_template": model.template is not None,
                "default_sampling_params": asdict(model.defaults),
            }
        )

    @router.get("/server_info")
    async def server_info() -> Response:
        """Version, settings as they were settled, capacity and counters."""
        return as_json(_info(service))

    @router.get("/get_server_info")
    async def get_server_info() -> Response:
        """The same, also under the names that other engines use; a state per replica."""
        found = _info(service)
        states = [msgspec.to_builtins(one.stats) for one in client.clients]
        settings = {**found["engine"], **found["server"]}
        return as_json(
            {
                **settings,
                **found,
                "tp_size": settings.get("tp", 1),
                "dp_size": len(states),
                "max_total_num_tokens": found["kv_tokens"],
                "max_req_input_len": found["context_length"] - 1,
                "internal_states": states,
            }
        )

    @router.get("/version")
    async def version() -> Response:
        """The server's version."""
        return as_json({"version": __version__})

    @router.get("/load")
    async def load() -> Response:
        """How many requests are not over yet."""
        return as_json({"server_load": len({*service.running.values()})})

    @router.get("/v1/plan")
    async def plan() -> Response:
        """Which kernel serves which op where, and why: what `ds-runtime plan --json` prints."""
        return as_json(client.require().plan)

    @router.post("/abort_request", openapi_extra=request_body(AbortRequest))
    async def abort_request(request: Request) -> Response:
        """End one request by its id, or one of its prompts by that prompt's, or all of the same API
        key (of all keys, for the admin's); they answer with finish_reason "abort"."""

        caller = exchange_of(request.scope).caller

        def found(body: AbortRequest) -> list[tuple[Run, str]]:
            if not body.abort_all and body.rid is None:
                raise RequestError("send the rid of a request, or abort_all: true", "rid")
            return [
                (run, run.id if body.abort_all else str(body.rid))
                for run in dict.fromkeys(service.running.values())
                if (body.abort_all or run.runs(str(body.rid)))
                and (caller.is_admin or run.caller.name == caller.name)
            ]

        aborted = await parse(request, AbortRequest, found)
        for run, name in aborted:
            run.abort(name)
        return as_json({"aborted": [name for _, name in aborted]})

    return router


def operator_routes(service: Service) -> APIRouter:
    """What changes the server for all: it needs the admin key, if there is one."""
    router = APIRouter(dependencies=[Depends(operators_only)])
    client = service.client

    @router.post("/flush_cache")
    async def flush_cache() -> Response:
        """Empty the prefix cache; pages in use stay."""
        return as_json({"pages_freed": await client.flush()})

    @router.post("/start_profile")
    async def start_profile() -> Response:
        """Begin a trace of the first engine's rank 0, for `--profile-dir`."""
        folder = service.config.profile_dir
        if folder is None:
            raise RequestError("this server writes no traces: start it with --profile-dir DIR")
        await client.profile(folder)
        return as_json({"status": "profiling"})

    @router.post("/stop_profile")
    async def stop_profile() -> Response:
        """End the trace and write it; the answer names the file."""
        return as_json({"path": await client.profile(None)})

    return router


async def _one_token(service: Service) -> None:
    """A token through the whole engine; EngineDeadError when none comes in time, ApiError when it
    cannot be drawn.
    """
    ready = service.client.require()
    params = fit(SamplingParams(max_tokens=1), 1, ready, "prompt")
    run = Run("health", Submission([(Prompt([0]), params)]), service, Caller())
    try:
        await asyncio.wait_for(finish(run), _PROBE_SECONDS)
    except TimeoutError as e:
        raise EngineDeadError(f"no token within {_PROBE_SECONDS:g} s") from e
    except LogitsError as e:
        raise ApiError(503, str(e), type="server_error", code=BROKEN) from e
    finally:
        run.close()


def _info(service: Service) -> dict[str, Any]:
    ready, settings = service.client.require(), asdict(service.config)
    for name in _SECRET:
        settings[name] = "(set)" if settings[name] else None
    return {
        "version": __version__,
        "served_model_name": service.model.name,
        "model_path": service.model.path,
        "weights": _weights(ready.settings),
        "engine": ready.settings,
        "server": settings,
        "context_length": ready.context_length,
        "kv_tokens": ready.kv_tokens,
        "page_size": ready.page_size,
        "stats": msgspec.to_builtins(service.client.stats),
    }


def _weights(engine: Mapping[str, Any]) -> str:
    return "DUMMY" if engine.get("load_format") == "dummy" else "checkpoint"
