"""`ds-runtime warm`: fill the caches of compiled kernels, and serve nothing."""

from __future__ import annotations

import sys
import time
from argparse import Namespace, _SubParsersAction
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from types import ModuleType
from typing import Any

from ds_runtime.cli.run.serve import add_settings, configs
from ds_runtime.config import EngineConfig
from ds_runtime.errors import UnsupportedError


def add(subcommands: _SubParsersAction[Any]) -> None:
    """Register the verb."""
    parser = subcommands.add_parser(
        "warm",
        help="compile the kernels that serve would, into their caches",
        description="Compile the kernels that serve would with the same flags, into caches on "
        "disk, and leave: for a container build on a machine with the accelerator. Of the model, "
        "config.json is enough; weights are random.",
    )
    add_settings(parser)
    parser.set_defaults(run=run, looks=True)


def run(args: Namespace) -> int:
    """Compile and leave."""
    config, _, explicit = configs(args)
    warm(config, explicit)
    return 0


def warm(
    config: EngineConfig, explicit: Collection[str], plugins: Sequence[ModuleType] = ()
) -> None:
    """Start an engine over random weights and end it; print what was compiled.

    Raises UnsupportedError where no kernel that is chosen compiles, and what a start raises.
    plugins: modules besides those that are installed.
    """
    from ds_runtime.assembly.assemble import assemble
    from ds_runtime.offline.llm import LLM
    from ds_runtime.platform.compilations import counted

    config = replace(config, load_format="dummy")
    explicit = {*explicit, "load_format"}
    assembly = assemble(config, tuple(explicit), plugins)
    chosen = [kernel for _, kernel in assembly.binding.choices if kernel is not None]
    chosen += (kernel for shares in assembly.binding.shares.values() for kernel in shares.kernels)
    if not any(k.compiles.ahead or k.compiles.rehearsal for k in chosen):
        device = assembly.platform.info()
        raise UnsupportedError(
            f"warm: no kernel that serves this model on {device.name} (platform "
            f"{assembly.platform.name}) is compiled when it first runs; run this where "
            "the accelerator is, or leave it out"
        )
    began, before = time.monotonic(), counted()
    given = {f.name: getattr(config, f.name) for f in fields(config) if f.name in explicit}
    with LLM(**given, extra_plugins=plugins):
        found = Counter[str]()
        for (compiler, kernel), count in counted().items():
            found[compiler] += count - before.get((compiler, kernel), 0)
    said = ", ".join(f"{count} by {name}" for name, count in sorted(found.items()) if count)
    took = f"{time.monotonic() - began:.1f} s"
    print(f"compiled {said} in {took}" if said else f"nothing was left to compile ({took})")
    sys.stdout.flush()
