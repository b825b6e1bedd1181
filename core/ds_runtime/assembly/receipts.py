"""Receipts: what `ds-runtime conform` found of a plugin's kernels and loaders, for `plan` and for
people.

One JSON file per plugin and device architecture. A receipt stands for the code, device and
contracts that it names; of anything else it says nothing. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_runtime.errors import unwritable

if TYPE_CHECKING:
    from ds_runtime.assembly.result import Assembly
    from ds_runtime.plugins.manager import PluginReport

FORMAT = 1
_NOT_CODE = {".pyc", ".pyo"}


def folder() -> Path:
    """Where receipts lie by default."""
    return Path.home() / ".local" / "state" / "ds-runtime" / "receipts"


def code_digest(module: str) -> str:
    """sha256 over the files of the top-level package (or single file) that `module` is in."""
    spec = find_spec(module.partition(".")[0])
    if spec is None:
        return ""
    places = [Path(p) for p in spec.submodule_search_locations or ()]
    files = sorted(f for p in places for f in p.rglob("*") if f.is_file())
    if not places and spec.origin is not None:
        files = [Path(spec.origin)]
    found = hashlib.sha256()
    for file in files:
        if file.suffix not in _NOT_CODE:
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            found.update(f"{file.name}\0{content}\n".encode())
    return f"sha256:{found.hexdigest()}"


def write(receipt: Mapping[str, Any], path: Path) -> None:
    """Write one receipt. Raises ConfigError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(receipt, indent=1) + "\n", encoding="utf-8")
    except OSError as e:
        raise unwritable(f"receipt {path}", e, "--receipts a folder that is yours") from e


def read_all(where: Path) -> Iterator[dict[str, Any]]:
    """The receipts in a folder; files that are none are passed over."""
    for path in sorted(where.glob("*.json")) if where.is_dir() else ():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(found, dict) and found.get("format") == FORMAT:
            yield found


def standing(assembly: Assembly, receipts: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line per plugin whose kernels or loader the plan uses: what its receipt says of those."""
    chosen: dict[str, dict[tuple[str, str], int]] = {}
    for row in assembly.plan.rows:
        if row.provider not in ("core", "reference"):
            plugin = assembly.plugins.owners[row.provider]
            chosen.setdefault(plugin, {})[(row.op, row.kernel)] = row.contract
    loader = assembly.loader
    if loader.provider in assembly.offers.third_party:
        plugin = assembly.plugins.owners[loader.provider]
        chosen.setdefault(plugin, {})["loader", loader.full_name] = 1
    held = {(r.get("plugin"), r.get("arch")): r for r in receipts}
    lines = []
    for plugin in sorted(chosen):
        receipt = held.get((plugin, assembly.device.arch))
        said = _says(receipt, chosen[plugin], assembly.plugins.reports.get(plugin))
        lines.append(f"receipt  {plugin}: {said}")
    return lines


def _says(
    receipt: Mapping[str, Any] | None,
    used: Mapping[tuple[str, str], int],
    report: PluginReport | None,
) -> str:
    if receipt is None:
        return "none for this device; ds-runtime conform makes one"
    if report is not None and receipt["digest"] != code_digest(report.module):
        return f"of {receipt['made']} is of other code; run ds-runtime conform again"
    known = {(k["op"], k["kernel"]): k for k in receipt["kernels"]}
    failed = [f"{op} {name}" for op, name in used if known.get((op, name), {}).get("failures")]
    missing = [
        f"{op} {name}"
        for (op, name), contract in used.items()
        if (entry := known.get((op, name), {})).get("contract") != contract or entry.get("skipped")
    ]
    cases = sum(known[key]["cases"] for key in used if key in known)
    passed = len(used) - len(failed) - len(missing)
    what = "kernels and loaders" if any(op == "loader" for op, _ in used) else "kernels"
    lines = [f"{passed} of {len(used)} {what} conform ({cases} cases, {receipt['made']})"]
    if failed:
        lines.append(f"FAILED: {', '.join(failed)}")
    if missing:
        lines.append(f"not covered: {', '.join(missing)}")
    if unasked := receipt.get("not_asked"):
        lines.append(f"not asked: {', '.join(unasked)}")
    return "; ".join(lines)
