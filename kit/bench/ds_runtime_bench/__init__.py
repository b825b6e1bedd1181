"""Measurements of kernels, engines and servers: speed, latency, accuracy."""

from __future__ import annotations

from argparse import _SubParsersAction
from typing import Any

from ds_runtime.plugins.hookspecs import hookimpl


@hookimpl
def ds_cli(subcommands: _SubParsersAction[Any]) -> None:
    """The commands bench and tune."""
    from ds_runtime_bench.cli import bench, tune

    bench.add(subcommands)
    tune.add(subcommands)
