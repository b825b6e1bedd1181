"""`ds-runtime tune comm` names the rank that fails, ends, is stopped, or does not answer."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from ds_runtime.errors import DsRuntimeError
from ds_runtime_bench.ops import comm
from ds_runtime_cpu.platform import CpuPlatform


class Faulty(CpuPlatform):
    """One rank of its communicators does what `fault` says, once all have met."""

    def __init__(self, fault, rank):
        super().__init__()
        self.fault, self.rank = fault, rank

    def communicator(self, rank, size, init_method, timeout=600.0):
        made = super().communicator(rank, size, init_method, timeout)
        made.barrier()
        if rank == self.rank:
            if self.fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.fault == "ends":
                os._exit(3)
            elif self.fault == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif self.fault == "fails":
                raise ValueError("no memory\nto share")
            time.sleep(600)  # hangs
        return made


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("killed", "rank {} was killed \\(SIGKILL\\)"),
        ("ends", "rank {} ended with code 3"),
        ("stopped", "rank {} \\(process [0-9]+\\) is stopped, and the other ranks wait for it"),
        ("fails", "rank {}: ValueError: no memory to share"),
        ("hangs", "rank 0, 1: no answer within 8 s"),
    ],
)
def test_the_rank_is_named_in_one_sentence(monkeypatch, fault, said, rank):
    monkeypatch.setattr(comm, "_PATIENCE", 8.0 if fault == "hangs" else 300.0)
    began = time.monotonic()
    with pytest.raises(DsRuntimeError) as raised:
        comm.measure(Faulty(fault, rank), 2, (4096,))
    assert re.fullmatch(f"tune comm: {said.format(rank)}", str(raised.value))
    assert time.monotonic() - began < 60
