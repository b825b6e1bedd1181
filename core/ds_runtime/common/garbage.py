"""Garbage collection and steps: what is loaded, and the prompts that wait, are not walked.

CPython collects the old generation again once it has grown by a quarter. Frozen objects do not
count in that, so a few hundred prompts suffice: each of these collections walks every token id of
every request, while the device waits.
"""

from __future__ import annotations

import gc

_SELDOM = 1000  # collections of the middle generation before the old one is looked at
_users = 0
_before = gc.get_threshold()


def settle() -> None:
    """Once everything is loaded: keep what is here out of collections, and make full ones rare.
    Young objects are collected as before. `unsettle` undoes it; calls may be nested.
    """
    global _users, _before
    if not _users:
        _before = gc.get_threshold()
        gc.set_threshold(*_before[:2], _SELDOM)
    _users += 1
    gc.freeze()


def unsettle() -> None:
    """Undo one `settle`; the last one brings the process's own settings back."""
    global _users
    if not _users:
        return
    _users -= 1
    gc.unfreeze()
    if not _users:
        gc.set_threshold(*_before)
