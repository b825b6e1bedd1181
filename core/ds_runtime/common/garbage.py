"""Garbage collection and steps: what is loaded, and the prompts that wait, are not walked.

CPython collects the old generation again once it has grown by a quarter. Frozen objects do not
count in that, so a few hundred prompts suffice: each of these collections walks every token id of
every request, while the device waits.

CPython unfreezes all or nothing. Where the process has frozen objects of its own, as a server does
before it forks, these stay frozen. What an engine loads is then not frozen.
"""

from __future__ import annotations

import gc

_SELDOM = 1000  # collections of the middle generation before the old one is looked at
_INTERPRETERS = 1000  # CPython 3.12 begins with 375 frozen objects, other versions with none
_users = 0
_freezes = False
_before = gc.get_threshold()


def settle() -> None:
    """Once everything is loaded: keep what is here out of collections, and make full ones rare.
    Young objects are collected as before. `unsettle` undoes it; calls may be nested.
    """
    global _users, _before, _freezes
    if not _users:
        _freezes = gc.get_freeze_count() < _INTERPRETERS
        _before = gc.get_threshold()
        gc.set_threshold(*_before[:2], _SELDOM)
    _users += 1
    if _freezes:
        gc.freeze()


def unsettle() -> None:
    """Undo one `settle`; the last one brings the process's own settings back.

    Objects that the process froze before the first engine stay frozen. Where there were none, the
    first engine that closes unfreezes those of all engines.
    """
    global _users
    if not _users:
        return
    _users -= 1
    if _freezes:
        gc.unfreeze()
    if not _users:
        gc.set_threshold(*_before)
