"""How unevenly requests may lie on groups that each have a cache of their own. Torch-free."""

from __future__ import annotations

_SLACK = 8  # requests more than another group, and half as many again


def most_beside(fewest: int) -> int:
    """Requests that a group may run and still get what its cache knows, compared with one that runs
    the fewest of all.
    """
    return fewest * 3 // 2 + _SLACK


def most_of(requests: int, groups: int) -> int:
    """Requests that one of `groups` runs at most of this many, as long as they end alike."""
    if groups == 1:
        return requests
    return min(requests, most_beside(-(-requests // groups)))
