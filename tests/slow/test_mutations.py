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


@pytest.mark.parametrize("faults", mutate.groups(), ids=lambda faults: faults[0].name)
def test_faults_are_caught(copy: object, faults: object) -> None:
    """Each alone; the group shares one run without a fault, of all tests that turned red."""
    found = mutate.check_faults(copy, faults)
    kept = {name: outcome.output for name, outcome in found.items() if outcome.green}
    assert not kept, "\n".join(f"not caught: {name}\n{said}" for name, said in kept.items())


def test_there_are_enough_faults() -> None:
    assert len({f.name for f in mutate.FAULTS}) == len(mutate.FAULTS) >= 12
