"""Stand-ins for all that ds_runtime_cuda compiles when it is first needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ds_runtime_cuda import (
    attention,
    block7,
    dense12,
    grouped_fp8,
    linear12,
    streamed,
    token_experts,
)
from vendor_doubles import attention as attention_double
from vendor_doubles import coded7, coded12, grouped
from vendor_doubles import streamed as streamed_double

_DOUBLES = {
    streamed: streamed_double,
    attention: attention_double,
    grouped_fp8: grouped,
    block7: coded7,
    dense12: coded12,
    linear12: coded12,
    token_experts: coded12,
}
_CACHES = (
    *(module._module for module in (streamed, grouped_fp8, block7, dense12, linear12)),
    token_experts._module,
    attention._function,
    linear12._few_module,
    linear12._tile,
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
