"""What a front end asks of its engine, where pages are handed over, and the answers. Torch-free."""

from __future__ import annotations

import msgspec

SECONDS = 30.0  # of a lease that its reader does not renew


class HoldPages(msgspec.Struct, tag=True, kw_only=True):
    """Hold what is cached of a prompt for another engine. Answered by PagesHeld. adapter, salt: as
    of a request; seconds: how long, unless its reader asks for more."""

    token: str
    prompt: list[int]
    adapter: str = ""
    salt: str = ""
    seconds: float = SECONDS


class PullPages(msgspec.Struct, tag=True, kw_only=True):
    """Read what another engine holds of a prompt. Answered by PagesPulled. offer: as PagesHeld has
    it."""

    token: str
    prompt: list[int]
    offer: bytes
    adapter: str = ""
    salt: str = ""


class PagesHeld(msgspec.Struct, tag=True):
    """Answer to HoldPages: an offer for whoever is to read, or why there is none."""

    token: str
    offer: bytes = b""
    refused: str = ""


class PagesPulled(msgspec.Struct, tag=True):
    """How a pull has ended. tokens: of the prompt that are cached now; refused: why none came."""

    token: str
    tokens: int = 0
    refused: str = ""
