"""Which modules a quantisation config speaks of: names, parts of paths, globs and regexes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import translate
from typing import Any

from ds_runtime.errors import UnsupportedError, shown

# What no DeepSeek checkpoint quantises unless its config says so by name.
_KEPT_DENSE = frozenset(
    {"lm_head", "head", "embed", "embed_tokens", "gate", "eh_proj", "norm", "enorm", "hnorm"}
    | {"weights_proj"}
)
_PLAIN, _REFERS = re.compile(r"[\w.-]*"), re.compile(r"\\\d")
_ROUTED = re.compile(r"\.experts\.\d+\.|\.experts$")


def bare(module: str) -> str:
    """The path without what some configs leave out."""
    return module.removeprefix("model.").removesuffix(".weight")


def kept_dense(module: str) -> bool:
    """Whether native checkpoints hold this module in 16 bits."""
    above, _, last = module.rpartition(".")
    return above.endswith("compressor") or last in _KEPT_DENSE or last.endswith("norm")


def is_routed(module: str) -> bool:
    """Whether the module belongs to a routed expert."""
    return _ROUTED.search(module) is not None


class ModuleNames:
    """Entries of an `ignore`, `exclude` or `targets` list; `in` asks for one module.

    "re:…" is a regex that must match the beginning of the module's path. An entry with *, ? or [ is
    a glob for the path or a parent of it. Anything else names whole parts of the path
    ("self_attn.o_proj", "model.layers.61", "lm_head"), with or without a dot at either end
    ("model.layers.0.", ".self_attn."). The leading "model." may be left out.
    """

    def __init__(self, entries: object, key: str) -> None:
        if entries is None:
            entries = ()
        if not isinstance(entries, list | tuple) or not all(isinstance(e, str) for e in entries):
            raise UnsupportedError(f"{key} {shown(entries)} is not supported; expected a list of "
                                   "module names")  # fmt: skip
        globs = [e for e in entries if not e.startswith("re:") and set(e) & set("*?[")]
        regexes = [e[3:] for e in entries if e.startswith("re:")]
        self._regexes = [compiled(r, key) for r in regexes]
        self._globs = re.compile("|".join(map(translate, globs))) if globs else None
        named = (e.strip(".") for e in entries if e not in globs)
        self._parts = {bare(name) for name in named if name}
        self._firsts = {part.partition(".")[0] for part in self._parts}

    @classmethod
    def parted(cls, entries: object, key: str) -> tuple[ModuleNames, ModuleNames]:
        """The entries that are no regex, and those that are."""
        every, names, regexes = cls(entries, key), cls(None, key), cls(None, key)
        names._parts, names._firsts, names._globs = every._parts, every._firsts, every._globs
        regexes._regexes = every._regexes
        return names, regexes

    def __contains__(self, module: str) -> bool:
        if self._parts:
            segments = bare(module).split(".")
            end = len(segments) + 1
            for i, first in enumerate(segments):
                if first in self._firsts and any(
                    ".".join(segments[i:j]) in self._parts for j in range(i + 1, end)
                ):
                    return True
        if any(r.match(module) for r in self._regexes):
            return True
        return self._globs is not None and any(map(self._globs.match, _parents(module)))


class _Converted:
    """Modules that transformers' should_convert_module leaves as they are, for the entries of a
    list: each is a regex for the beginning of a path up to a dot, or the end of a path as it is.

    In an entry of names and dots alone a dot is a dot: transformers takes "model.layers.1." for
    layers 10 to 19, too, which those who write such lists do not mean.
    """

    def __init__(self, entries: list[str], key: str) -> None:
        self._ends = tuple(entries)
        regexes = [e for e in entries if not e.startswith("re:") and _is_regex(e, key)]
        regexes = [re.escape(e) if _PLAIN.fullmatch(e) else e for e in regexes]
        joined = [
            e for e in regexes if "(" not in e and not _REFERS.search(e)
        ]  # no groups that could collide
        wholes = [e for e in regexes if e not in joined] + ["|".join(joined)] * bool(joined)
        self._starts = [re.compile(rf"(?:{e})(?:(?<=\.)|(?=\.|$))") for e in wholes]

    def __contains__(self, module: str) -> bool:
        return module.endswith(self._ends) or any(r.match(module) for r in self._starts)


def _is_regex(entry: str, key: str) -> bool:
    """Whether an entry is a regex; a glob that is none counts as a glob alone."""
    try:
        compiled(entry, key)
    except UnsupportedError:
        if not set(entry) & set("*?["):
            raise
        return False
    return True


def not_converted(
    quantization: Mapping[str, Any], keys: tuple[str, ...]
) -> list[ModuleNames | _Converted]:
    """What the lists under these keys leave dense. Entries of `modules_to_not_convert` count as
    transformers takes them, and like those of the others as Names does: some lists name
    parts in the middle of paths."""
    kept: list[ModuleNames | _Converted] = [ModuleNames(quantization.get(key), key) for key in keys]
    key = "modules_to_not_convert"
    if key in keys and quantization.get(key):
        kept.append(_Converted(list(quantization[key]), key))
    return kept


def compiled(regex: str, key: str) -> re.Pattern[str]:
    """UnsupportedError if it is none, or one that is too large or too deep."""
    try:
        return re.compile(regex)
    except (re.error, OverflowError, RecursionError) as e:
        raise UnsupportedError(f"{key}: {shown(regex)} is no regular expression: {e}") from e


def _parents(module: str) -> Iterable[str]:
    """The path and those above it, with and without the leading "model."."""
    segments = module.split(".")
    for end in range(len(segments), 0, -1):
        path = ".".join(segments[:end])
        yield path
        if path != bare(path):
            yield bare(path)
