"""Receipts of checks that depend on the native sources alone: they run in full when these change.

    python tools/receipts.py state             exit 0 if the committed receipt is of these sources
    python tools/receipts.py write FOLDER      make the receipt of a full run's outcomes
    python tools/receipts.py compare FOLDER    exit 1 unless a full run's outcomes are the receipt's

Two kinds of checks have one: the sanitizers (tools/check_native.py) and the tests that run once for
each instruction set (tests/matrix.py). tests/native/receipts.json holds the digest of the sources,
flags and tests, and for each check and instruction set the digest of what a full run found. The
compiler is not part of it: a receipt holds on every machine. FOLDER has one JSON file a check, as
`save` writes it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECEIPT = ROOT / "tests" / "native" / "receipts.json"
BASELINE = "generic"
SHARE = 0.1  # of what is not the best instruction set
# The tests that run once for each instruction set.
TESTS = ("tests/conformance/test_variants.py", "tests/plugins/test_cpu_*.py")
SOURCES = (
    "CMakeLists.txt",
    "plugins/cpu/csrc/*",
    "plugins/cpu/ds_runtime_cpu/**/*.py",
    "tests/native/*.py",
    "tests/native/*.cpp",
    "tests/native/*.h",
    "core/ds_runtime/ops/reference/cases.py",
    "kit/vendor/ds_runtime_kit/checks/conformance.py",
    "kit/vendor/ds_runtime_kit/checks/effects.py",
    "kit/vendor/ds_runtime_kit/kit.py",
    "tests/conformance/test_ops.py",
    "tests/examples.py",
    "tests/plugins/narrowing.py",
    "tools/check_native.py",
    *TESTS,
)

CHECKS = ("address", "isas", "pytest", "thread", "valgrind")  # that a receipt is of

Outcomes = Mapping[str, Sequence[str]]  # what a check found, by instruction set


def sources(root: Path = ROOT) -> list[Path]:
    """Every file whose change makes the receipt stale, sorted."""
    found = {path for pattern in SOURCES for path in root.glob(pattern) if path.is_file()}
    return sorted(path for path in found if "__pycache__" not in path.parts)


def digest(root: Path = ROOT) -> str:
    """One SHA-256 over the names and contents of the sources."""
    total = hashlib.sha256()
    for path in sources(root):
        own = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(root).as_posix()} {own}\n".encode())
    return total.hexdigest()


def committed() -> dict[str, Any]:
    """The receipt in the tree; empty if there is none that can be read."""
    try:
        found = json.loads(RECEIPT.read_text())
    except (OSError, ValueError):
        return {}
    whole = isinstance(found, dict) and isinstance(found.get("checks"), dict)
    return found if whole else {}


def is_current() -> bool:
    """Whether the receipt in the tree is of the sources in the tree, and of every check."""
    found = committed()
    return found.get("sources") == digest() and set(found["checks"]) == set(CHECKS)


def covered(check: str) -> frozenset[str]:
    """The instruction sets that a check has run in full, as the receipt in the tree says."""
    return frozenset(committed().get("checks", {}).get(check, ()))


def drawn(seed: str, name: str, share: float = SHARE) -> bool:
    """Whether `name` is in the share that this seed draws; no name depends on another."""
    return Random(f"{seed} {name}").random() < share


def instruction_sets(runnable: Sequence[str], seed: str | None) -> list[str]:
    """Those to check, best first: all without a seed, else the best, those that the receipt is not
    of, and a draw of the others."""
    if seed is None:
        return list(runnable)
    always = {runnable[0], *set(runnable) - covered("address")}
    return [isa for isa in runnable if isa in always or drawn(seed, isa)]


def save(path: Path, outcomes: Outcomes) -> None:
    """Write what a check found, for `write` and `compare`."""
    found = {}
    for isa, lines in sorted(outcomes.items()):
        text = "\n".join(sorted(lines))
        found[isa] = {"count": len(lines), "digest": hashlib.sha256(text.encode()).hexdigest()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1))


def saved(folder: Path) -> dict[str, Any]:
    """What every check of a full run found. Exits if one of them has left nothing."""
    found = {p.stem: json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))}
    if missing := sorted(set(CHECKS) - set(found)):
        sys.exit(f"{folder}: no outcomes of {', '.join(missing)}: not run in full, or failed")
    return found


def differences(receipt: Mapping[str, Any], run: Mapping[str, Any]) -> Iterable[str]:
    """A line for each check and instruction set that the run and the receipt have otherwise.

    What only one of two machines runs is passed over: each of its tests has passed there.
    """
    for check, found in run.items():
        for isa, outcome in found.items():
            if (before := receipt["checks"][check].get(isa, outcome)) != outcome:
                yield f"{check}, {isa}: {outcome}; the receipt has {before}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=["state", "write", "compare"])
    parser.add_argument("folder", nargs="?", type=Path)
    args = parser.parse_args()
    name = RECEIPT.relative_to(ROOT)
    if args.action == "state":
        print(f"{name} is {'of these sources' if is_current() else 'of other sources: all runs'}")
        return 0 if is_current() else 1
    if args.folder is None:
        parser.error(f"{args.action} needs the folder of a full run's outcomes")
    run = saved(args.folder)
    if args.action == "write":
        receipt = {"sources": digest(), "checks": run}
        RECEIPT.write_text(json.dumps(receipt, indent=1, sort_keys=True) + "\n")
        print(f"{name} is written; commit it with the change")
        return 0
    if not is_current():
        print(f"{name} is of other sources. Write it with .ci/run --receipts, and commit it.")
        return 1
    for line in (found := list(differences(committed(), run))):
        print(line)
    print(f"{name}: {'other outcomes than these' if found else 'as this run found'}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
