"""Waiting for descriptors, whatever their numbers."""

from __future__ import annotations

import os
import time
from pathlib import Path

import ds_runtime
from ds_runtime.common.readable import readable


def test_what_can_be_read_and_what_has_ended():
    (first, to_first), (second, to_second) = os.pipe(), os.pipe()
    large = os.dup2(first, 900 + first)
    try:
        begin = time.monotonic()
        assert readable([first, second], 0.05) == []
        assert 0.04 < time.monotonic() - begin < 5
        os.write(to_first, b"x")
        assert readable([second, large], None) == [large]
        os.close(to_second)
        assert sorted(readable([first, second], None)) == sorted([first, second])
    finally:
        for one in (first, to_first, second, large):
            os.close(one)


def test_nothing_asks_select_which_takes_small_numbers_alone():
    root = Path(ds_runtime.__file__).parents[2]
    below = ("core", "kit/*/ds_runtime_*", "plugins/*/ds_runtime_*")
    sources = [path for folder in below for path in root.glob(f"{folder}/**/*.py")]
    assert len(sources) > 300
    assert not [path for path in sources if "select.select(" in path.read_text()]
