"""Text of clients that spells a token which only templates may write: it stays text.

A mark before each such spelling goes through the template with it. `Tokenizer.encode` leaves marks
out, and takes what is after them for text. Where nothing is spelled, nothing changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from os.path import commonprefix
from typing import Any

from ds_runtime.errors import RequestError
from ds_runtime.text.parsers.reasoning import CLOSE, OPEN

Tree = Any  # of messages, tools and keywords: lists, mappings and text
_MARKS = range(0xE010, 0xF8FF)  # for private use: no text has all of them
_ESCAPE = re.compile(r"\\u([0-9a-f]{4})")
_OWN = (OPEN, CLOSE)  # by which templates tell a model's own reasoning from its answer
_SAID = ("content", "reasoning_content")


@dataclass(frozen=True, slots=True)
class Marked:
    """What a template is to be given. mark: before each spelling; "" where there is none."""

    messages: list[Mapping[str, Any]]
    tools: list[Mapping[str, Any]] | None
    kwargs: dict[str, Any]
    mark: str = ""

    def plain(self, text: str) -> str:
        """Rendered text without marks."""
        return whole(text, self.mark).replace(self.mark, "") if self.mark else text


def whole(text: str, mark: str) -> str:
    """`text` with marks that a template has escaped in JSON as they were."""
    return text.replace(_escaped(mark), mark)


def _escaped(mark: str) -> str:
    return json.dumps(mark)[1:-1]


def marked(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    kwargs: Mapping[str, Any],
    tokens: Sequence[str],
) -> Marked:
    """Messages, tools and keywords of a template with marks before all `tokens` that they spell.

    What a model has said may hold the tags of its reasoning, which templates look for.
    """
    every, said = _pattern(tuple(tokens)), _pattern(tuple(t for t in tokens if t not in _OWN))
    out = Marked([*messages], None if tools is None else [*tools], dict(kwargs))
    texts = [*_texts((out.messages, out.tools, out.kwargs))]
    if not any(map(every.search, texts)):
        return out
    mark = _unused(texts)
    return Marked(
        [_message(message, every, said, mark) for message in messages],
        None if tools is None else _in_tree(out.tools, every, mark),
        _in_tree(out.kwargs, every, mark),
        mark,
    )


def _unused(texts: Sequence[str]) -> str:
    """A mark that none of them has, as itself or escaped; RequestError where they have all."""
    used = set[str]().union(*texts)
    for text in texts:
        used.update(chr(int(digits, 16)) for digits in _ESCAPE.findall(text))
    for mark in map(chr, _MARKS):
        if mark not in used:
            return mark
    raise RequestError(
        "the messages hold every character from U+E010 to U+F8FE: leave one of them out", "messages"
    )


@lru_cache(16)
def _pattern(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Any of them, the longest first; nothing where there is none."""
    return re.compile(_tree(sorted(filter(None, set(tokens)))) or "(?!)")


def _tree(words: Sequence[str]) -> str:
    """A pattern of sorted words in which what they begin with alike is looked at once: placeholders
    of published tokenizers are 800 of them."""
    same = commonprefix(words)  # noqa: RUF071, these are no paths
    rest = [word[len(same) :] for word in words if len(word) > len(same)]
    if not rest:
        return re.escape(same)
    ways = "|".join(_tree([*group]) for _, group in groupby(rest, key=itemgetter(0)))
    return f"{re.escape(same)}(?:{ways}){'?' if len(rest) < len(words) else ''}"


def _texts(tree: Tree, key: Any = None) -> Iterator[str]:
    """Every text of it, also those that arguments of calls hold as JSON. key: under which it is."""
    if isinstance(tree, str):
        yield tree
        if (held := _held(tree, key)) is not None:
            yield from _texts(held)
    elif isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _texts(name)
            yield from _texts(value, name)
    elif isinstance(tree, list | tuple):
        for one in tree:
            yield from _texts(one)


def _held(text: str, key: Any) -> Tree:
    """What arguments say as JSON, where that may differ from what they look like, else None:
    templates may read them, and escapes are letters then."""
    if key != "arguments" or "\\" not in text:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _message(
    message: Mapping[str, Any], every: re.Pattern[str], said: re.Pattern[str], mark: str
) -> Mapping[str, Any]:
    own = _SAID if message.get("role") == "assistant" else ()
    return {
        _in_tree(key, every, mark): _in_tree(value, said if key in own else every, mark, key)
        for key, value in message.items()
    }


def _in_tree(tree: Tree, pattern: re.Pattern[str], mark: str, key: Any = None) -> Tree:
    if isinstance(tree, str):
        held = _held(tree, key)
        if held is not None and any(map(pattern.search, _texts(held))):
            return json.dumps(_in_tree(held, pattern, mark), ensure_ascii=False)
        return pattern.sub(lambda found: mark + found[0], tree)
    if isinstance(tree, Mapping):
        return {
            _in_tree(name, pattern, mark): _in_tree(value, pattern, mark, name)
            for name, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [_in_tree(one, pattern, mark) for one in tree]
    return tree


def pieces(
    text: str,
    mark: str,
    ids: Sequence[int],
    offsets: Iterable[tuple[int, int]],
    control: Mapping[int, str],
) -> Iterator[tuple[str | None, list[int]]]:
    """Of marked text that was encoded as it is, in parts: (None, ids that are right), or
    (text to be encoded where no `control` token is known, []).

    control: by id, what the text of such a token must hold, as other text may have that id, too.
    """
    last, since = 0, list[int]()
    for token, (begin, end) in zip(ids, offsets, strict=True):
        is_control = token in control and control[token] in text[begin:end]
        if not is_control or text[max(begin - 1, 0) : begin] == mark:
            since.append(token)
            continue
        yield _piece(text[last:begin], mark, since)
        yield None, [token]
        last, since = end, []
    yield _piece(text[last:], mark, since)


def _piece(text: str, mark: str, ids: list[int]) -> tuple[str | None, list[int]]:
    return (text.replace(mark, ""), []) if mark in text else (None, ids)
