"""Paths as users write them. Torch-free."""

from __future__ import annotations

from pathlib import Path

from ds_runtime.errors import ConfigError


def user_path(text: str, what: str) -> Path:
    """The path, where `~` is the user's home. what: the setting, for the message.

    Raises ConfigError where that is not known: a container may run as a user who has none.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as e:
        raise ConfigError(
            f"{what} {text}: the home folder is not known: set HOME, or write the whole path"
        ) from e
