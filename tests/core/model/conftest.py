"""Tiny models: threads cost more than they bring, the more so beside other work."""

from __future__ import annotations

import pytest
import torch
from late_device import LateDevice

from ds_runtime.checkpoint import shards as checkpoint
from ds_runtime.checkpoint import staging
from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.checkpoint.staging import Staging
from tiny_models import Make, made_once


@pytest.fixture(autouse=True, scope="module")
def small_models(one_thread: None) -> None:
    """Every module here."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return made_once(tmp_path_factory, seed=3)


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """(folder, oracle) of DeepSeek-V4 with six layers of all kinds."""
    from hybrid_models import BASE, HybridOracle

    folder, oracle = tmp_path_factory.mktemp("six"), HybridOracle(BASE, seed=1)
    oracle.model.save_pretrained(folder)
    return str(folder), oracle


@pytest.fixture
def by_way_of_a_device(monkeypatch):
    """Reads for the device "meta" go through a ring to the host's memory; how long each was."""
    LateDevice(monkeypatch)
    monkeypatch.setattr(staging, "event_on", lambda device: torch.Event("cpu"))
    ring, sizes = Staging(torch.device("cpu"), 4096), []
    monkeypatch.setattr(checkpoint, "shares_memory", lambda device: device == "cpu")
    monkeypatch.setattr(Checkpoint, "_ring", lambda self, device: ring)
    plain = Checkpoint._fetched

    def fetched(self, file, begin, size, device, *rest):
        sizes.append(size)
        return plain(self, file, begin, size, "cpu", *rest)

    monkeypatch.setattr(Checkpoint, "_fetched", fetched)
    return sizes
