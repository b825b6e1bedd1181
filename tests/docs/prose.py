"""Sentences of a page, and what the house rules say of them."""

from __future__ import annotations

import re
from collections.abc import Callable

LONGEST = 30  # words of a sentence
BANNED = {  # a pattern: words that it means, and what to write instead
    r"such an? one": ("such a one", "name the thing"),
    r"of so (?:long|large)": ("of so long", "say the number"),
    r"what serves it": ("what serves it", "name it"),
    r"whose rows of": ("whose rows of", "begin with the subject"),
    r"if (?:it|he|one) likes": ("if it likes", "may"),
    r"in order to": ("in order to", "to"),
    r"please note": ("please note", "leave it out"),
    r"seamless(?:ly)?|blazing(?:ly)?|cutting-edge|state-of-the-art": ("seamlessly", "a figure"),
    r"simply|obviously|of course|basically": ("of course", "leave it out"),
    r"leverag(?:e[sd]?|ing)|utili[sz](?:e[sd]?|ing)": ("utilizes", "use"),
    r"under the hood": ("under the hood", "say where"),
    r"out of the box": ("out of the box", "say which command"),
    r"beside": ("beside", "next to, besides, with"),
    r"behind(?= \w)(?! (?:a|an|one|OpenAI's)\b)": ("behind them", "after, below"),
    r"so many|so much": ("so many", "say the number"),
    r"stands?(?! (?:for|in)\b)|stood": ("stands", "is"),
    r"goes on|go on": ("goes on", "continues"),
    r"anew": ("anew", "again"),
}
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2\s*$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[str]:
    """The paragraphs, list items, headings and table cells of a page, as plain words.

    Code blocks and comments are left out; inline code is one word; a link is its text.
    """
    text = FENCE.sub("\n\n", page)
    text = re.sub(r"<!--.*?-->", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]+`", "CODE", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^(#+ .*)$", r"\n\1\n", text, flags=re.MULTILINE)
    found = []
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[*+-]|\d+\.)\s)", text):
        if part.lstrip().startswith("|"):
            cells = (c for line in part.splitlines() for c in line.strip().strip("|").split("|"))
            found += [c.strip() for c in cells if not re.fullmatch(r"[\s:-]*", c)]
        else:
            found.append(" ".join(re.sub(r"^\s*(?:[*+-]|\d+\.|#+|>)\s+", "", part).split()))
    return [b for b in found if b]


def sentences(block: str) -> list[str]:
    """The sentences of a block: they end in a stop before a capital, a quote or code."""
    return [s for s in re.split(r"(?<=[.!?])[)\"*_]*\s+(?=[\"(*_]*[A-Z0-9])", block) if s]


def entries(block: str) -> list[str]:
    """The sentences of a docstring's block. They may begin in lower case, and so does an entry.

    An entry is `name: text` or `name, other [shape]: text`, after a stop or a semicolon.
    """
    name = r"[a-z_]\w*(?: \[[^\]]*\])?"
    parts = re.split(
        rf"(?<=[\w)\]}}\"]\.)(?<!e\.g\.)\s+(?=[a-z\"−])|(?<=;)\s+(?={name}(?:, {name})*: )", block
    )
    return [s for part in parts for s in sentences(part)]


def faults(page: str, split: Callable[[str], list[str]] = sentences) -> list[str]:
    """What is wrong with a page: a line per long sentence and per banned phrase."""
    found = []
    for block in blocks(page):
        for sentence in split(block):
            if (words := len(sentence.split())) > LONGEST:
                found.append(f"{words} words: {sentence}")
        found += banned(block)
    return found


def banned(text: str) -> list[str]:
    """A line for each banned phrase in a text, with what to write instead."""
    return [
        f"{match[0]!r}: {remedy}, in: {text[max(0, match.start() - 40) : match.end() + 40]}"
        for pattern, (_, remedy) in BANNED.items()
        for match in re.finditer(rf"(?<![\w.-])(?:{pattern})(?![\w-]|: )", text, re.IGNORECASE)
    ]
