"""Tiny checkpoints with their oracles, and prompts for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ds_runtime_kit.models.oracle import Oracle
from ds_runtime_kit.models.tiny import write_tiny, write_tiny_fp8

Make = Callable[..., tuple[Path, Oracle]]
LENGTHS = (150, 64, 65, 1, 33, 16)  # the original rope length of most shapes is 64


def made_once(factory: pytest.TempPathFactory, seed: int) -> Make:
    """(shape, fp8, changes of its config.json) → (folder, oracle), each made once."""

    @cache
    def make(shape: str, fp8: bool = False, **changes: Any) -> tuple[Path, Oracle]:
        folder = factory.mktemp(shape)
        write = write_tiny_fp8 if fp8 else write_tiny
        return folder, Oracle(write(folder, shape, seed=seed, **changes))

    return make


def prompts_of(oracle: Oracle, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    return [oracle.draw_prompt(n, seed * 100 + i) for i, n in enumerate(lengths)]


def byte_prompts(count: int, seed: int, most: int, least: int = 1) -> list[list[int]]:
    """Random prompts of `least` to `most` tokens, for vocabularies in which a byte is a token."""
    draw = random.Random(seed)
    return [
        [draw.randrange(2, 258) for _ in range(draw.randint(least, most))] for _ in range(count)
    ]
