"""Each rank writes how many threads its kernels have, where it makes one that tells its memory."""

from __future__ import annotations

import os
from pathlib import Path

from ds_runtime.api import OPS, Footprint, Kernel, Promises, hookimpl
from ds_runtime_cpu import native
from ds_runtime_cpu.attention import MlaDecodeNative
from ds_runtime_cpu.workspace import mla_decode

NOTES = "DS_TEST_THREADS"  # names a folder


class MlaDecode(MlaDecodeNative):
    def __init__(self, facts):
        super().__init__(facts)
        note = Path(os.environ[NOTES], f"{os.getpid()}-{facts.layer}")
        note.write_text(f"{facts.threads} {native.threads()}")


@hookimpl
def ds_attention(facts):
    return [
        Kernel(
            OPS["mla_decode"],
            "counting:MlaDecode",
            "counting",
            rank=90,
            layouts=frozenset({"latent_pages.v1"}),
            promises=Promises(batch_invariant=True, many_rows=True),
            footprint=Footprint(workspace=mla_decode),
        )
    ]
