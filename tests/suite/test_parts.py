"""What a run takes of more than it can try."""

from __future__ import annotations

import pytest

import parts


@pytest.mark.parametrize("size", [1, 7, 8, 9, 53])
def test_a_part_is_spread_over_all(monkeypatch, size):
    monkeypatch.setattr(parts, "is_deep", lambda: False)
    found = parts.some_of(range(size), 8)
    assert len(found) == min(8, size) == len(set(found)) and found == sorted(found)
    steps = {b - a for a, b in zip(found, [*found[1:], size], strict=True)}
    assert found[0] == 0 and max(steps) - min(steps) <= 1


def test_before_a_release_it_is_all(monkeypatch):
    monkeypatch.setattr(parts, "is_deep", lambda: True)
    assert parts.some_of(range(53), 8) == list(range(53))
