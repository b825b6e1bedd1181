"""`pytest -m clients tests/clients` runs each client in its own environment against a server.

With --record, the newest version of each is taken, and versions and bytes are written down.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "e2e"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record", action="store_true", help="take the newest clients; write what they send"
    )


@pytest.fixture(scope="module")
def url():
    """A server of the demo model that runs as its users start it."""
    from served import serving

    with serving("demo", "--max-running-requests", "8") as server:
        yield server.wait_url()
