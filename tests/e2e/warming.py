"""`ds-runtime warm` twice for a folder with a config.json alone, over recorded launches."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "plugins"))
import launches
from random_requests import write

from ds_runtime.cli.run.warm import warm
from ds_runtime.config import EngineConfig

folder = Path(sys.argv[1])
write(folder, "v2-lite")
for file in folder.iterdir():
    if file.name != "config.json":
        file.unlink()
settings = {"model": str(folder), "platform": "described", "plugins": ("triton", "checkpoints")}
settings |= {"max_running_requests": 8, "max_step_tokens": 256, "chunked_prefill_size": 256}
with launches.recording():
    for _ in range(2):
        warm(EngineConfig(**settings), settings.keys(), [launches])
