"""The files of a report, which are checked before a load begins and written after it is printed."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_runtime.cli.outputs import check_output
from ds_runtime.errors import unwritable
from ds_runtime_bench.record import append
from ds_runtime_bench.serving import hits

if TYPE_CHECKING:
    from ds_runtime_bench.serving.measure import Measured


def check(args: Namespace) -> None:
    """Raises ConfigError for a file that cannot be written."""
    for flag, path in _named(args):
        check_output(path, flag)


def keep(args: Namespace, report: dict[str, Any], measured: Measured | None) -> None:
    """Write them. measured: with one server alone. Raises ConfigError where that fails."""
    for flag, path in _named(args):
        try:
            if flag == "--output-file":
                append(path, report)
            elif measured is not None:
                hits.save(path, measured.warm, measured.answers)
        except OSError as e:
            raise unwritable(f"{flag} {path}", e, "a file on a disk with room") from e


def _named(args: Namespace) -> list[tuple[str, Path]]:
    every = ("--output-file", args.output_file), ("--save-token-ids", args.save_token_ids)
    return [(flag, Path(path)) for flag, path in every if path is not None]
