"""Moves the fragments of changelog.d/ into CHANGELOG.md; --check only reads them.

python tools/changelog.py [--check | VERSION]
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("added", "changed", "fixed", "removed")
NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*\.(?P<kind>[a-z]+)\.md")
LONGEST = 500  # characters of a fragment


def fragments(root: Path) -> dict[str, list[Path]]:
    """The fragments below `root` by kind, in the order of their names.

    Raises ValueError for a file with another name, an empty one, or one above `LONGEST`.
    """
    found: dict[str, list[Path]] = {kind: [] for kind in KINDS}
    for path in sorted((root / "changelog.d").iterdir()):
        if path.name == "README.md":
            continue
        match = NAME.fullmatch(path.name)
        if match is None or match["kind"] not in found:
            raise ValueError(f"{path.name}: call it NAME.KIND.md, KIND one of {', '.join(KINDS)}")
        length = len(path.read_text(encoding="utf-8").strip())
        if not 0 < length <= LONGEST:
            raise ValueError(f"{path.name}: has {length} characters, 1 to {LONGEST} are allowed")
        found[match["kind"]].append(path)
    return found


def section(version: str, found: dict[str, list[Path]]) -> str:
    """The part of CHANGELOG.md for a version: a list for each kind that has fragments."""
    lines = [f"## {version}", ""]
    for kind, paths in found.items():
        if paths:
            lines += [f"### {kind.capitalize()}", ""]
            for path in paths:
                text = path.read_text(encoding="utf-8").strip()
                lines.append("* " + text.replace("\n", "\n  "))
            lines.append("")
    return "\n".join(lines)


def release(root: Path, version: str) -> None:
    """Writes the section of `version` on top of CHANGELOG.md and deletes the fragments.

    Raises ValueError if there is no fragment, or the version has a section.
    """
    found = fragments(root)
    if not any(found.values()):
        raise ValueError("changelog.d/ has no fragment: there is nothing to release")
    page = root / "CHANGELOG.md"
    text = page.read_text(encoding="utf-8")
    if re.search(rf"^## {re.escape(version)}$", text, re.MULTILINE):
        raise ValueError(f"CHANGELOG.md has a section {version}: choose the next version")
    added = section(version, found)
    if under_way := re.search(r"^## (.*) \(unreleased\)$", text, re.MULTILINE):
        if under_way[1] != version:
            raise ValueError(f"CHANGELOG.md has {under_way[1]} (unreleased): release that first")
        text = text.replace(under_way[0], f"## {version}")
        end = text.find("\n## ", under_way.start())
        head, rest = (text, "") if end < 0 else (text[:end], text[end:])
        lists = added.partition("\n\n")[2]
        page.write_text(f"{head.rstrip()}\n\n{lists}{rest}", encoding="utf-8")
    else:
        head, _, rest = text.partition("\n\n")
        page.write_text(f"{head}\n\n{added}\n{rest}", encoding="utf-8")
    for paths in found.values():
        for path in paths:
            path.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", nargs="?", help="the version that is released")
    parser.add_argument("--check", action="store_true", help="only read the fragments")
    args = parser.parse_args()
    if args.check == (args.version is not None):
        parser.error("give VERSION, or --check")
    try:
        if args.check:
            fragments(ROOT)
        else:
            release(ROOT, args.version)
    except ValueError as e:
        sys.exit(f"changelog: {e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
