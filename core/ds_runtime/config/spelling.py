"""What flags of other engines mean here. Torch-free.

A flag that means the same is an alias: a text, the name of a field. Others are a `Spelling`, whose
sentence the start shows. Names that belong to a vendor stand in its plugin's `FLAGS`.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ds_runtime.config.engine import EngineConfig
from ds_runtime.config.server import ServerConfig
from ds_runtime.errors import ConfigError

GIVEN = "{given}"  # in `sets`: the value that was given
ALWAYS = "is always so here"  # the sentence of a flag whose opposite is not here
DEFAULT = "{default}"  # in `sets` of a weak Spelling: the field is as if nothing was said of it


@dataclass(frozen=True, slots=True)
class Spelling:
    """What a flag of another engine means here.

    * says: a sentence after the flag's name.
    * sets: field of EngineConfig → the text of its value, or `GIVEN`.
    * refused: the start ends with the sentence.
    * takes: how many values, "none", "one", "many", or "numbers", which are many numbers.
    * values: value → its own Spelling, if values differ.
    * weak: what it sets yields to what is said of the field itself, on the command line or in a
      file.
    """

    says: str = ""
    sets: Mapping[str, str] = field(default_factory=dict)
    refused: bool = False
    takes: str = "none"
    values: Mapping[str, Spelling] = field(default_factory=dict)
    weak: bool = False


# Short names of flags. A digit may follow -O.
SHORT: Mapping[str, str] = {
    "-ac": "--attention-config",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-dc": "--diffusion-config",
    "-dcp": "--decode-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpa": "--data-parallel-address",
    "-dpb": "--data-parallel-backend",
    "-dpe": "--data-parallel-external-lb",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpl": "--data-parallel-size-local",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port",
    "-dpr": "--data-parallel-start-rank",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-pcp": "--prefill-context-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
    "-O": "--optimization-level",
}


def nothing(says: str, takes: str = "none") -> Spelling:
    """Returns the Spelling of a flag that changes nothing here. says: why. takes: as Spelling's."""
    return Spelling(says, takes=takes)


def refused(says: str, takes: str = "none") -> Spelling:
    """Returns the Spelling of a flag of something that is not here. says: what to use. takes: as
    Spelling's.
    """
    return Spelling(says, refused=True, takes=takes)


def opposite(flag: str) -> str:
    """`--no-x` of `--x`, and `--x` of `--no-x`. The last of both on a command line counts."""
    name = flag.removeprefix("--")
    return f"--{name[3:]}" if name.startswith("no-") else f"--no-{name}"


def _turned(flag: str) -> Iterator[str]:
    """Flags that ask for the opposite."""
    yield opposite(flag)
    on, off = "--enable-", "--disable-"
    if flag.startswith((on, off)):
        yield flag.replace(on, off) if flag.startswith(on) else flag.replace(off, on)


_NARGS: Mapping[str, int | str | None] = {"none": 0, "one": None, "many": "*", "numbers": "*"}


