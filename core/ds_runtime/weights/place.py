"""Where a Linear lies in a checkpoint, and what a loader's `read` is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.checkpoint.tensors import StoredTensor
from ds_runtime.ops.contract import Encoding


@dataclass(frozen=True, slots=True)
class Place:
    """Where one Linear lies.

    * tensors: component → name in the checkpoint, the weight first.
    * shape: (rows, columns) of the matrix that the names hold.
    * index: which matrix of a stack, or None.
    * first_row: where the Linear begins in that matrix. Gate and up of fused experts share one.
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
    """A request to `QuantLoader.read`: rows and columns of one Linear, onto a device. Several
    threads ask at once.

    * checkpoint: the open files; use `read` and `entry`.
    * quantization: the config that the loader accepted.
    * module: the Linear's path, which is the name of the part.
    * encoding: what the loader returned for it.
    * place: which tensors hold it.
    * rows, cols: what to read, within the Linear and without a step. Both may be empty, and may cut
      through whatever the format packs together.
    * device: where the part is to be.
    """

    checkpoint: Checkpoint
    quantization: Mapping[str, Any]
    module: str
    encoding: Encoding
    place: Place
    rows: slice
    cols: slice
    device: torch.device | str = "cpu"

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the part that is asked for."""
        return (self.rows.stop - self.rows.start, self.cols.stop - self.cols.start)

    @property
    def matrix_rows(self) -> slice:
        """The rows, counted in the matrix that the tensors hold: gate and up may share one."""
        first = self.place.first_row
        return slice(self.rows.start + first, self.rows.stop + first)

    def __contains__(self, component: str) -> bool:
        """Whether the checkpoint has this component of the Linear."""
        return component in self.place.tensors

    def entry(self, component: str) -> StoredTensor:
        """File, dtype (as safetensors names it) and shape of a stored tensor.

        Raises CheckpointError if there is none. A stack of matrices has a leading dimension more.
        """
        return self.checkpoint.entry(self.place.tensors[component])

    def read(
        self,
        component: str,
        rows: slice | None = None,
        cols: slice | None = None,
        device: torch.device | str | None = None,
        looks: bool = True,
    ) -> Tensor:
        """Returns a part of a stored tensor as a new tensor. Only what is asked is read from the
        file.

        * component: its key in `Place.tensors`.
        * rows, cols: of its first and last dimension, counted in the tensor and not in the Linear.
          In a stack, those of the Linear's matrix. None: all.
        * device: instead of the request's.
        * looks: whether NaN is looked for, if the user does not allow it. If False, the caller
          does.

        Raises CheckpointError for what is not there or cannot be read.
        """
        return self.checkpoint.read(
            self.place.tensors[component],
            rows,
            cols,
            self.place.index,
            self.device if device is None else device,
            looks,
        )


@dataclass(frozen=True, slots=True)
class LoaderSample:
    """A whole Linear as checkpoints of a format store it, and the values that it means.

    * quantization: the quantization_config, as JSON has it.
    * tensors: component of the Encoding → the stored tensor.
    * values: [rows, cols] float32, what the tensors mean. Compute them without `read`.
    """

    quantization: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    values: Tensor
