"""The draw of a captured step in which some rows have masks, captured as well.

Masks lie in a buffer that never moves and has room for one per row. Those of a step come up after
the draws' settings, in one transfer; a row without a rule names none. Steps without any mask do not
come here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_runtime.engine.step.transfer import Buffer, Upload
from ds_runtime.ops.binding.bind import Binding
from ds_runtime.ops.table import Ops

T = TypeVar("T")
Columns = Sequence[npt.NDArray[Any]]
Record = Callable[[Callable[[], None]], Callable[[], None]]


def placed(items: Sequence[T], places: npt.NDArray[np.int64], size: int) -> list[T | None]:
    """Each item at its place among `size`, None elsewhere."""
    found: list[T | None] = [None] * size
    for place, item in zip(places.tolist(), items, strict=True):
        found[place] = item
    return found


def packed(masks: Sequence[bytes | None], size: int) -> Columns:
    """MaskLogits' arrays: which mask each of `size` draws has, −1 for none, and all there are. At
    least one of `masks`, those of the first draws, is not None.
    """
    found = [mask for mask in masks if mask is not None]
    which = np.full(size, -1, np.int32)
    which[[i for i, mask in enumerate(masks) if mask is not None]] = range(len(found))
    bits = np.frombuffer(bytearray().join(found), np.int32)
    return which, bits.reshape(len(found), -1)


def can_capture(binding: Binding) -> bool:
    """Whether the kernels that draw after masks can be captured; if not, they run op by op."""
    needed = {("mask_logits", "sampler"), ("sample", "sampler")}
    chosen = [kernel for site, kernel in binding.choices if (site.op, site.module) in needed]
    return all(kernel is not None and kernel.promises.graph_safe for kernel in chosen)


class MaskedDraw:
    """A token per row of `logits` [size, vocab] float32, which its owner's replay fills."""

    def __init__(self, ops: Ops, logits: Tensor) -> None:
        self._ops, self._logits = ops, logits
        self.size, vocab = logits.shape
        self._words = -(-vocab // 32)
        room = self.size * (64 + 4 * self._words) + (1 << 10)
        self._buffer = Buffer(room, logits.device)
        self._tokens = torch.zeros(self.size, dtype=torch.int64, device=logits.device)
        self._replay: Callable[[], None] | None = None

    def fill(self, settings: Columns, masks: Sequence[bytes | None]) -> list[Tensor]:
        """Queue the transfer of a step's inputs. settings: Sample's, of `size` draws; masks: of as
        many draws as there are, None where every token may be drawn.
        """
        sent = Upload(self._logits.device)
        places = [sent.add(array) for array in (*settings, *packed(masks, self.size))]
        sent.send(self._buffer)
        return [sent[place] for place in places]

    def capture(self, settings: Columns, record: Record) -> None:
        """Run it with a mask for every row, and record it."""
        every = [b"\xff" * 4 * self._words] * self.size
        *sampling, which, masks = self.fill(settings, every)

        def run() -> None:
            allowed = self._ops.mask_logits(self._logits, masks, which)
            self._tokens.copy_(self._ops.sample(allowed, *sampling))

        self._replay = record(run)

    def draw(self, count: int) -> Tensor:
        """[count] int64: the first draws' tokens, of the logits that are there and what was filled
        in last.
        """
        assert self._replay is not None, "replayed before it was captured"
        self._replay()
        return self._tokens[:count].clone()  # the next step's come before these are collected
