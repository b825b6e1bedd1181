"""/openapi.json: the bodies and statuses of routes, neither of which the framework sees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

from ds_runtime.server.generate.protocol import Body
from ds_runtime.server.http.body import nested_bodies
from ds_runtime.server.http.guard import OPEN_PATHS
from ds_runtime.server.http.statuses import ERRORS, KEYS, TABLE, responses
from ds_runtime.server.protocols.fields import neutral_values

_REF = "#/components/schemas/{model}"
_MARK = "x-body"  # where `describe` finds the model's own definitions


def request_body(kind: type[Body]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads a `kind`."""
    schema = kind.model_json_schema(ref_template=_REF)
    parts = schema.pop("$defs", {})
    _tell_known(kind, schema)
    for nested in nested_bodies(kind).values():
        _tell_known(nested, parts[nested.__name__])
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        _MARK: parts,
    }


def _tell_known(kind: type[Body], schema: dict[str, Any]) -> None:
    """Add to the schema of a body what it accepts of fields that it has not."""
    properties = schema.setdefault("properties", {})
    for name, also in kind.KNOWN.items():
        if name not in properties:
            properties[name] = {} if also is None else {"enum": neutral_values(also)}
    schema["additionalProperties"] = {"type": "null"}


def describe(app: FastAPI, guarded: bool) -> None:
    """Let `app.openapi()` hold the definitions that the bodies refer to, and what is answered.

    guarded: whether routes ask for a key.
    """
    made = app.openapi

    def openapi() -> dict[str, Any]:
        known = app.openapi_schema is not None
        document = made()
        if not known:
            parts = document.setdefault("components", {})
            schemas = parts["schemas"] = dict(ERRORS)
            if guarded:
                parts["securitySchemes"] = dict(KEYS)
            for method, path, operation in _operations(document):
                schemas.update(operation.pop(_MARK, {}))
                asks = guarded and path not in OPEN_PATHS
                if (method, path) in TABLE:
                    reads = "requestBody" in operation
                    operation["responses"] = responses(method, path, reads, asks)
                if asks:
                    operation["security"] = [{name: []} for name in KEYS]
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation
