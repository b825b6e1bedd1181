"""Sessions: a prompt, and what is said to each answer. Those of agents, whose tools say it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

from ds_runtime_bench.serving.answer import Answer
from ds_runtime_bench.serving.prompts import Prompt, Words

_DESCRIPTION, _ARGUMENT = 30, 8  # words of a tool's description, and of an argument's
_ARGUMENTS = 3
_TOOLS_SHARE = 0.5  # of the shared tokens; the rest is the system prompt
_Begin = tuple[Sequence[int] | Sequence[str], tuple[dict[str, Any], ...]]  # system prompt, tools


@dataclass(frozen=True, slots=True)
class Step:
    """What comes after an answer: `said` (its `text` or `ids`), `pause` seconds after it."""

    said: Prompt
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """The first prompt, and the turns after it."""

    first: Prompt
    steps: tuple[Step, ...] = ()

    @property
    def turns(self) -> int:
        """Requests that it makes."""
        return 1 + len(self.steps)


@dataclass(frozen=True, slots=True)
class Agent:
    """What agents do. Lengths in tokens; `pause`: mean seconds of a tool's run.

    `shared` are those of the system prompt and, in a chat, the tools; `question` those that begin a
    session; each tool's result has `result[0]` to `result[1]`.
    """

    turns: int = 20
    shared: int = 6000
    question: int = 256
    answer: int = 64
    result: tuple[int, int] = (200, 2000)
    pause: float = 1.0


def follow(prompt: Prompt, answer: Answer, step: Step) -> Prompt:
    """The next turn's prompt: all of the last, its answer, and what was said to that.

    In a chat results go to the tools that were called, to the user's side where none was.
    """
    said = step.said
    if prompt.ids:
        return replace(said, ids=(*prompt.ids, *answer.output_ids, *said.ids))
    if not prompt.messages:
        return replace(said, text=f"{prompt.text}{answer.text}\n{said.text}")
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "done" if number else said.text}
        for number, call in enumerate(answer.whole_calls())
    ]
    last = results or [{"role": "user", "content": said.text}]
    messages = (*prompt.messages, answer.message(), *last)
    return replace(said, text="", messages=messages, tools=prompt.tools)


def agent_sessions(
    words: Words, count: int, systems: int, agent: Agent, chat: bool
) -> list[Session]:
    """`count` sessions, in turn after each of `systems` system prompts; nothing else in common."""
    begins = [_begin(words, agent.shared, chat) for _ in range(systems)]
    return [_session(words, begin, agent, chat) for begin in islice(cycle(begins), count)]


def _begin(words: Words, length: int, chat: bool) -> _Begin:
    if not chat:
        return words.draw(length), ()
    tools = tuple(_tools(words, round(length * _TOOLS_SHARE)))
    return words.draw(max(1, length - words.count(json.dumps(tools)))), tools


def _session(words: Words, begin: _Begin, agent: Agent, chat: bool) -> Session:
    system, tools = begin
    question = words.draw(agent.question)
    first = words.prompt([*system, *question], agent.answer)
    if chat:
        messages = (
            {"role": "system", "content": words.text(system)},
            {"role": "user", "content": words.text(question)},
        )
        first = Prompt(agent.answer, messages=messages, tools=tools)
    steps = [
        Step(
            words.prompt(words.draw(words.between(*agent.result)), agent.answer),
            words.pause(agent.pause),
        )
        for _ in range(agent.turns - 1)
    ]
    return Session(first, tuple(steps))


def _tools(words: Words, length: int) -> list[dict[str, Any]]:
    """Functions of about `length` tokens together, as JSON, at least one."""
    out: list[dict[str, Any]] = []
    while not out or words.count(json.dumps(out)) < length:
        names = [f"{words.name()}_{n}" for n in range(_ARGUMENTS)]
        said = [words.text(words.draw(_ARGUMENT)) for _ in names]
        arguments = {
            name: {"type": "string", "description": text}
            for name, text in zip(names, said, strict=True)
        }
        parameters = {"type": "object", "properties": arguments, "required": names[:1]}
        function = {
            "name": f"{words.name()}_{len(out)}",
            "description": words.text(words.draw(_DESCRIPTION)),
            "parameters": parameters,
        }
        out.append({"type": "function", "function": function})
    return out
