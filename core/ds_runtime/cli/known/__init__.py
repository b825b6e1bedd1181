"""Flags that people know from other engines, but for those that name a vendor. Torch-free.

Read by the commands that start an engine, and by the page that lists them. To add a flag, write its
usage below the sentence that says what it means here, in the module of its topic.
"""

from __future__ import annotations

from collections.abc import Mapping

from ds_runtime.cli.known import devices, kernels, memory, model, observing, server, steps
from ds_runtime.cli.known.bench import BATCH, SERVING
from ds_runtime.cli.known.settle import settle
from ds_runtime.config.spelling import Spelling

TOPICS: Mapping[str, Mapping[str, str | Spelling]] = {
    "Files of the model": model.FILES,
    "Loading": model.LOADING,
    "Adapters": model.ADAPTERS,
    "Other kinds of models": model.OTHERS,
    "Ranks and replicas": devices.RANKS,
    "Experts": devices.EXPERTS,
    "Engines that share the work": devices.APART,
    "KV cache and weights": memory.CACHE,
    "Memory beyond the device": memory.TIERS,
    "Scheduling": steps.SCHEDULING,
    "Captured steps": steps.CAPTURE,
    "Speculation": steps.SPECULATION,
    "Kernels": kernels.KERNELS,
    "Requests and answers": server.API,
    "Listening": server.LISTENING,
    "Logs": observing.LOGS,
    "Metrics and traces": observing.METRICS,
    "Looking into a model": observing.LOOKING,
}
KNOWN: Mapping[str, str | Spelling] = {
    flag: meant for flags in TOPICS.values() for flag, meant in flags.items()
}

__all__ = ["BATCH", "KNOWN", "SERVING", "TOPICS", "settle"]
