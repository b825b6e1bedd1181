"""`ds-runtime chat`: a conversation in the terminal, or one answer in a pipe."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from argparse import Namespace, _SubParsersAction
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_runtime.cli.run.remote import Remote, RemoteError
from ds_runtime.config.fields import flag_of
from ds_runtime.errors import ConfigError, unreadable
from ds_runtime.text.parsers.events import Content, Reasoning, ToolCall
from ds_runtime.text.parsers.reasoning import ReasoningParser

_DIM, _BOLD, _PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[0m"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # all but tab, line feed
_PARAMS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "max_tokens": int,
    "seed": int,
}
_HELP = """\
/reset              forget the conversation
/system TEXT        begin it with this system message; without TEXT: none
/params             show the sampling parameters; /params temperature=0.6 seed=1 sets some,
                    /params seed= leaves one to the server again
/retry              ask the last message again
/quit               leave, as Ctrl-D does
Ctrl-C              stop an answer
A line that ends in \\ continues in the next one."""


def add(subcommands: _SubParsersAction[Any]) -> None:
    """Register the verb."""
    parser = subcommands.add_parser(
        "chat",
        help="talk to a server in the terminal",
        description="Talk to a running server, this or any other OpenAI-compatible one. With a "
        "MESSAGE, or with text piped in, answer that and leave.",
    )
    parser.add_argument("message", nargs="?", help="answer this and leave; '-' is standard input")
    parser.add_argument(
        "--base-url",
        default="http://127.0.0.1:30000",
        metavar="URL",
        help="the server (default: http://127.0.0.1:30000)",
    )
    parser.add_argument("--api-key", metavar="KEY", help="its API key")
    parser.add_argument("--model", metavar="NAME", help="model to ask for (default: its first)")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--tools", metavar="FILE", help="JSON file with tools to offer")
    parser.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="show the model's thinking (default: on a terminal only)",
    )
    for name, kind in _PARAMS.items():
        parser.add_argument(
            flag_of(name),
            type=kind,
            metavar="N",
            help="as the field of a request (default: the server's)",
        )
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Answer once, or converse until the end of input."""
    tools = _tools(args.tools)
    remote = Remote(args.base_url, args.api_key)
    terminal = sys.stdout.isatty()
    chat = Chat(
        remote,
        args.model or remote.model(),
        Screen(terminal, terminal if args.thinking is None else args.thinking),
        system=args.system,
        tools=tools,
        params={name: v for name in _PARAMS if (v := getattr(args, name)) is not None},
    )
    if args.message is None and sys.stdin.isatty():
        return chat.converse(args.base_url)
    text = args.message if args.message not in (None, "-") else sys.stdin.read()
    if not text.strip():
        raise ConfigError("chat: the message is empty; give some text, or '-' for standard input")
    return 0 if chat.answer(text) else 130


def _tools(path: str | None) -> list[Any] | None:
    if path is None:
        return None
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as e:
        raise unreadable(f"--tools {path}", e, "a JSON file with a list of tools") from e
    if not isinstance(found, list):
        raise ConfigError(f"--tools {path}: holds no list; give a JSON file with a list of tools")
    return found


