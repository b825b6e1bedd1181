"""Every error as an HTTP status and OpenAI's error object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from ds_runtime.errors import (
    DsRuntimeError,
    EngineDeadError,
    LogitsError,
    QueueFullError,
    RequestError,
    Said,
    sentence,
)
from ds_runtime.errors import shown as python_shown

_WORDS = json.JSONEncoder(ensure_ascii=False, default=str)
BROKEN = "logits_not_finite"
_INTERNAL = "internal_error"
_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def shown(value: object) -> str:
    """A value of a request for a message, cut short: null, lists and objects as JSON has them."""
    return python_shown(value) if isinstance(value, str) else as_json(value)


def as_json(value: object) -> str:
    """A value as JSON, cut short."""
    text = ""
    try:
        for part in _WORDS.iterencode(value):  # no more of it than is shown
            text += part
            if len(text) > 80:
                return text[:77] + "..."
    except ValueError:  # Python refuses to write the longest integers
        return python_shown(value)
    return text


class ApiError(Exception):
    """An answer that is not the wished one. `said`: the sentence, and the fields that it names.
    `type` and `code` as OpenAI's clients know them, `details` as Anthropic's."""

    def __init__(
        self,
        status: int,
        said: Said,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        self.said = sentence(said)
        super().__init__(self.message)
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.details = details

    @property
    def message(self) -> str:
        """The sentence as text."""
        return "".join(map(str, self.said))

    @property
    def is_internal(self) -> bool:
        """Whether it says nothing, so that the log has to."""
        return self.code == _INTERNAL

    def body(self, path: str = "") -> dict[str, Any]:
        """The JSON object that goes over the wire; Anthropic's on its own route."""
        if path.startswith("/v1/messages"):
            error: dict[str, Any] = {"type": _ANTHROPIC.get(self.status, "api_error")}
            error |= {"message": self.message} | ({"details": self.details} if self.details else {})
            return {"type": "error", "error": error}
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class ClientGoneError(Exception):
    """The client closed its connection; nobody reads an answer."""


class NotReadyError(DsRuntimeError):
    """The engine is still loading."""


class DrainingError(DsRuntimeError):
    """The server finishes what runs and takes nothing new."""


def as_api_error(error: Exception) -> ApiError:
    """The answer for any exception; those that are not ours become a 500 without details."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, error.said, param=error.param, code="invalid_value")
        case QueueFullError():
            return _unavailable(str(error), "queue_full", error.retry_after)
        case NotReadyError():
            return _unavailable(str(error), "engine_starting", 5)
        case DrainingError():
            return _unavailable(str(error), "shutting_down", None)
        case LogitsError():
            return ApiError(500, str(error), type="server_error", code=BROKEN)
        case EngineDeadError():
            return _unavailable(str(error), "engine_dead", None)
        case ClientGoneError():
            return ApiError(499, "the client closed the connection", code="client_gone")
    return ApiError(
        500,
        "internal error: see the server's log",
        type="server_error",
        code=_INTERNAL,
    )


def http_error(status: int, detail: str, path: str, headers: Mapping[str, str] | None) -> ApiError:
    """For the framework's own refusals: no such route, wrong method."""
    message, code = detail, None
    if status == HTTPStatus.NOT_FOUND:
        message, code = f"there is no route {path}: see /openapi.json for the list", "not_found"
    elif status == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (headers or {}).get("Allow", "another method")
        message, code = f"{path} does not take this method: use {allowed}", "method_not_allowed"
    return ApiError(status, message, code=code, headers=headers)


def _unavailable(message: str, code: str, retry_after: int | None) -> ApiError:
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return ApiError(503, message, type="server_error", code=code, headers=headers)
