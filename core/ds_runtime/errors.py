"""The errors that a user can meet. Each message names the thing, its value and the remedy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


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


class RequestError(DsRuntimeError):
    """A request that cannot be served as asked. `param` names the offending field, if one is."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(DsRuntimeError):
    """The waiting queue is at its limit. `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class LogitsError(DsRuntimeError):
    """The model's logits are NaN or infinite, so that a choice, `rid`, cannot go on."""

    def __init__(self, message: str, rid: str) -> None:
        super().__init__(message)
        self.rid = rid


class EngineDeadError(DsRuntimeError):
    """An engine process ended. The message carries the reason that it gave."""


def named(error: BaseException) -> str:
    """The class and what it says."""
    return f"{type(error).__name__}: {error}".rstrip(": ")


@contextlib.contextmanager
def blaming(who: str, further: str, kind: type[PluginError] = PluginError) -> Iterator[None]:
    """What a plugin raises in here is a PluginError that names it, whatever it is: but an error
    that is meant for people, memory that ran out, and an interrupt, which is the user's.

    further: the command that looks further.
    """
    try:
        yield
    except (DsRuntimeError, MemoryError):
        raise
    except KeyboardInterrupt as e:
        e.add_note(f"in {who}")
        raise
    except BaseException as e:
        if type(e).__name__ == "OutOfMemoryError":  # torch's, which is not imported here
            raise
        raise kind(f"{who} failed: {named(e)}; {further}") from e


def shown(value: object) -> str:
    """`value` for a message, cut short. Python refuses to write the longest integers."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."
