"""An honest stream beside hostile clients: none delays its tokens by more than the bound."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from attackers import ATTACKERS

sys.path.append(str(Path(__file__).parents[1] / "e2e"))
from served import serving

pytestmark = pytest.mark.slow
BOUND = 0.020  # seconds beyond what equally many usual requests cost
SECONDS = 4.0  # of one try
TRIES = 6  # the machine's own noise lengthens gaps, and never shortens one
SCRIPT = str(Path(__file__).with_name("attackers.py"))


@contextlib.contextmanager
def attacking(url: str, *names: str) -> Iterator[Counter[str]]:
    """Attacks under way; how many rounds of each are over."""
    process = subprocess.Popen(
        [sys.executable, SCRIPT, "attack", url, *names], stdout=subprocess.PIPE, text=True
    )
    rounds: Counter[str] = Counter()
    begun = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            rounds[line.strip()] += 1
            if len(rounds) == len(set(names)):
                begun.set()
        process.stdout.close()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert begun.wait(120), f"of {names} only {rounds} came through"
        yield rounds
    finally:
        process.kill()
        process.wait()
        reader.join()


def largest_gap(url: str) -> float:
    done = subprocess.run(
        [sys.executable, SCRIPT, "honest", url, str(SECONDS)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return max(json.loads(done.stdout))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("demo", "--threads", "1") as served:
        yield served.wait_url()


@pytest.fixture(scope="module")
def usual(url: str) -> float:
    """The largest gap beside usual requests: the step's own time, and the machine's noise."""
    with attacking(url, *["plain"] * 3):
        return min(largest_gap(url) for _ in range(3))


@pytest.mark.parametrize("names", [*((n,) for n in ATTACKERS), tuple(ATTACKERS)], ids="+".join)
def test_no_attacker_delays_anothers_token(url: str, usual: float, names: tuple[str, ...]) -> None:
    found = list[float]()
    with attacking(url, *names):
        while not found or (min(found) > usual + BOUND and len(found) < TRIES):
            found.append(largest_gap(url))
    print(f"{'+'.join(names)}: {min(found) * 1000:.1f} ms, usual {usual * 1000:.1f} ms")
    assert min(found) <= usual + BOUND, found
