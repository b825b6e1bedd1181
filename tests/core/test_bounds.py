"""What a child may take of memory and time, asked of the system that ends it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bounds need /proc")
NOBODY, MORE = 65534, 1 << 28  # bytes
START = """
import mmap, os, resource
from ds_runtime.common.interrupt import bound_memory, bounded
if not os.getuid():
    os.setuid({nobody})  # root may exceed a hard limit
"""
BOUND = """
def fits(nbytes):
    try:
        return bool(mmap.mmap(-1, nbytes))
    except OSError:
        return False
pages = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
if hard := {hard}:
    resource.setrlimit(resource.RLIMIT_AS, (pages + hard, pages + hard))
before = resource.getrlimit(resource.RLIMIT_AS)[1]
for more in {mores}:
    bound_memory(more)
assert resource.getrlimit(resource.RLIMIT_AS)[1] == before
assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
print(*(fits(n) for n in {asked}))
"""


def child(code: str, **values: object) -> subprocess.CompletedProcess[str]:
    code = (START + code).format(nobody=NOBODY, **values)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("hard", [None, 4 * MORE, MORE, MORE // 4])
@pytest.mark.parametrize("mores", [(MORE,), (2 * MORE, MORE), (MORE // 2, MORE)])
def test_memory_is_bounded_also_below_a_hard_limit(
    hard: int | None, mores: tuple[int, ...]
) -> None:
    """The last call counts, whatever the ones before."""
    least = MORE if hard is None else min(MORE, hard)
    done = child(BOUND, hard=hard, mores=mores, asked=(least // 2, 2 * least))
    assert (done.stdout.split(), done.stderr) == (["True", "False"], "")


@pytest.mark.parametrize(("seconds", "code"), [(0.05, -signal.SIGPROF), (30.0, 0)])
def test_time_is_bounded_while_the_block_runs(seconds: float, code: int) -> None:
    spin = "with bounded({seconds}):\n    for _ in range(20_000_000):\n        pass\n"
    assert child(spin, seconds=seconds).returncode == code


@pytest.mark.parametrize("error", ["ValueError", "PermissionError"])
def test_a_sandbox_that_allows_no_limits_ends_nothing(error: str) -> None:
    sandbox = "def forbid(*_):\n    raise {error}\nresource.setrlimit = forbid\nbound_memory(1)\n"
    done = child(sandbox, error=error)
    assert (done.returncode, done.stderr) == (0, "")
