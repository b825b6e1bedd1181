"""Runs `serve` with the fake engine in a process of its own.

Arguments: folder, port, mode, and settings of the server as JSON.
"""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from pathlib import Path

from fake_engine import FakeEngine

from ds_runtime.config import EngineConfig, ServerConfig
from ds_runtime.engine.process.transport import ipc
from ds_runtime.errors import DsRuntimeError
from ds_runtime.server.serve import serve
from ds_runtime.text.tokenizer import Tokenizer


def leave_with_parent():
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def engine_main(model, to_engine, from_engine, mode):
    threading.Thread(target=leave_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "fails":
        sys.exit(3)
    if mode == "dies later" and Path(model, "died").exists():
        sys.exit(4)
    engine = FakeEngine(Tokenizer.load(model), to_engine, from_engine, ready=mode != "loads")
    engine.run()
    if mode == "stubborn":
        time.sleep(60)


class Processes:
    def __init__(self, config, folder, replica):
        self.to_engine, self.from_engine = ipc(folder, "to_engine"), ipc(folder, "from_engine")
        args = (config.model, self.to_engine, self.from_engine, sys.argv[3])
        self.replica = replica
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=engine_main, args=args, daemon=True)
        print(f"folder {folder}", flush=True)

    def start(self):
        self.process.start()
        print(f"engine {self.process.pid} replica {self.replica}", flush=True)

    def poll(self):
        code = self.process.exitcode
        return None if code is None else f"engine rank 0 left with exit code {code}"

    def trace(self):
        print(f"traced {self.replica}", flush=True)

    def stop(self, timeout=5.0):
        self.process.terminate()
        self.process.join(timeout)
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGKILL)


if __name__ == "__main__":
    settings = json.loads(sys.argv[4])
    settings = {n: tuple(v) if isinstance(v, list) else v for n, v in settings.items()}
    try:
        code = serve(
            EngineConfig(model=sys.argv[1], dp=settings.pop("dp", None)),
            ServerConfig(port=int(sys.argv[2]), **settings),
            launch=lambda config, folder, explicit, n: Processes(config, Path(folder), n),
        )
    except DsRuntimeError as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        code = 2
    sys.exit(code)
