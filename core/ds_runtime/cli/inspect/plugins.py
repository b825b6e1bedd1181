"""`ds-runtime plugins`: every plugin, where it comes from, and why it is not in use."""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from argparse import Namespace, _SubParsersAction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_runtime.ops.contract import Facts, Refusal
    from ds_runtime.platform.contract import Platform
    from ds_runtime.plugins.manager import Plugins


def add(subcommands: _SubParsersAction[Any]) -> None:
    """Register the verb."""
    parser = subcommands.add_parser("plugins", help="list plugins and why each runs here or not")
    parser.add_argument("--plugins", metavar="A,B", help="load only these plugins")
    parser.add_argument("--plugin-allowlist", metavar="FILE", help="load only what this file lists")
    parser.add_argument(
        "--lock", metavar="FILE", help="write the third parties' plugins here as an allowlist"
    )
    parser.add_argument("--verbose", action="store_true", help="with tracebacks of broken ones")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run, looks=True)


def run(args: Namespace) -> int:
    """Print a line per plugin."""
    if args.lock is not None:
        return _lock(args.lock)
    plugins = load(args)
    rows = describe(plugins)
    for sentence in plugins.unknown:
        print(f"ds-runtime: {sentence}", file=sys.stderr)
    code = int(bool(plugins.unknown))
    if args.json:
        print(json.dumps(rows, indent=1))
        return code
    for row in rows:
        origin = f"{row['distribution'] or row['module']} {row['version']}".strip()
        print(f"{row['name']:<12} {origin:<22} {row['says']}")
        if args.verbose and row["traceback"]:
            print("    " + str(row["traceback"]).rstrip().replace("\n", "\n    "))
    return code


def _lock(path: str) -> int:
    from ds_runtime.plugins.manager import installed_plugins
    from ds_runtime.plugins.trust.allowlist import write_allowlist

    third = [e.dist for e in installed_plugins().values() if e.third_party and not e.refusal]
    names = write_allowlist(path, third)
    print(f"{', '.join(names) or 'no plugin'} written to {path}: --plugin-allowlist {path}")
    return 0


def load(args: Namespace) -> Plugins:
    """The installed plugins, or those of --plugins A,B; unknown names stop nothing."""
    from ds_runtime.plugins.manager import load_plugins

    given = args.plugins
    names = None if given is None else [n.strip() for n in given.split(",") if n.strip()]
    return load_plugins(
        names, lenient=True, allowlist=args.plugin_allowlist, failed=getattr(args, "failed", {})
    )


def describe(plugins: Plugins) -> list[dict[str, Any]]:
    """One row per plugin: name, module, distribution, version, says, refusal kind, traceback.

    Asks every plugin for its offers too, so that one that fails there shows.
    """
    platforms = plugins.platforms()
    plugins.offers(_facts([p for p, _ in platforms.values() if p is not None]))
    rows = []
    for name, report in sorted(plugins.reports.items()):
        platform, refusal = platforms.get(name, (None, None))
        refusal = refusal or report.refusal or _own_probe(plugins, name, platform is not None)
        says = f"platform {platform.name}" if platform else "kernels only, no platform"
        rows.append(
            {
                "name": name,
                "module": report.module,
                "distribution": report.distribution,
                "version": report.version,
                "third_party": report.third_party,
                "platform": platform.name if platform else None,
                "refusal": refusal.kind if refusal else None,
                "says": str(refusal) if refusal else says,
                "traceback": refusal.traceback if refusal else "",
            }
        )
    return rows


def _facts(works: list[Platform]) -> Facts:
    """The demo model on the best device here, or on none."""
    from ds_runtime.checkpoint.hub import resolve_model
    from ds_runtime.description.hf import load_config
    from ds_runtime.ops.contract import DeviceInfo, Facts

    device = DeviceInfo("none", "no device", "none")
    for platform in sorted(works, key=lambda p: (p.score, p.name)):
        # A device that fails has a line of its own in `doctor`.
        with contextlib.suppress(Exception):
            device = platform.device_info(0)
    return Facts(device, load_config(resolve_model("demo")).dims(1))


def _own_probe(plugins: Plugins, name: str, has_platform: bool) -> Refusal | None:
    """What a plugin without a platform says of this machine, by its optional PROBE."""
    from ds_runtime.plugins.asking import asking

    probe = getattr(plugins.manager.get_plugin(name), "PROBE", None)
    if has_platform or probe is None:
        return None
    try:
        with asking(name, "PROBE"):
            found: Refusal | None = probe()
    except (Exception, SystemExit) as e:
        from ds_runtime.ops.contract import Refusal

        return Refusal("broken", f"PROBE raised {type(e).__name__}: {e}", traceback.format_exc())
    return found
