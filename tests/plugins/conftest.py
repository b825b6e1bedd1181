"""Kernel tests run on one thread."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def small_samples(one_thread: None) -> None:
    """Every module here."""
