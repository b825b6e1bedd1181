"""`ds-runtime doctor`: what is here, what is missing, and the one command to run next."""

from __future__ import annotations

import json
import os
import platform as machine
import shutil
import sys
from argparse import Namespace, _SubParsersAction
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_runtime._version import __version__
from ds_runtime.platform.probe import install_command

if TYPE_CHECKING:
    from ds_runtime.plugins.manager import Plugins

GiB = 1 << 30
Row = tuple[str, str]


def add(subcommands: _SubParsersAction[Any]) -> None:
    """Register the verb."""
    parser = subcommands.add_parser(
        "doctor", help="check this machine and say what to run next (imports no torch)"
    )
    parser.add_argument("--plugins", metavar="A,B", help="load only these plugins")
    parser.add_argument("--plugin-allowlist", metavar="FILE", help="load only what this file lists")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run, looks=True)


def run(args: Namespace) -> int:
    """Print a line per finding; exit 1 if nothing can serve here."""
    from ds_runtime.cli.inspect import evidence
    from ds_runtime.cli.inspect import plugins as listing

    loaded = listing.load(args)
    described = listing.describe(loaded)
    rows = [*_software(), *_plugin_rows(loaded, described), *evidence.pci()]
    rows += [("plugins", sentence) for sentence in loaded.unknown]
    works, devices = _devices(loaded)
    better = [_Better.of(row) for row in described if row["refusal"] in _HERE]
    rows += [*devices, *_active(works, better), *_storage()]
    broken = any(said.startswith("broken") for _, said in rows)
    following = next_command(works, broken, better, loaded.unknown, loaded.restricted)
    if args.json:
        print(json.dumps({"findings": rows, "works": works, "next": following}, indent=1))
    else:
        print("\n".join(f"{name:<20} {said}" for name, said in rows))
        print(f"\nnext: {following}")
    return int(not works)


_HERE = ("not installed", "unsupported", "broken")  # refusals where there is something to refuse


@dataclass(frozen=True, slots=True)
class _Better:
    """A plugin that does not serve, though there is something for it: why, and what it lacks."""

    name: str
    why: str
    lacks: Sequence[str] = ()
    install: str = ""

    @staticmethod
    def of(row: Mapping[str, Any]) -> _Better:
        from ds_runtime.cli.inspect import evidence

        name, distribution = str(row["name"]), str(row["distribution"])
        if not evidence.has_extra(distribution, name):
            return _Better(name, str(row["says"]))
        lacks = evidence.mismatches(distribution, name)
        return _Better(name, str(row["says"]), lacks, install_command(name, distribution))


def _active(works: Sequence[str], better: Iterable[_Better]) -> list[Row]:
    """What serves, and why nothing else does, with packages that are missing or mismatched."""
    rows = [("active", f"platform {works[0]}" if works else "nothing: no platform works here")]
    for one in better:
        rows.append((f"  not {one.name}", one.why))
        rows += [(f"  {one.name} lacks", said) for said in one.lacks]
    return rows


def next_command(
    works: Sequence[str],
    broken: bool,
    better: Sequence[_Better] = (),
    unknown: Sequence[str] = (),
    restricted: str = "",
) -> str:
    """The one command that a user should run after reading the findings.

    unknown, restricted: as of `Plugins`. What is not installed by its name is not installed by
    another command, and what was left out on purpose is there already.
    """
    every = "DS_PLUGINS= " if restricted.startswith("DS_PLUGINS") else ""  # empty, it restricts not
    if unknown:
        return f"{every}ds-runtime plugins"
    if broken and (works or restricted) and _version("torch") is not None:
        return "ds-runtime plugins --verbose"
    if wanting := [b for b in better if b.lacks]:
        return wanting[0].install
    if restricted and not works and _version("torch") is not None:
        return f"{every}ds-runtime doctor"
    if _version("torch") is None or not works:
        return install_command("cpu")
    return "ds-runtime serve"


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _software() -> list[Row]:
    rows = [
        ("ds-runtime", f"{__version__} at {Path(__file__).parents[1]}"),
        ("python", f"{machine.python_version()} at {sys.executable}"),
        ("system", f"{machine.system()} {machine.release()} {machine.machine()}"),
    ]
    for name in ("torch", "transformers"):
        rows.append((name, _version(name) or _missing(name)))
    return rows


def _missing(name: str) -> str:
    if name == "torch":
        return f"not installed: {install_command('cpu')}, or your accelerator's extra"
    return "not installed (only tests and comparisons need it)"


def _plugin_rows(plugins: Plugins, described: Iterable[Mapping[str, Any]]) -> list[Row]:
    from ds_runtime.plugins.asking import asking

    rows = []
    for row in described:
        rows.append((f"plugin {row['name']}", str(row["says"])))
        if row["traceback"]:
            rows.append(("  its traceback", f"ds-runtime plugins --verbose ({row['module']})"))
    for name in sorted(plugins.reports):
        diagnose = getattr(plugins.manager.get_plugin(name), "DIAGNOSE", None)
        if diagnose is None:
            continue
        try:
            with asking(name, "DIAGNOSE"):
                rows += [(f"{name}: {what}", str(said)) for what, said in diagnose()]
        except (Exception, SystemExit) as e:
            rows.append((f"plugin {name}", f"broken: DIAGNOSE raised {type(e).__name__}: {e}"))
    return rows


def _devices(plugins: Plugins) -> tuple[list[str], list[Row]]:
    """(platforms that work here, best first; a line per device with its memory)."""
    found = [p for p, _ in plugins.platforms().values() if p is not None]
    works, rows = [], []
    for platform in sorted(found, key=lambda p: (p.score, p.name), reverse=True):
        try:
            info, memory = platform.info(0), platform.memory(0)
        except Exception as e:
            rows.append((f"device {platform.name}", f"broken: {type(e).__name__}: {e}"))
            continue
        works.append(platform.name)
        fast = ", ".join(sorted(info.fast_dtypes))
        rows += [
            (f"device {platform.name}", f"{info.name} ({info.arch}), {info.cores} cores"),
            ("  fast dtypes", fast),
            ("  memory", f"{memory.free / GiB:.1f} GiB free of {memory.total / GiB:.1f} GiB"),
        ]
    return works, rows


def _storage() -> list[Row]:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    models = len(list(cache.glob("models--*"))) if cache.is_dir() else 0
    folder = next(p for p in (cache, *cache.parents) if p.exists())
    writable = "" if os.access(folder, os.W_OK) else ", not writable"
    free = shutil.disk_usage(folder).free / GiB
    offline = ", offline mode" if constants.HF_HUB_OFFLINE else ""
    said = f"{cache}: {models} models, {free:.0f} GiB free{writable}{offline}"
    return [("huggingface cache", said)]
