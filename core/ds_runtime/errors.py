"""The errors that a user can meet. Each message names the thing, its value and the remedy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass


class DsRuntimeError(Exception):
    """Base of every error that the runtime raises on purpose."""


class ConfigError(DsRuntimeError):
    """A setting, flag or config.json value that cannot be used."""


class UnsupportedError(DsRuntimeError):
    """A model, format, feature or device that this installation does not serve."""


class CheckpointError(DsRuntimeError):
    """A checkpoint folder or tensor that is missing, truncated or of the wrong shape."""


class PluginError(DsRuntimeError):
    """A plugin that cannot be loaded, or that breaks its contract."""


class KernelError(PluginError):
    """A kernel that fails in a call, or gives back something else than its contract says."""


@dataclass(frozen=True, slots=True)
class FieldPath:
    """A field of a request: the keys and indices that lead to it. As text it is the path that
    clients read, like `messages[2].content`."""

    path: tuple[str | int, ...]

    @classmethod
    def of(cls, text: str) -> FieldPath:
        """The field that such a text names: `str` of it is that text again."""
        path: list[str | int] = []
        for key in text.split("."):
            end, indices = len(key), list[int]()
            while (at := _index(key, end)) is not None:
                indices.append(int(key[at + 1 : end - 1]))
                end = at
            path += [key[:end], *reversed(indices)]
        return cls(tuple(path))

    def __str__(self) -> str:
        keys = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path]
        return "".join(keys).removeprefix(".")


def _index(key: str, end: int) -> int | None:
    """Where the index begins that ends at `end`; None where none does."""
    at = key.rfind("[", max(0, end - _LONGEST_INDEX), end)
    digits = key[at + 1 : end - 1]
    plain = digits.isascii() and digits.isdigit() and (digits == "0" or digits[0] != "0")
    return at if at >= 0 and plain and key[end - 1] == "]" else None


_LONGEST_INDEX = 12  # characters, with its brackets
Said = str | Sequence[str | FieldPath]
"""A sentence: a text, or texts and the fields that it names, which a protocol may call otherwise.
"""


class RequestError(DsRuntimeError):
    """A request that cannot be served as asked.

    said: the sentence. param: the path of the offending field, if one is. Raise it with `of` where
    the sentence begins with that field.
    """

    def __init__(self, said: Said, param: str | None = None) -> None:
        self.said = sentence(said)
        super().__init__("".join(map(str, self.said)))
        self.param = param

    @classmethod
    def of(cls, param: str, *said: str | FieldPath) -> RequestError:
        """The error whose sentence is the field `param`, and then `said`."""
        return cls((FieldPath.of(param), *said), param)


def sentence(said: Said) -> tuple[str | FieldPath, ...]:
    """The parts of a sentence."""
    return (said,) if isinstance(said, str) else tuple(said)


class QueueFullError(DsRuntimeError):
    """The waiting queue is at its limit. `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class LogitsError(DsRuntimeError):
    """The model's logits are NaN or infinite, so that a choice, `rid`, cannot continue."""

    def __init__(self, message: str, rid: str) -> None:
        super().__init__(message)
        self.rid = rid


class EngineDeadError(DsRuntimeError):
    """An engine process ended. The message carries the reason that it gave."""


def unreadable(where: str, error: Exception, give: str) -> ConfigError:
    """The error for a file of the user's that cannot be read.

    where: the setting and the path. give: what to name instead.
    """
    why = error.strerror if isinstance(error, OSError) else None
    return ConfigError(f"{where}: cannot be read: {why or error}; give {give}")


def unwritable(where: str, error: Exception, give: str) -> ConfigError:
    """The same for a file or folder that cannot be written."""
    why = error.strerror if isinstance(error, OSError) else None
    return ConfigError(f"{where}: cannot be written: {why or error}; give {give}")


def named(error: BaseException) -> str:
    """The class and what it says."""
    return f"{type(error).__name__}: {error}".rstrip(": ")


class blaming(contextlib.AbstractContextManager[None]):
    """What a plugin raises in here is a PluginError that names it. Exceptions are errors that are
    meant for people, memory that ran out, and an interrupt of the user.

    who: the plugin and what it was asked; made only when it is needed where it is a function.
    further: the command that looks further. One object may serve many times.
    """

    def __init__(
        self, who: str | Callable[[], str], further: str, kind: type[PluginError] = PluginError
    ) -> None:
        self._who, self._further, self._kind = who, further, kind

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # A plugin is asked for every weight, and a kernel at every call: nothing is made here.
        if error is None or isinstance(error, DsRuntimeError | MemoryError):
            return
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported here
            return
        who = self._who if isinstance(self._who, str) else self._who()
        if isinstance(error, KeyboardInterrupt):
            error.add_note(f"in {who}")
        else:
            raise self._kind(f"{who} failed: {named(error)}; {self._further}") from error


def shown(value: object) -> str:
    """`value` for a message, cut short. Python refuses to write the longest integers."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."
