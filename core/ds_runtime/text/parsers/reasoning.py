"""Reasoning apart from the answer, while the text comes.

Whether a text begins inside reasoning is read from the end of the rendered prompt, never from a
flag. After a tool result, for one, the same template may open it or not.
"""

from __future__ import annotations

from enum import Enum
from functools import cache

from ds_runtime.text.parsers.events import Content, Reasoning
from ds_runtime.text.parsers.markers import Markers

OPEN, CLOSE = "<think>", "</think>"
# The first begins the assistant's turn, the others end it.
_TURNS = ("<｜Assistant｜>", "<｜User｜>", "<｜end▁of▁sentence｜>")
_GLM_TURNS = ("<|assistant|>", "<|user|>", "<|observation|>", "<|system|>")
_AFTER_TOOL = ("<｜tool▁outputs▁end｜>", "<｜tool▁output▁end｜>")


class _State(Enum):
    UNDECIDED = 0  # a leading <think> opens, anything else is the answer
    ENTERING = 1  # reasoning; a leading <think> is the model repeating the prompt's
    REASONING = 2
    ANSWER = 3


class ReasoningParser:
    """Splits text into reasoning and answer.

    style "deepseek-r1": reasoning unless the prompt says otherwise, with the line breaks around
    the tags taken away, as R1's template writes them. "deepseek-v3" and "deepseek-v4": reasoning
    only where the prompt or the model opens it, every byte kept. "glm45": the same without the line
    breaks around the tags, which GLM-4.5's template writes. `openers` are markers that end
    reasoning without a `</think>`: where they are found in just this spelling, everything from
    them on is the answer.
    """

    def __init__(self, style: str, prompt: str, openers: tuple[str, ...] = ()) -> None:
        self._trims = style not in ("deepseek-v3", "deepseek-v4")
        self._ends = _ends(openers)
        self._held = ""
        self._skips = False  # line breaks that belong to the format come next
        self.unclosed = False  # left by an opener: a `</think>` may still come
        self._state = _begin(prompt, style)

    @property
    def in_answer(self) -> bool:
        """Whether everything from here on is the answer."""
        return self._state is _State.ANSWER and not self._skips

    @property
    def in_reasoning(self) -> bool:
        """Whether the last text was reasoning."""
        return self._state is _State.ENTERING or self._state is _State.REASONING

    def feed(self, text: str) -> list[Reasoning | Content]:
        """What became certain with `text`."""
        text, self._held = self._held + text, ""
        out: list[Reasoning | Content] = []
        while text:
            text = self._step(text, out)
        return out

    def finish(self) -> list[Reasoning | Content]:
        """What was held back; for the end of the text."""
        held, self._held = self._held, ""
        if self._state is _State.UNDECIDED:
            return [Content(held)] if held else []
        held = self._ends.release(held)
        held = held.strip("\r\n") if self._trims else held
        return [Reasoning(held)] if held else []

    def _step(self, text: str, out: list[Reasoning | Content]) -> str:
        """Consume some of `text` (not empty); what is left to look at now."""
        if self._skips:
            text = text.lstrip("\r\n")
            self._skips = not text
        elif self._state is _State.ANSWER:
            out.append(Content(text))
            return ""
        elif self._state is _State.REASONING:
            return self._inside(text, out)
        else:
            return self._opening(text)
        return text

    def _inside(self, text: str, out: list[Reasoning | Content]) -> str:
        found = self._ends.find(text)
        part = text[: self._ends.held(text) if found is None else found.start]
        if self._trims:
            part = part.rstrip("\r\n")
        if part:
            out.append(Reasoning(part))
        if found is None:
            self._held = text[len(part) :]
            return ""
        self._state = _State.ANSWER
        self.unclosed = found.name != CLOSE
        self._skips = self._trims and not self.unclosed
        return text[found.start if self.unclosed else found.end :]

    def _opening(self, text: str) -> str:
        body = text.lstrip()
        if body != OPEN and OPEN.startswith(body):  # also when there is only white space
            self._held = text
            return ""
        if body.startswith(OPEN):
            self._state, self._skips = _State.REASONING, self._trims
            return body[len(OPEN) :]
        if self._state is _State.UNDECIDED:
            self._state = _State.ANSWER
        else:
            self._state, self._skips = _State.REASONING, self._trims
        return text


def _begin(prompt: str, style: str) -> _State:
    turns = _GLM_TURNS if style == "glm45" else _TURNS
    tail = prompt[-64:].rstrip()
    if tail.endswith(OPEN):
        return _State.ENTERING
    if tail.endswith(CLOSE):
        return _State.ANSWER
    if tail.endswith(_AFTER_TOOL):
        return _State.UNDECIDED
    turn = max(map(prompt.rfind, turns))
    if prompt.startswith(turns[0], turn) and not tail.endswith(turns[0]):
        # What the assistant has begun to say, or to think, is to be continued.
        thinks = prompt.rfind(OPEN, turn) > prompt.rfind(CLOSE, turn)
        return _State.REASONING if thinks else _State.ANSWER
    return _State.ENTERING if style == "deepseek-r1" else _State.UNDECIDED


def opening(style: str, prompt: str) -> str:
    """Whether reasoning comes first after `prompt`: "open" (it does), "optional" (if the model
    opens it) or "none".
    """
    begun = _begin(prompt, style)
    if begun is _State.UNDECIDED:
        return "optional"
    return "none" if begun is _State.ANSWER else "open"


@cache
def _ends(openers: tuple[str, ...]) -> Markers:
    return Markers((CLOSE, *openers))
