"""A chat with an OpenAI-compatible server: one streamed answer at a time, over one connection each.

Closing the connection is how a client says that it wants no more, so an answer that is not read to
its end stops on the server, too.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Generator
from typing import Any, cast

from ds_runtime.common.address import Address, checked_key
from ds_runtime.errors import DsRuntimeError, shown

_ERROR_BYTES = 1 << 16


class RemoteError(DsRuntimeError):
    """The server cannot be reached, refused, or broke off."""


class Remote:
    """A server by its base URL, with or without /v1. Raises ConfigError for one that is none."""

    def __init__(self, base_url: str, api_key: str | None, timeout: float = 600.0) -> None:
        address = Address.of(base_url)
        self._address = (address.host, address.port)
        self._tls, self._path = address.tls, address.prefix
        self._url, self._key, self._timeout = base_url, checked_key(api_key), timeout

    def model(self) -> str:
        """The first model that the server offers."""
        connection, reply = self._ask("GET", "/v1/models", None)
        try:
            found = json.loads(reply.read())
            return str(found["data"][0]["id"])
        except (OSError, http.client.HTTPException) as e:
            raise RemoteError(f"{self._url}: /v1/models broke off: {e or type(e).__name__}") from e
        except (ValueError, LookupError, TypeError) as e:
            raise RemoteError(f"{self._url}: /v1/models names no model: pass --model NAME") from e
        finally:
            connection.close()

    def stream(self, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """The chunks of a chat completion. Close the iterator to stop the answer."""
        connection, reply = self._ask("POST", "/v1/chat/completions", {**body, "stream": True})
        try:
            for line in reply:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield self._chunk(data)
            raise RemoteError(f"{self._url}: the connection ended before the answer did")
        except (OSError, http.client.HTTPException, ValueError) as e:
            raise RemoteError(f"{self._url}: the answer broke off: {e or type(e).__name__}") from e
        finally:
            connection.close()

    def _chunk(self, data: bytes) -> dict[str, Any]:
        """One event; RemoteError if it tells an error or is no chunk of a chat."""
        chunk = json.loads(data)
        if isinstance(chunk, dict) and chunk.get("error"):
            raise RemoteError(_message(chunk, "the server broke off"))
        try:
            deltas = [choice.get("delta") or {} for choice in chunk.get("choices") or ()]
            well = all(map(_is_delta, deltas))
        except (AttributeError, TypeError):
            well = False
        if not well:
            raise RemoteError(f"{self._url}: sends {shown(chunk)}, which is no chunk of a chat")
        return cast(dict[str, Any], chunk)

    def _ask(
        self, method: str, path: str, body: Any
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """The answer's head; RemoteError with the server's sentence unless it is 200."""
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        connection = self._connection()
        try:
            raw = None if body is None else json.dumps(body).encode()
            connection.request(method, self._path + path, raw, headers)
            reply = connection.getresponse()
            if reply.status == 200:
                return connection, reply
            said = reply.read(_ERROR_BYTES)
        except ConnectionRefusedError as e:
            raise RemoteError(
                f"nobody answers at {self._url}: start a server (ds-runtime serve), or pass "
                "--base-url URL"
            ) from e
        except (OSError, http.client.HTTPException, UnicodeError) as e:
            connection.close()
            raise RemoteError(f"{self._url}: {e or type(e).__name__}") from e
        except BaseException:
            connection.close()
            raise
        connection.close()
        raise RemoteError(self._refusal(reply.status, said))

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._address
        if self._tls:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(host, port, timeout=self._timeout, context=context)
        return http.client.HTTPConnection(host, port, timeout=self._timeout)

    def _refusal(self, status: int, said: bytes) -> str:
        try:
            message = _message(json.loads(said), f"HTTP {status}")
        except ValueError:
            message = f"HTTP {status}: is {self._url} an OpenAI-compatible server?"
        return message + ("; pass --api-key KEY" if status == 401 else "")


def _is_delta(delta: Any) -> bool:
    """Whether its fields have the types that OpenAI's have."""
    texts = [delta.get(name) for name in ("content", "reasoning_content", "reasoning")]
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        texts += [call.get("id"), function.get("name"), function.get("arguments")]
        if not isinstance(call.get("index") or 0, int):
            return False
    return all(text is None or isinstance(text, str) for text in texts)


def _message(value: Any, otherwise: str) -> str:
    error = value.get("error") if isinstance(value, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])
    return error if isinstance(error, str) else otherwise
