"""What this machine reaches: its memory read by the native library, matmuls by oneDNN."""

from __future__ import annotations

import statistics

import torch

from ds_runtime.api import Ceilings, ceilings
from ds_runtime_cpu import machine, native

STREAMS = (1, 4)  # of reading at once per thread: which hides more of memory's latency differs
_SECONDS = 2.0  # of reading: memory is what other processes disturb most
_SHORT, _SMALL = 0.4, 512 << 20  # and bytes, where it is only to tell how fast memory is right now


def measure(fast: frozenset[str]) -> Ceilings:
    """With the threads that this process has. `fast`: dtypes that hardware multiplies, of which
    bfloat16 is measured only then."""
    cache = machine.last_level_cache()
    size = ceilings.buffer_bytes(cache, machine.memory()[1])
    device = torch.device("cpu")
    if native.isa_in_use() is None:
        read, by = ceilings.bandwidth(device, _nothing, size), "torch's sums"
    else:
        (read, _), by = bandwidth(size), "the native library"
    compute = ceilings.compute(device, _nothing, fast)
    return Ceilings(read, compute, cache, f"memory by {by}, matmuls by torch")


def _nothing() -> None:
    """Nothing is queued on a CPU."""


def read_rate() -> float:
    """Bytes per second of the median reading within less than a second."""
    cache = machine.last_level_cache()
    size = min(ceilings.buffer_bytes(cache, machine.memory()[1]), max(_SMALL, 4 * cache))
    return bandwidth(size, _SHORT)[1]


def bandwidth(nbytes: int, spent: float = _SECONDS) -> tuple[float, float]:
    """Bytes per second of reading a buffer of that size, on large pages where there are any: of the
    fastest reading, and of the median one, within `spent` seconds."""
    words = torch.empty(nbytes // 8, dtype=torch.int64)
    call, total = native.calls(), torch.empty(1, dtype=torch.int64)
    call.large_pages(words.data_ptr(), words.nbytes)
    words.fill_(1)

    def seconds(streams: int) -> list[float]:
        where = words.data_ptr(), words.nbytes, streams, total.data_ptr()
        return ceilings.timed(lambda: call.read(*where), _nothing, spent / len(STREAMS))

    readings = [seconds(streams) for streams in STREAMS]
    typical = min(map(statistics.median, readings))
    return words.nbytes / min(map(min, readings)), words.nbytes / typical
