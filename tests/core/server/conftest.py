"""The fixture of most server tests: one server for a whole file."""

from __future__ import annotations

import pytest
from server_harness import serving


@pytest.fixture(scope="module")
def served(bpe_folder):
    with serving(bpe_folder) as one:
        yield one
