"""Ranks with a device each, for tests on accelerators: a process of its own for each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_runtime.plugins.manager import load_plugins
from ds_runtime.plugins.select_platform import select_platform

LIMIT = 240.0  # seconds until every rank has answered


def check_ranks(folder: Path, size: int, rank_of: Callable[..., Any]) -> None:
    """That `rank_of(rank, size, address, results)` puts "" into results on every rank. Skips where
    there are fewer devices, or their links allow no such sums."""
    platform, _ = select_platform(load_plugins())
    try:
        links = [platform.info(rank).link for rank in range(size)]
    except Exception as e:
        pytest.skip(f"{size} devices are needed: {e}")
    if not all(size in platform.fast_sums.get(link, ()) for link in links):
        pytest.skip(f"no fast sums of {size} ranks of {platform.name} over {set(links)}")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    given = [(rank, size, f"file://{folder}/meet", results) for rank in range(size)]
    ranks = [context.Process(target=rank_of, args=one, daemon=True) for one in given]
    for process in ranks:
        process.start()
    try:
        assert [results.get(timeout=LIMIT) for _ in ranks] == [""] * size
    finally:
        for process in ranks:
            process.kill()
            process.join()
