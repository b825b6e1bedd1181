"""Answers of /v1/responses that are kept for a while, with the conversation up to them."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from ds_runtime.errors import shown
from ds_runtime.server.errors import ApiError
from ds_runtime.server.translate import Json

_KEPT = 1024  # answers
_KEPT_BYTES = 64 << 20


class Kept:
    """Answers that may be asked for again, and the conversation up to them; oldest out first."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()
        self._bytes = 0

    def put(self, response: Json, messages: list[Json]) -> None:
        """Keep an answer and the messages that a next request goes on from."""
        self.drop(response["id"])
        entry = msgspec.json.encode(response), msgspec.json.encode(messages)
        self._answers[response["id"]] = entry
        self._bytes += sum(map(len, entry))
        while len(self._answers) > _KEPT or self._bytes > _KEPT_BYTES:
            self.drop(next(iter(self._answers)))

    def drop(self, name: str) -> bool:
        """Forget an answer; whether it was there."""
        entry = self._answers.pop(name, None)
        self._bytes -= sum(map(len, entry or ()))
        return entry is not None

    def response(self, name: str) -> bytes:
        """The answer as JSON; ApiError 404 if it is not kept."""
        return self._find(name, "response_id")[0]

    def messages(self, name: str) -> list[Json]:
        """The conversation up to and with an answer."""
        found: list[Json] = msgspec.json.decode(self._find(name, "previous_response_id")[1])
        return found

    def _find(self, name: str, param: str) -> tuple[bytes, bytes]:
        if (entry := self._answers.get(name)) is None:
            raise ApiError(
                404,
                f"{param} {shown(name)}: no such response is kept; the last {_KEPT} with store "
                "not false are",
                param=param,
                code="response_not_found",
            )
        return entry
