"""Where a Linear lies in a checkpoint, and what a loader's `read` is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ds_runtime.model.checkpoint import Checkpoint
from ds_runtime.ops.spec import Encoding


@dataclass(frozen=True, slots=True)
class Place:
    """Where one Linear lies. tensors: component → name in the checkpoint, the weight first.

    shape: of the matrix that the names hold. index: which matrix of a stack, or None.
    first_row: where the Linear begins in that matrix (gate and up of fused experts share one).
    """

    tensors: Mapping[str, str]
    shape: tuple[int, int]
    index: int | None = None
    first_row: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors, the weight first."""
        return tuple(self.tensors.values())


@dataclass(frozen=True, slots=True)
class PartRequest:
    """Read these rows and columns of one Linear onto a device. They count within the Linear."""

    checkpoint: Checkpoint
    quantization: Mapping[str, Any]
    module: str
    encoding: Encoding
    place: Place
    rows: slice
    cols: slice
    device: torch.device | str = "cpu"
