"""Which parsers read a model's output, and the one object per choice that runs them.

text → reasoning | answer → content | tool calls. Names are those that other engines use, with or
without underscores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_runtime.errors import ConfigError
from ds_runtime.text.parsers.dsml_calls import DsmlToolParser
from ds_runtime.text.parsers.events import Content, Event, Reasoning
from ds_runtime.text.parsers.glm_calls import GlmToolParser
from ds_runtime.text.parsers.reasoning import ReasoningParser
from ds_runtime.text.parsers.tool_calls import TokenToolParser, ToolCallParser, schemas_of

REASONING = ("deepseek-v3", "deepseek-v4", "deepseek-r1", "glm45")
TOOL_CALLS: dict[str, type[ToolCallParser]] = {
    "deepseekv3": TokenToolParser,
    "deepseekv31": TokenToolParser,
    "deepseekv32": DsmlToolParser,
    "deepseekv4": DsmlToolParser,
    "glm45": GlmToolParser,
    "glm47": GlmToolParser,
}
Tools = Sequence[Mapping[str, Any]]


class OutputParser:
    """One choice's text in, events out. Joined, they do not depend on how the text was cut."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tool_calls: ToolCallParser | None,
        stream_reasoning: bool = True,
        include_reasoning: bool = True,
    ) -> None:
        self._reasoning, self._tool_calls = reasoning, tool_calls
        self._whole = None if stream_reasoning and include_reasoning else list[str]()
        self._told = include_reasoning
        self.reasoning_tokens = 0

    @property
    def num_calls(self) -> int:
        """Complete tool calls so far."""
        return 0 if self._tool_calls is None else self._tool_calls.num_calls

    def feed(self, text: str, num_tokens: int = 0) -> list[Event]:
        """What became certain with `text`, which `num_tokens` tokens brought."""
        reasoning = self._reasoning
        if reasoning is None or reasoning.in_answer:
            return self._answer(text) if text else []
        before = reasoning.in_reasoning
        parts = reasoning.feed(text)
        if before or reasoning.in_reasoning:
            self.reasoning_tokens += num_tokens
        out = self._split(parts)
        return out + self._gathered() if reasoning.in_answer else out

    def finish(self, natural: bool = True) -> list[Event]:
        """What was held back. `natural`: the model ended the text itself, nothing cut it."""
        out = [] if self._reasoning is None else self._split(self._reasoning.finish())
        out += self._gathered()
        if self._tool_calls is not None:
            out += self._tool_calls.finish(natural)
        return out

    def _answer(self, text: str) -> list[Event]:
        return [Content(text)] if self._tool_calls is None else self._tool_calls.feed(text)

    def _gathered(self) -> list[Event]:
        """Reasoning that is told as a whole, once it is over."""
        if not self._whole:
            return []
        whole, self._whole = "".join(self._whole), []
        return [Reasoning(whole)]

    def _split(self, parts: Sequence[Reasoning | Content]) -> list[Event]:
        out: list[Event] = []
        for part in parts:
            if isinstance(part, Content):
                out += self._gathered()
                if self._tool_calls is not None and self._reasoning and self._reasoning.unclosed:
                    self._reasoning.unclosed = False
                    self._tool_calls.drop_close()
                out += self._answer(part.text)
            elif self._whole is None:
                out.append(part)
            elif self._told:
                self._whole.append(part.text)
        return out


@dataclass(frozen=True, slots=True)
class Parsers:
    """The parsers of one server; None leaves that part of the text as it is."""

    reasoning: str | None = None
    tool_calls: str | None = None
    drop_unknown: bool = False

    def start(
        self,
        prompt: str,
        tools: Tools | None = None,
        *,
        separate_reasoning: bool = True,
        stream_reasoning: bool = True,
        include_reasoning: bool = True,
        parallel: bool = True,
        forbidden: bool = False,
    ) -> OutputParser | None:
        """A parser for one choice that continues `prompt` (rendered text); None if none is needed.

        `tools`: those that may be called; without any, calls stay text. `forbidden`: none may, and
        calls that come all the same vanish. `include_reasoning` false: reasoning does.
        """
        calls, reasoning = None, None
        if (tools or forbidden) and self.tool_calls is not None:
            calls = TOOL_CALLS[self.tool_calls](
                schemas_of(tools or ()),
                drop_unknown=self.drop_unknown,
                parallel=parallel,
                forbidden=forbidden,
            )
        if (separate_reasoning or not include_reasoning) and self.reasoning is not None:
            openers = () if calls is None else calls.OPENERS
            reasoning = ReasoningParser(self.reasoning, prompt, openers)
        if calls is None and reasoning is None:
            return None
        return OutputParser(reasoning, calls, stream_reasoning, include_reasoning)


def choose_parsers(
    reasoning: str, tool_calls: str, auto: tuple[str | None, str | None], drop_unknown: bool = False
) -> Parsers:
    """Parsers by flag: a name, "auto" (the model's own, given as `auto`) or "none"."""
    return Parsers(
        _choose("--reasoning-parser", reasoning, REASONING, auto[0]),
        _choose("--tool-call-parser", tool_calls, tuple(TOOL_CALLS), auto[1]),
        drop_unknown,
    )


def _choose(flag: str, said: str, known: tuple[str, ...], auto: str | None) -> str | None:
    if said == "auto":
        return auto
    if said == "none":
        return None
    plain = {name.replace("-", ""): name for name in known}
    found = plain.get(said.lower().replace("-", "").replace("_", ""))
    if found is None:
        raise ConfigError(f"{flag} {said!r}: must be one of auto, none, {', '.join(known)}")
    return found
