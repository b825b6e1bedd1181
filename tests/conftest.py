"""Triton's kernels run in its interpreter where no accelerator is.

That must be chosen before Triton is first imported, in this process and in those of the tests.
"""

from __future__ import annotations

import os

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    if not torch.accelerator.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
