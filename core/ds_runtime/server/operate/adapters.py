"""Routes that load and unload low-rank adapters while the server runs."""

from __future__ import annotations

import asyncio
from functools import partial

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from ds_runtime.errors import RequestError
from ds_runtime.server.errors import shown
from ds_runtime.server.generate.answer import as_json
from ds_runtime.server.generate.prepare import Service
from ds_runtime.server.generate.protocol import LoadAdapterRequest, UnloadAdapterRequest
from ds_runtime.server.http.body import parse
from ds_runtime.server.http.guard import operators_only
from ds_runtime.server.http.openapi import request_body

_LOOK_SECONDS = 0.02


def adapter_routes(service: Service) -> APIRouter:
    """What changes the server for all: it needs the admin key, if there is one."""
    router = APIRouter(dependencies=[Depends(operators_only)])
    client = service.client

    @router.post("/v1/load_lora_adapter", openapi_extra=request_body(LoadAdapterRequest))
    async def load(request: Request) -> Response:
        """Load a PEFT folder of the server's machine; its name is a model from then on."""
        check = partial(_loadable, service)
        body = await parse(request, LoadAdapterRequest, check)
        await client.adapt(body.lora_name, body.lora_path)
        return as_json({"lora_name": body.lora_name, "adapters": client.adapters})

    @router.post("/v1/unload_lora_adapter", openapi_extra=request_body(UnloadAdapterRequest))
    async def unload(request: Request) -> Response:
        """Take no more requests for an adapter, wait for those that run, and free its slot."""
        check = partial(_unloadable, service)
        name = await parse(request, UnloadAdapterRequest, check)
        service.leaving.add(name)
        try:
            while any(name in run.adapters for run in service.running.values()):
                await asyncio.sleep(_LOOK_SECONDS)
            await client.adapt(name, None)
        finally:
            service.leaving.discard(name)
        return as_json({"lora_name": name, "adapters": client.adapters})

    return router


def _loadable(service: Service, body: LoadAdapterRequest) -> LoadAdapterRequest:
    service.client.require()
    if body.lora_name == service.model.name:
        raise RequestError.of(
            "lora_name", f" {shown(body.lora_name)} is the model's own name: choose another"
        )
    return body


def _unloadable(service: Service, body: UnloadAdapterRequest) -> str:
    service.client.require()
    name = body.lora_name
    if not service.has_adapter(name):
        if name in service.leaving:
            raise RequestError(f"adapter {shown(name)} is being unloaded already", "lora_name")
        known = ", ".join(service.names[1:]) or "none"
        raise RequestError(f"adapter {shown(name)} is not loaded; loaded are: {known}", "lora_name")
    return name
