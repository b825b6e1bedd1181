"""The marker of a plugin's hooks: pluggy finds functions by it."""

from __future__ import annotations

import pluggy

hookimpl = pluggy.HookimplMarker("ds_runtime")
