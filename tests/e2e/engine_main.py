"""Starts an engine's processes, prints their ids when ready, and waits to be killed."""

from __future__ import annotations

import sys
import time

import zmq

from ds_runtime.config import EngineConfig
from ds_runtime.engine.process.launch import EngineProcesses
from ds_runtime.engine.process.transport import bind_pull, private_folder


def main(model: str) -> None:
    with private_folder() as folder:
        config = EngineConfig(model=model, platform="cpu", dtype="float32", kv_memory=2_000_000)
        engine = EngineProcesses(config, folder)
        context = zmq.Context()
        inbox = bind_pull(context, engine.from_engine)
        engine.start()
        inbox.recv()
        print(*engine.pids, flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1])
