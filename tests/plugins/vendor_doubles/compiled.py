"""Stand-ins for all that ds_runtime_cuda compiles when it is first needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ds_runtime_cuda import attention, experts_streaming, fp8_compressed, fp8_few, grouped_fp8
from ds_runtime_cuda.packed12 import experts, format, linear
from vendor_doubles import attention as attention_double
from vendor_doubles import experts_streaming as streaming_double
from vendor_doubles import fp8_compressed as compressed_double
from vendor_doubles import fp8_few as few_double
from vendor_doubles import grouped
from vendor_doubles import packed12 as packed_double

_DOUBLES = {
    experts_streaming: streaming_double,
    attention: attention_double,
    grouped_fp8: grouped,
    fp8_compressed: compressed_double,
    fp8_few: few_double,
    format: packed_double,
    linear: packed_double,
    experts: packed_double,
}
_CACHES = (
    experts_streaming._module,
    grouped_fp8._module,
    fp8_compressed._module,
    fp8_few._module,
    format._module,
    linear._module,
    experts._module,
    attention._function,
    linear._few_module,
    linear._tile,
)


@contextmanager
def standing_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module, double in _DOUBLES.items():
        monkeypatch.setattr(module, "nvrtc", double)
    for cache in _CACHES:
        cache.cache_clear()
    yield
    for cache in _CACHES:  # they hold stand-ins
        cache.cache_clear()
