"""How many examples a test of properties tries under the profile that runs."""

from __future__ import annotations

from hypothesis import settings


def examples(usual: int) -> int:
    """`usual`, scaled as the profile scales hypothesis' own 100."""
    return max(1, usual * settings.default.max_examples // 100)
