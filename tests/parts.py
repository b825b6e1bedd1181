"""What a test takes of a set that is too large for each run.

`.ci/run` has the profile `ci`, and `.ci/run --all`, which a release passes, `deep`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import settings

T = TypeVar("T")


def is_deep() -> bool:
    """Whether everything is tried."""
    return settings.default.max_examples > 100


def some_of(every: Sequence[T], count: int) -> list[T]:
    """All under the profile `deep`, else `count` of them at even steps."""
    if is_deep() or count >= len(every):
        return list(every)
    return [every[i * len(every) // count] for i in range(count)]
