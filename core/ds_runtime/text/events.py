"""What a parser makes of generated text: reasoning, content and tool calls, as they come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias


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


Event: TypeAlias = Reasoning | Content | CallBegin | CallArguments | CallEnd


@dataclass(slots=True)
class Call:
    """A whole tool call. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""
    complete: bool = False


@dataclass(slots=True)
class Answer:
    """The events of one choice added up."""

    _reasoning: list[str] = field(default_factory=list)
    _content: list[str] = field(default_factory=list)
    _arguments: list[list[str]] = field(default_factory=list)
    _calls: list[Call] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        """Take more events, in order."""
        for event in events:
            match event:
                case Content(text):
                    self._content.append(text)
                case Reasoning(text):
                    self._reasoning.append(text)
                case CallBegin(_, call_id, name):
                    self._calls.append(Call(call_id, name))
                    self._arguments.append([])
                case CallArguments(number, text):
                    self._arguments[number].append(text)
                case CallEnd(number, complete):
                    call = self._calls[number]
                    call.arguments, call.complete = "".join(self._arguments[number]), complete

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def calls(self) -> list[Call]:
        """Complete calls only: half a call must not be taken for one."""
        return [c for c in self._calls if c.complete]

    @property
    def all_calls(self) -> list[Call]:
        """The same, and those that the output was cut inside: for protocols that tell so."""
        return list(self._calls)
