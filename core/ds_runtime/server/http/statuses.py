"""Which statuses each route answers with, besides 200: one table, which /openapi.json repeats.

It leaves out what every HTTP server may answer: 400 for what is no request, 405 for another method,
500 for a fault of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MEANING: Mapping[int, str] = {
    400: "what was sent is wrong, or more than this server takes: the message says where",
    401: "the API key is missing or wrong",
    403: "the key may not do this, or a page of another origin asks",
    404: "there is no such model, adapter or kept answer",
    408: "the body came too slowly",
    413: "the body is larger than a prompt of the whole context needs, or than --max-body",
    415: "the body is not application/json",
    500: "the model's logits are NaN or infinite",
    503: "the engine starts or has ended, the server shuts down, or too much waits",
}
_BODY = (400, 408, 413, 415, 503)  # of every route that reads one
_GENERATES = (404, 500)
TABLE: Mapping[tuple[str, str], tuple[int, ...]] = {
    ("post", "/v1/chat/completions"): _GENERATES,
    ("post", "/v1/completions"): _GENERATES,
    ("post", "/v1/responses"): _GENERATES,
    ("post", "/v1/responses/input_tokens"): (404,),
    ("get", "/v1/responses/{response_id}"): (400, 404),
    ("delete", "/v1/responses/{response_id}"): (404,),
    ("post", "/v1/messages"): _GENERATES,
    ("post", "/v1/messages/count_tokens"): (404,),
    ("post", "/generate"): (500,),
    ("post", "/tokenize"): (404,),
    ("post", "/detokenize"): (404,),
    ("get", "/tokenizer_info"): (),
    ("post", "/abort_request"): (),
    ("post", "/v1/load_lora_adapter"): (),
    ("post", "/v1/unload_lora_adapter"): (),
    ("get", "/v1/models"): (),
    ("get", "/v1/models/{name}"): (404, 503),
    ("get", "/health"): (503,),
    ("get", "/ping"): (503,),
    ("get", "/version"): (),
    ("get", "/load"): (),
    ("get", "/health_generate"): (503,),
    ("get", "/metrics"): (),
    ("get", "/get_model_info"): (503,),
    ("get", "/model_info"): (503,),
    ("get", "/server_info"): (503,),
    ("get", "/get_server_info"): (503,),
    ("get", "/v1/plan"): (503,),
    ("post", "/flush_cache"): (503,),
    ("post", "/start_profile"): (400, 503),
    ("post", "/stop_profile"): (400, 503),
}
STREAMS = frozenset(path for (_, path), some in TABLE.items() if 500 in some) | {
    "/v1/responses/{response_id}"
}
_SCHEMAS = "#/components/schemas/"


def statuses(method: str, path: str, reads: bool, guarded: bool) -> tuple[int, ...]:
    """Those of one route. reads: whether it takes a body. guarded: whether it asks for a key."""
    found = {403, *TABLE.get((method, path), ()), *(_BODY if reads else ()), *((401,) * guarded)}
    return tuple(sorted(found))


def responses(method: str, path: str, reads: bool, guarded: bool) -> dict[str, Any]:
    """The `responses` of an operation in OpenAPI's form."""
    kinds = ["application/json"]
    if path == "/metrics":
        kinds = ["text/plain"]
    elif path in STREAMS and method != "delete":
        kinds.append("text/event-stream")
    good = {"description": "the answer", "content": {kind: {} for kind in kinds}}
    out: dict[str, Any] = {"200": good}
    for status in statuses(method, path, reads, guarded):
        name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
        schema = {} if path in ("/health", "/ping") else {"schema": {"$ref": _SCHEMAS + name}}
        out[str(status)] = {
            "description": MEANING[status],
            "content": {"application/json": schema},
        }
    return out


def _object(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "required": [*fields], "properties": fields}


_TEXT_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
ERRORS: Mapping[str, Any] = {
    "Error": _object(
        error=_object(
            message={"type": "string"},
            type={"type": "string"},
            param=_TEXT_OR_NULL,
            code=_TEXT_OR_NULL,
        )
    ),
    "AnthropicError": _object(
        type={"const": "error"},
        error=_object(type={"type": "string"}, message={"type": "string"}),
    ),
}
KEYS: Mapping[str, Any] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
