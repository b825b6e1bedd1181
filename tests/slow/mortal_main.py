"""The offline API with two ranks, of which one dies: `mortal_main.py MODEL PLATFORM`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from ds_runtime import LLM, SamplingParams


def main(model: str, platform: str) -> None:
    """A prompt of as many tokens as the plugin waits for."""
    plugin = importlib.import_module("mortal")
    given: dict[str, Any] = {
        "dtype": "float32",
        "kv_memory": "32MB",
        "context_length": 128,
        "threads": 1,
        "max_running_requests": 2,
    }
    given["disable_graph"] = plugin.plan()[1] != "capture"
    with LLM(model, platform, **given, tp=2, extra_plugins=[plugin]) as llm:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        llm.generate([list(range(5, 5 + plugin.PROMPT))], params)
        print("answered", flush=True)
    print("closed", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).with_name("plugins")))
    main(*sys.argv[1:])
