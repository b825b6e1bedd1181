"""The errors that a user can meet. Each message names the thing, its value and the remedy."""

from __future__ import annotations


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


class EngineDeadError(DsRuntimeError):
    """An engine process ended. The message carries the reason that it gave."""


def shown(value: object) -> str:
    """`value` for a message, cut short. Python refuses to write the longest integers."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."
