"""What a test takes of a set that is too large for each run.

`.ci/run` has the profile `ci`, and `.ci/run --all`, which a release passes, `deep`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest
from _pytest.mark import ParameterSet
from hypothesis import settings

T = TypeVar("T")


def is_deep() -> bool:
    """Whether everything is tried."""
    profile = settings.default
    assert profile is not None
    return profile.max_examples > 100


def some_of(every: Sequence[T], count: int) -> list[T]:
    """All under the profile `deep`, else `count` of them at even steps."""
    if is_deep() or count >= len(every):
        return list(every)
    return [every[i * len(every) // count] for i in range(count)]


def mostly_slow(cases: Iterable[Any], kept: int) -> list[Any]:
    """For `parametrize`: the first `kept` as they are, the others marked slow."""
    every = list(cases)
    return [*every[:kept], *(_slow(case) for case in every[kept:])]


def _slow(case: Any) -> Any:
    """As pytest.param. A ParameterSet keeps its own marks and id."""
    if isinstance(case, ParameterSet):
        return case._replace(marks=(*case.marks, pytest.mark.slow))
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
