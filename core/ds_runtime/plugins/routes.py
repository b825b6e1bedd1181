"""What a plugin's routes get of the engine. Torch-free.

`server/engines/plugin_routes.py` makes it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple, Protocol

from ds_runtime.sampling_params import SamplingParams


class Generated(NamedTuple):
    """The part of an answer that one message of the engine added.

    text: never cut inside a character; nothing of a stop string. tokens: their ids. finish_reason:
    "stop", "length" or "abort" with the last one, else None.
    """

    text: str
    tokens: list[int]
    finish_reason: str | None


class RoutedEngine(Protocol):
    """The engine as `ds_routes` gets it. Its requests are scheduled together with all others.

    Errors that it raises become answers in the server's own form, unless the route catches them.
    RequestError becomes 400. A full queue or a missing engine becomes 503. Use it on the
    server's event loop: in routes that are `async def`.
    """

    @property
    def ready(self) -> bool:
        """Whether the model is loaded and requests are taken."""
        ...

    @property
    def model(self) -> str:
        """The served name of the model."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, as generate takes it. Unpaired surrogates raise RequestError."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        ...

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        priority: int = 0,
        adapter: str = "",
    ) -> AsyncGenerator[Generated]:
        """Yields an answer piece by piece, as the engine makes it; the last has a finish_reason.

        prompt: text or token ids, to which no template is applied. params: default greedy, up to
        16 tokens; `n` is 1. adapter: the name of a loaded one.

        Closing the generator ends the request in the engine. A route that may leave the loop early,
        or whose client may, writes `async with contextlib.aclosing(engine.generate(…)) as pieces:`.
        Raises RequestError for a prompt or settings that cannot be served; it names them. Raises
        EngineDeadError, NotReadyError, QueueFullError or LogitsError as other routes do.
        """
        ...
