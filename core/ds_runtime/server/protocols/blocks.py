"""Events of an answer as blocks that open, grow and close, as two protocols tell it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from ds_runtime.text.parsers.events import (
    Answer,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)

Kind = Literal["reasoning", "text", "call"]
Step = tuple[Literal["open", "grow", "close"], "Block", str]


@dataclass(slots=True)
class Block:
    """A stretch of one kind. `call_id` and `name` are set for calls. What the end of the output cut
    off is not `complete`."""

    index: int
    kind: Kind
    call_id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)
    complete: bool = True

    @property
    def text(self) -> str:
        """Reasoning, answer, or a call's arguments as JSON."""
        return "".join(self.parts)


class Blocks:
    """The blocks of one choice. `every` holds them in order. Text inside a call comes after it."""

    def __init__(self) -> None:
        self.every: list[Block] = []
        self._open: Block | None = None
        self._held: list[Event] = []  # texts inside the open call

    def feed(self, events: Iterable[Event]) -> Iterator[Step]:
        """What the events do: ("open", block, ""), ("grow", block, text), ("close", block, "")."""
        for event in events:
            match event:
                case Reasoning(text) | Content(text):
                    if text and self._open is not None and self._open.kind == "call":
                        self._held.append(event)
                    elif text:
                        yield from self._grow(
                            "reasoning" if isinstance(event, Reasoning) else "text", text
                        )
                case CallBegin(_, call_id, name):
                    yield from self.end()
                    yield from self._begin("call", call_id, name)
                case CallArguments(_, text):
                    if text and self._open is not None:
                        self._open.parts.append(text)
                        yield "grow", self._open, text
                case CallEnd(_, complete):
                    if self._open is not None:
                        self._open.complete = complete
                    yield from self.end()

    def end(self, cut: bool = False) -> Iterator[Step]:
        """Close all that is open; what the output was cut in is not complete."""
        while (block := self._open) is not None:
            self._open, held, self._held = None, self._held, []
            block.complete = block.complete and not cut
            yield "close", block, ""
            cut = False
            yield from self.feed(held)

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[Step]:
        self._open = Block(len(self.every), kind, call_id, name)
        self.every.append(self._open)
        yield "open", self._open, ""

    def _grow(self, kind: Kind, text: str) -> Iterator[Step]:
        if self._open is None or self._open.kind != kind:
            yield from self.end()
            yield from self._begin(kind)
        assert self._open is not None
        self._open.parts.append(text)
        yield "grow", self._open, text


def blocks_of(answer: Answer, cut: bool) -> list[Block]:
    """A whole answer's blocks: those that a stream of it has."""
    blocks = Blocks()
    for _ in chain(blocks.feed(answer.events), blocks.end(cut)):
        pass
    return blocks.every
