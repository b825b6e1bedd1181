"""What a parser makes of generated text: reasoning, content and tool calls, as they come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias


class Reasoning(NamedTuple):
    """More of the reasoning."""

    text: str


class Content(NamedTuple):
    """More of the answer."""

    text: str


class CallBegin(NamedTuple):
    """A tool call begins. `call` counts from 0 within the choice, `id` is unique."""

    call: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments; joined they are JSON."""

    call: int
    text: str


class CallEnd(NamedTuple):
    """A call ends. Not `complete`: the output was cut inside it, its arguments are no JSON."""

    call: int
    complete: bool


_BOUNDS = (CallBegin, CallEnd)
Event: TypeAlias = Reasoning | Content | CallBegin | CallArguments | CallEnd


@dataclass(slots=True)
class ToolCall:
    """A whole tool call. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""
    complete: bool = False

    @property
    def as_json(self) -> dict[str, Any]:
        """As OpenAI's clients and templates know it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class Answer:
    """The events of one choice, in order, and added up: text that continues is one event."""

    _over: list[Event] = field(default_factory=list)
    _last: Reasoning | Content | CallArguments | None = None
    _texts: list[str] = field(default_factory=list)  # of the last event

    def add(self, events: Iterable[Event]) -> None:
        """Take more events, in order."""
        for event in events:
            if isinstance(event, _BOUNDS):
                self._over, self._last = [*self.events, event], None
            elif event[:-1] == (self._last or ())[:-1] and type(event) is type(self._last):
                self._texts.append(event.text)
            else:
                self._over, self._last, self._texts = self.events, event, [event.text]

    @property
    def events(self) -> list[Event]:
        """All so far."""
        if self._last is None:
            return self._over.copy()
        return [*self._over, self._last._replace(text="".join(self._texts))]

    @property
    def reasoning(self) -> str:
        return "".join(e.text for e in self.events if isinstance(e, Reasoning))

    @property
    def content(self) -> str:
        return "".join(e.text for e in self.events if isinstance(e, Content))

    @property
    def calls(self) -> list[ToolCall]:
        """Complete calls only: half a call must not be taken for one."""
        return [c for c in self.all_calls if c.complete]

    @property
    def all_calls(self) -> list[ToolCall]:
        """The same, and those that the output was cut inside: for protocols that tell so."""
        calls: list[ToolCall] = []
        arguments: list[list[str]] = []
        for event in self.events:
            match event:
                case CallBegin(_, call_id, name):
                    calls.append(ToolCall(call_id, name))
                    arguments.append([])
                case CallArguments(number, text):
                    arguments[number].append(text)
                case CallEnd(number, complete):
                    calls[number].complete = complete
        for call, parts in zip(calls, arguments, strict=True):
            call.arguments = "".join(parts)
        return calls