class Known(argparse.Action):
    """The action of a `Spelling`: sets the fields that this command has, and notes the sentence in
    `namespace.notes`. Raises ConfigError where it is refused."""

    def __init__(self, flag: str, spelling: Spelling) -> None:
        nargs = _NARGS[spelling.takes]
        dest = flag.removeprefix("--").replace("-", "_")
        super().__init__(
            [flag], dest, nargs=nargs, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
        self.spelling = spelling

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        several = [values] if isinstance(values, str) else list(values or ())
        if self.nargs == "*" and not self.spelling.refused:
            for word in several:
                if astray := _astray(parser, namespace, word, self.spelling.takes):
                    said = f"{word!r} is {astray}: give it in front of this flag"
                    raise argparse.ArgumentError(self, said)
        self._mean(parser, namespace, several)

    def _mean(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, several: Sequence[Any]
    ) -> None:
        """Sets what the flag means with these values."""
        given = ",".join(map(str, several))
        meant = self.spelling.values.get(given, self.spelling)
        flag = self.option_strings[0]
        flag += f" {given}" if given and not flag.endswith("-token") else ""  # that is a secret
        if meant.refused:
            raise ConfigError(f"{flag}: {meant.says}")
        for name, text in meant.sets.items():
            if text == DEFAULT:
                namespace.weak = {**getattr(namespace, "weak", {}), name: DEFAULT}
            elif (action := settable(parser, name)) is not None:
                words = several if text == GIVEN else [text]
                target = argparse.Namespace() if meant.weak else namespace
                try:
                    _set(parser, target, action, words)
                except argparse.ArgumentError as e:
                    raise argparse.ArgumentError(self, e.message) from None
                if meant.weak:
                    namespace.weak = {**getattr(namespace, "weak", {}), **vars(target)}
        notes = [*getattr(namespace, "notes", ())]
        turned = tuple(f"{name}:" for name in _turned(self.option_strings[0]))
        notes = [n for n in notes if not n.startswith(turned)]
        if meant.says:
            notes.append(f"{flag}: {meant.says}")
        if notes or "notes" in namespace:
            namespace.notes = notes

    def read(self, parser: argparse.ArgumentParser, value: Any) -> argparse.Namespace:
        """What a value of `--config FILE` sets. ValueError says what is needed instead."""
        namespace = argparse.Namespace()
        takes = self.spelling.takes
        if takes == "none" and not isinstance(value, bool):
            raise ValueError("must be true or false")
        words = value if self.nargs == "*" and isinstance(value, list) else [value]
        used = not self.spelling.refused and (self.spelling.sets or self.spelling.values)
        if takes != "none" and used and any(isinstance(w, bool | list | dict) for w in words):
            raise ValueError("must be one value" + " or a list" * (self.nargs == "*"))
        if value is not False:
            given = [] if takes == "none" else ["null" if w is None else str(w) for w in words]
            try:
                self._mean(parser, namespace, given)
            except argparse.ArgumentError as e:
                said = e.message.removeprefix(f"{given[-1]!r} ")  # a file's error names it already
                raise ValueError(said) from None
        return namespace


def _astray(
    parser: argparse.ArgumentParser, namespace: argparse.Namespace, word: str, takes: str
) -> str:
    """What a word is instead of a value of a flag that takes many; empty if it may be one.

    What stands behind such a flag would be lost unseen, and the start would be of another model.
    """
    if takes == "numbers":
        return "" if all(map(_is_number, word.split(","))) else "not a number"
    for action in parser._actions:
        empty = getattr(namespace, action.dest, None) in (None, [], action.default)
        if action.option_strings or not empty:
            continue
        named = action.dest == "folder" and "model" in namespace
        if action.type is None and not named and os.path.exists(word):
            return f"a file or folder, as {action.metavar} is"
        if callable(action.type):
            try:
                action.type(word)
            except (argparse.ArgumentTypeError, ValueError):
                continue
            return f"one of {action.metavar}"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def settable(parser: argparse.ArgumentParser, name: str) -> argparse.Action | None:
    """The action that sets a field, where the command has it."""
    found = (a for a in parser._actions if a.dest == name and not isinstance(a, Known))
    return next(found, None)


def _set(
    parser: argparse.ArgumentParser,
    namespace: argparse.Namespace,
    action: argparse.Action,
    words: Sequence[str],
) -> None:
    """As if the field's own flag had these words."""
    if isinstance(action, argparse.BooleanOptionalAction):
        setattr(namespace, action.dest, words == ["True"])
        return
    values = [parser._get_value(action, word) for word in words]
    for value in values:
        parser._check_value(action, value)
    if isinstance(action, argparse._ExtendAction):
        values = [item for some in values for item in some]
    several = isinstance(action, argparse._AppendAction)
    before = getattr(namespace, action.dest, []) if several else []
    setattr(namespace, action.dest, [*before, *values] if several else values[-1])


def add_spellings(
    parsers: Iterable[argparse.ArgumentParser],
    flags: Mapping[str, str | Spelling],
    taken: bool = True,
) -> None:
    """More flags for these parsers: aliases, and spellings.

    taken: a flag that is there already is a fault. Raises ConfigError for that, and for a field
    that no configuration has.
    """
    own = flags.keys()
    known = {f.name for config in (EngineConfig, ServerConfig) for f in fields(config)}
    for flag, meant in flags.items():
        named = [meant] if isinstance(meant, str) else [*_sets(meant)]
        if unknown := [n for n in named if n not in known]:
            raise ConfigError(f"flag {flag!r} for {unknown[0]!r}: no configuration has that field")
        if not flag.startswith("--"):
            raise ConfigError(f"flag {flag!r}: write it with two dashes in front")
    flags = {**_no(flags), **flags}
    aliases = {flag: meant for flag, meant in flags.items() if isinstance(meant, str)}
    actions = {f: Known(f, meant) for f, meant in flags.items() if not isinstance(meant, str)}
    for parser in parsers:
        here = parser._option_string_actions
        there = flags.keys() & here.keys()
        if (twice := there & own) and taken:
            raise ConfigError(f"flag {min(twice)!r}: is taken")
        # There are hundreds of them in each of a dozen parsers, and `_add_action` is slow.
        added = {flag: action for flag, action in actions.items() if flag not in there}
        here.update(added)
        parser._actions += added.values()
        for flag, meant in aliases.items():
            if flag not in there and (action := settable(parser, meant)) is not None:
                action.option_strings = [*action.option_strings, flag]
                here[flag] = action


def _no(flags: Mapping[str, str | Spelling]) -> Mapping[str, Spelling]:
    """`--no-x` of each flag `--x` without a value that changes nothing here, or turns something on.

    It asks for what is so anyway, or for what is so without `--x`. It has no sentence.
    """
    found = {}
    for flag, meant in flags.items():
        if isinstance(meant, str) or meant.takes != "none" or flag.startswith("--no-"):
            continue
        if meant.weak:
            found[opposite(flag)] = Spelling(sets=dict.fromkeys(meant.sets, DEFAULT), weak=True)
        elif {*meant.sets.values()} <= {"True"} and not meant.says.startswith(ALWAYS):
            found[opposite(flag)] = Spelling(sets=dict.fromkeys(meant.sets, "False"))
    return found


def _sets(spelling: Spelling) -> Iterator[str]:
    for one in (spelling, *spelling.values.values()):
        yield from one.sets


def engines(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Those of its subcommands, and theirs, that start or plan an engine."""
    if settable(parser, "chunked_prefill_size") is not None:
        yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from engines(child)


def _holds_text(action: argparse.Action | None) -> bool:
    return isinstance(action, Known) and action.nargs is None


def hyphenated(parser: argparse.ArgumentParser, args: Sequence[str]) -> list[str]:
    """The arguments with flags as they are known here: with hyphens for underscores, short names
    written out, and `--x.y 1` as `--x y=1`, where that makes a known flag.
    """
    found: list[str] = []
    words = iter(args)
    for arg in words:
        known = parser._option_string_actions
        flag, equals, value = arg.partition("=")
        if re.fullmatch(r"-O\d", flag):
            flag, equals, value = "-O", "=", flag[2:]
        plain = SHORT.get(flag, flag.replace("_", "-"))
        if arg == "--":
            return [*found, arg, *words]
        if flag not in known and plain in known and (flag.startswith("--") or flag in SHORT):
            flag = plain
        name, dot, key = flag.partition(".")
        name = SHORT.get(name, name.replace("_", "-"))
        if dot and flag not in known and _holds_text(known.get(name)):
            value = value if equals else next(words, "")
            flag, equals, value = name, "=", f"{key}={value}"
        found.append(flag + equals + value)
    return found
