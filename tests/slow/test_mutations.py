"""Every named fault turns one of its tests red that is green without it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import mutate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def copy() -> Iterator[object]:
    with mutate.copied() as made:
        yield made


@pytest.mark.parametrize("fault", mutate.FAULTS, ids=lambda f: f.name)
def test_the_fault_is_caught(copy: object, fault: object) -> None:
    found = mutate.check_fault(copy, fault)
    assert not found.green, found.output


def test_there_are_enough_faults() -> None:
    assert len({f.name for f in mutate.FAULTS}) == len(mutate.FAULTS) >= 12
