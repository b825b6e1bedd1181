"""Shards cover everything exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime.errors import ConfigError
from ds_runtime.parallel.layout import Shard


@given(st.integers(1, 9), st.integers(0, 50))
def test_even_parts(size, part):
    n = size * part
    shards = [Shard(rank, size).slice(n, "heads") for rank in range(size)]
    assert [i for s in shards for i in range(n)[s]] == list(range(n))
    assert {s.stop - s.start for s in shards} == {part}


@given(st.integers(1, 9), st.integers(0, 50))
def test_padded_parts(size, n):
    shards = [Shard(rank, size).padded_slice(n) for rank in range(size)]
    assert [i for s in shards for i in range(n)[s]] == list(range(n))
    assert all(s.start in (rank * -(-n // size), n) for rank, s in enumerate(shards))


def test_errors():
    with pytest.raises(ConfigError, match="--tp 3: heads 16 is not divisible"):
        Shard(0, 3).slice(16, "heads")
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        Shard(2, 2)
