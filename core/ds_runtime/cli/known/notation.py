"""How the tables list flags that share a fate: usage lines below one sentence.

* `--flag` takes no value, `--flag X` one, `--flag X...` any number, and `--flag N...` of numbers.
* `--flag none|X` accepts `none` in silence, because it asks for nothing.
* `--[no-]flag` is two flags. The second is always accepted, because it asks for what is so anyway.
* `--enable|disable-flag` is such a pair, too, and so is `--disable|enable-flag`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ds_runtime.config.spelling import ALWAYS, Spelling, nothing, refused


def ignored(says: str, usage: str) -> Mapping[str, Spelling]:
    """Returns flags that change nothing here: the start prints the sentence and continues."""
    return dict(_flags(usage, nothing(says), nothing(says)))


def ends(says: str, usage: str) -> Mapping[str, Spelling]:
    """Returns flags that end the start, because the thing is missing or has another flag here."""
    return dict(_flags(usage, refused(says), nothing(ALWAYS)))


def _flags(usage: str, meant: Spelling, off: Spelling) -> Iterator[tuple[str, Spelling]]:
    words = usage.split()
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if not word.startswith("--"):
            continue
        name = word.replace("[no-]", "")
        first, bar, second = name.partition("|")
        if bar:
            word = name = f"{first}-{second.partition('-')[2]}"
        if after.startswith("--"):
            yield name, meant
        else:
            *accepted, shown = after.split("|")
            silent = Spelling(takes="one")
            takes = {"X...": "many", "N...": "numbers"}.get(shown, "one")
            yield name, replace(meant, takes=takes, values=dict.fromkeys(accepted, silent))
        if name != word:
            yield f"--no-{name.removeprefix('--')}", off
        if bar:
            yield f"--{second}", off
