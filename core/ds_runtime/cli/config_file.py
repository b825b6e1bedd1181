"""`--config FILE.yaml`: settings from a file, under the names of the flags without their dashes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ds_runtime.cli.parser import near
from ds_runtime.config import EngineConfig, ServerConfig
from ds_runtime.config.spelling import DEFAULT, Known, opposite
from ds_runtime.errors import ConfigError, shown, unreadable


@dataclass(frozen=True, slots=True)
class FromFile:
    """What a file sets: values by field, and the place of each."""

    path: str
    values: Mapping[str, Any]
    lines: Mapping[str, int]
    weak: Mapping[str, Any] = field(default_factory=dict)  # of these, as `Spelling.weak`

    def place(self, error: ConfigError, namespace: argparse.Namespace) -> ConfigError:
        """The error with the line that it is about, if it is about one of the file's."""
        flag = str(error).partition(" ")[0].rstrip(":")
        name = flag.removeprefix("--").replace("-", "_")
        said = {*vars(namespace), *(self.weak.keys() & getattr(namespace, "weak", {}).keys())}
        if name not in self.values or name in said:  # the command line's comes first
            return error
        return ConfigError(f"--config {self.path}, line {self.lines[name]}: {error}")


def given(namespace: argparse.Namespace) -> dict[str, Any]:
    """What the command line says, and `--config FILE` where that says nothing."""
    said: FromFile | None = getattr(namespace, "config", None)
    weak = {**(said.weak if said else {}), **getattr(namespace, "weak", {})}
    weak = {name: value for name, value in weak.items() if value != DEFAULT}
    firm = {n: v for n, v in said.values.items() if n not in said.weak} if said else {}
    return {**weak, **firm, **vars(namespace)}


def add_config_file(parser: argparse.ArgumentParser) -> None:
    """`--config FILE`; every flag of `parser` may stand in it."""
    parser.add_argument(
        "--config",
        action=_Read,
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML file with flags as keys, like 'context-length: 4096'; flags that are given win",
    )


class _Read(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, read(str(values), parser))


def read(path: str, parser: argparse.ArgumentParser) -> FromFile:
    """The file's settings, each read as its flag would be.

    ConfigError names file, line, key, value and remedy.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        root = yaml.compose(text, yaml.SafeLoader)
    except OSError as e:
        raise unreadable(f"--config {path}", e, "a YAML file with one 'flag: value' a line") from e
    except UnicodeDecodeError as e:
        raise ConfigError(
            f"--config {path}: is not UTF-8 at byte {e.start}; save it as UTF-8"
        ) from e
    except (yaml.YAMLError, RecursionError) as e:
        raise ConfigError(f"--config {path}{_said(e)}; write one 'flag: value' per line") from e
    if root is None:
        return FromFile(path, {}, {})
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"--config {path}: write one 'flag: value' per line")
    settings: dict[str, Any] = {}
    lines: dict[str, int] = {}
    notes = list[str]()
    weak: dict[str, Any] = {}
    for key_node, value_node in root.value:
        line = key_node.start_mark.line + 1
        where = f"--config {path}, line {line}"
        loader = yaml.SafeLoader("")
        try:
            key = loader.construct_object(key_node, deep=True)
            value = loader.construct_object(value_node, deep=True)
        except (yaml.YAMLError, ValueError, TypeError, RecursionError) as e:
            raise ConfigError(f"{where}: {' '.join(str(e).split())}") from e
        action = _action(parser, key, where)
        if action is None:
            continue
        if value is False and isinstance(action, Known):
            other = parser._option_string_actions.get(opposite(action.option_strings[0]))
            action, value = (other, True) if isinstance(other, Known) else (action, value)
        try:
            if isinstance(action, Known):
                own = vars(action.read(parser, value))
                notes += own.pop("notes", ())
                weak |= own.get("weak", {})
                own |= own.pop("weak", {})
            else:
                own = {action.dest: _value(action, value)}
        except (argparse.ArgumentTypeError, ValueError) as e:
            raise ConfigError(f"{where}: {key}: {shown(value)}: {e}") from None
        except ConfigError as e:
            raise ConfigError(f"{where}: {e}") from None
        if twice := sorted(own.keys() & lines.keys()):
            raise ConfigError(
                f"{where}: {key} is set in line {lines[twice[0]]} already: remove one"
            )
        settings |= own
        lines |= dict.fromkeys(own, line)
    return FromFile(path, {**settings, "notes": notes}, lines, weak)


def _said(error: Exception) -> str:
    """What YAML's parser says, in one line that begins with the place."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f": is not YAML: {' '.join(str(error).split())}"
    return f", line {mark.line + 1}: is not YAML: {getattr(error, 'problem', None) or error}"


def ahead(path: str) -> dict[str, list[str]]:
    """What a file says of which plugins load, by flag; what is wrong with it, `read` says later."""
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    rows = found.items() if isinstance(found, dict) else ()
    by_flag = {f"--{str(key).replace('_', '-')}": value for key, value in rows}
    return {
        flag: [str(v) for v in (value if isinstance(value, list) else [value])]
        for flag in ("--plugins", "--plugin-allowlist")
        if (value := by_flag.get(flag)) is not None
    }


def _action(parser: argparse.ArgumentParser, key: Any, where: str) -> argparse.Action | None:
    """The flag of a key; None for a setting of the server in a file that another command reads."""
    name = str(key).replace("_", "-")
    known = {
        flag.removeprefix("--"): action
        for flag, action in parser._option_string_actions.items()
        if action.dest not in ("help", "config")
        and (isinstance(action, Known) or not flag.startswith("--no-"))
    }
    if name in known:
        return known[name]
    if any(
        name == f.name.replace("_", "-") for c in (EngineConfig, ServerConfig) for f in fields(c)
    ):
        return None
    other = opposite(f"--{name}")[2:]
    hint = near(name, known.keys() - {other} if isinstance(known.get(other), Known) else known)
    raise ConfigError(f"{where}: unknown key {shown(key)}{hint or ': remove it'}")


def _value(action: argparse.Action, value: Any) -> Any:
    """A YAML value as the flag's own reader makes it. ValueError says what is needed instead."""
    if isinstance(action, argparse.BooleanOptionalAction | argparse._StoreTrueAction):
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value
    if isinstance(action, argparse._AppendAction):  # and those that extend
        items = value if isinstance(value, list) else [value]
        words = [_scalar(action, item) for item in items]
        if isinstance(action, argparse._ExtendAction):
            return [x for some in words for x in some]
        return words
    if isinstance(value, list) and action.nargs not in ("*", "+"):
        raise ValueError("must be one value, not a list")
    found = _scalar(action, value)
    if action.choices is not None and found not in action.choices:
        known = [str(c) for c in action.choices]
        raise ValueError(f"is not one of {', '.join(known)}{near(str(found), known)}")
    return found


def _scalar(action: argparse.Action, value: Any) -> Any:
    read: Any = action.type or str
    if isinstance(value, bool | list | dict | None):
        raise ValueError(f"must be {_wanted(read)}")
    if read is str and not isinstance(value, str):
        raise ValueError("must be text: put it in quotes")
    if read is int and not isinstance(value, int):
        raise ValueError(f"must be {_wanted(read)}")
    try:
        found = read(str(value))
    except ValueError as e:
        raise ValueError(f"must be {_wanted(read)}") from e
    if isinstance(found, float) and not math.isfinite(found):
        raise ValueError("must be a finite number")
    return found


def _wanted(read: Any) -> str:
    return {int: "a whole number", float: "a number", str: "text"}.get(read, "one value or a list")