def _tame(text: str) -> str:
    """Without what a terminal takes as a command: models and servers must not give it any."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text.replace("\r", ""))


class Screen:
    """What is seen of an answer: on a terminal thinking is dimmed, elsewhere text is plain."""

    def __init__(self, terminal: bool, thinking: bool) -> None:
        self._terminal, self._thinking = terminal, thinking
        self._style, self._begun = "", False

    def show(self, text: str, style: str = "") -> None:
        """Print on, in a style of the terminal."""
        if not text:
            return
        if self._terminal:
            text = _tame(text)
            if style != self._style:
                print(_PLAIN + style, end="")
                self._style = style
        print(text, end="", flush=True)
        self._begun = True

    def thinking(self, text: str) -> None:
        """Dimmed, or not at all."""
        if self._thinking:
            self.show(text, _DIM)

    def part(self) -> None:
        """What follows begins on a line of its own."""
        if self._begun:
            self.show("\n", self._style)
            self._begun = False

    def end(self) -> None:
        """The answer is over: a last line break, and no style."""
        self.part()
        if self._style:
            print(_PLAIN, end="", flush=True)
            self._style = ""

    def note(self, text: str) -> None:
        """A word to the person at the terminal; not part of any answer."""
        self.end()
        shown = f"{_DIM}{_tame(text)}{_PLAIN}" if self._terminal else text
        print(shown, file=sys.stdout if self._terminal else sys.stderr, flush=True)


@dataclass(slots=True)
class Chat:
    """A conversation: `history` holds what was said, without the system message.

    `asked`: the last message, whether it was answered or not, and its place in `history`.
    """

    remote: Remote
    model: str
    screen: Screen
    system: str | None = None
    tools: list[Any] | None = None
    params: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    asked: tuple[str, int] | None = None

    def converse(self, where: str) -> int:
        """Read, answer, again; until /quit or the end of input."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (editing and history for `input`)
        self.screen.note(f"{self.model} at {where}; /help tells the commands")
        while True:
            try:
                text = _read()
            except KeyboardInterrupt:
                self.screen.note("\n(/quit or Ctrl-D leaves)")
                continue
            if text is None:
                print()
                return 0
            if text in ("/quit", "/exit"):
                return 0
            try:
                if text.startswith("/"):
                    self.command(text)
                elif text.strip():
                    self.answer(text)
            except (ConfigError, RemoteError) as e:
                self.screen.note(f"error: {e}")

    def command(self, text: str) -> None:
        """One of the slash commands."""
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        if name == "/reset":
            self.history.clear()
            self.asked = None
            self.screen.note("the conversation is forgotten")
        elif name == "/system":
            self.system = rest or None
            self.screen.note(f"system message: {rest}" if rest else "no system message")
        elif name == "/params":
            for word in rest.split():
                self._set(word)
            shown = " ".join(f"{k}={v}" for k, v in self.params.items())
            self.screen.note(shown or "the server's own; known are " + ", ".join(_PARAMS))
        elif name == "/retry":
            self._retry()
        elif name == "/help":
            self.screen.note(_HELP)
        else:
            raise ConfigError(f"{name}: no such command; /help lists them")

    def _set(self, word: str) -> None:
        name, _, value = word.partition("=")
        if name not in _PARAMS:
            raise ConfigError(f"/params {word}: known are {', '.join(_PARAMS)}, as name=value")
        if not value:
            self.params.pop(name, None)
            return
        try:
            self.params[name] = _PARAMS[name](value)
        except ValueError as e:
            raise ConfigError(f"/params {word}: {name} needs a number") from e

    def _retry(self) -> None:
        if self.asked is None:
            raise ConfigError("/retry: nothing was asked yet")
        text, place = self.asked
        del self.history[place:]
        self.answer(text)

    def answer(self, text: str) -> bool:
        """Ask and print; False where Ctrl-C stopped it. The text that came by then stays said."""
        before = len(self.history)
        self.asked = text, before
        self.history.append({"role": "user", "content": text})
        said, whole = Said(self.screen), False
        try:
            with contextlib.closing(self.remote.stream(self._body())) as chunks:
                for chunk in chunks:
                    for choice in chunk.get("choices") or ():
                        said.add(choice.get("delta") or {})
            whole = True
        except KeyboardInterrupt:
            said.stopped()
        finally:
            self.screen.end()
            if (message := said.message(whole)) is not None:
                self.history.append(message)
            else:
                del self.history[before:]
        return whole

    def _body(self) -> dict[str, Any]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": [*first, *self.history], **self.params}
        return {**body, "tools": self.tools} if self.tools else body


class Said:
    """An answer while it comes: printed, and kept for the history."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._reasoning = ReasoningParser("deepseek-v3", "")  # where it stands in the text
        self._content = ""
        self._calls: dict[int, ToolCall] = {}
        self._last: tuple[str, int] | None = None  # what is being printed: a kind, a call

    def add(self, delta: dict[str, Any]) -> None:
        """One delta of the stream."""
        self._show("thinking", delta.get("reasoning_content") or delta.get("reasoning") or "")
        text = delta.get("content") or ""
        self._content += text
        self._parts(self._reasoning.feed(text))
        for part in delta.get("tool_calls") or ():
            self._call(part)

    def message(self, whole: bool) -> dict[str, Any] | None:
        """For the history: calls only as a whole. None if nothing was said."""
        if whole:
            self._parts(self._reasoning.finish())
        calls = list(self._calls.values()) if whole else []
        if not self._content and not calls:
            return None
        message: dict[str, Any] = {"role": "assistant", "content": self._content}
        if calls:
            message["tool_calls"] = [c.as_json for c in calls]
        return message

    def stopped(self) -> None:
        """Ctrl-C: say so, below what came."""
        self._screen.note("(stopped)")

    def _parts(self, parts: Iterable[Reasoning | Content]) -> None:
        for part in parts:
            self._show("thinking" if isinstance(part, Reasoning) else "text", part.text)

    def _call(self, part: dict[str, Any]) -> None:
        index, function = int(part.get("index") or 0), part.get("function") or {}
        call = self._calls.setdefault(index, ToolCall("", ""))
        call.id = part.get("id") or call.id
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        call.name += name
        call.arguments += arguments
        self._show("call", (f"[calls {name}] " if name else "") + arguments, index)

    def _show(self, kind: str, text: str, index: int = 0) -> None:
        """Print; another kind of part begins on a line of its own."""
        if self._last != (kind, index):
            text = text.lstrip("\n")
            if not text:
                return
            if self._last is not None:
                self._screen.part()
            self._last = (kind, index)
        if kind == "thinking":
            self._screen.thinking(text)
        else:
            self._screen.show(text, _BOLD if kind == "call" else "")


def _read() -> str | None:
    """The next message; a line that ends in a backslash goes on. None at the end of input."""
    lines = []
    prompt = "> "
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return None
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(lines)
        prompt = ". "
