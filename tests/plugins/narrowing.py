"""Whether bfloat16 weights are held in 12 bits each, which is the library's to say otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from ds_runtime_cpu import native, panels


@contextmanager
def using(isa: str, narrow: bool) -> Iterator[None]:
    """Variant `isa` in this process, as native.using, and weights packed so."""
    with native.using(isa):
        library = replace(native.library(), narrows=narrow)
        with mock.patch.object(panels, "library", lambda: library):
            yield
