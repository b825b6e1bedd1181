"""/openapi.json: the bodies that `body.parse` reads, which the framework does not see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

from ds_runtime.server.protocol import Body

_REF = "#/components/schemas/{model}"
_MARK = "x-body"  # where `describe` finds the model's own definitions


def request_body(kind: type[Body]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads a `kind`."""
    schema = kind.model_json_schema(ref_template=_REF)
    properties = schema.setdefault("properties", {})
    properties.update({name: {} for name in sorted(kind.IGNORED)})
    properties.update({name: {"enum": [None, *some]} for name, some in sorted(kind.ONLY.items())})
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        _MARK: schema.pop("$defs", {}),
    }


def describe(app: FastAPI) -> None:
    """Let `app.openapi()` hold the definitions that the bodies refer to."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        known = app.openapi_schema is not None
        document = made()
        if not known:
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for operation in _operations(document):
                schemas.update(operation.pop(_MARK, {}))
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _operations(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for path in document["paths"].values():
        yield from path.values()
