"""The size and shape of the code, as a table; with --check, an error where a limit is exceeded.

    python tools/house.py [--check]

Lines are those of Python, C++ and CUDA files, blank lines and comments included. A circle is a set
of modules that import each other, directly or through others; imports inside functions and those
for type checkers count, too. The limits are in pyproject.toml, under [tool.house].

A source file of core, kit and plugins that is longer than `LONG` says why at its top, in a sentence
that begins with "One file". `to-split` lists those that are still to be split: whoever splits one
takes it off.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grimp

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (".py", ".cpp", ".h", ".cu", ".cuh")
PLACES = ("core", "kit", "plugins", "tests", "tools", "benchmarks")
ROOMS = ("core", "kit")  # where the number of files in a folder is a figure
LONG, REASON, HEAD = 400, "One file", 25  # lines; where in the first lines a reason stands
MOST = 3  # folders, or circles, that the table names


def files(place: Path) -> list[Path]:
    """The source files below a folder."""
    return [p for p in place.rglob("*") if p.suffix in SOURCES and "__pycache__" not in p.parts]


def lines(place: Path) -> int:
    return sum(p.read_bytes().count(b"\n") for p in files(place))


def crowded(root: Path) -> list[tuple[str, int]]:
    """The folders of core and kit with the number of their files, the fullest first."""
    count = Counter(
        p.parent.relative_to(root).as_posix() for room in ROOMS for p in files(root / room)
    )
    return count.most_common()


def long_files(root: Path) -> set[str]:
    """The files of core, kit and plugins that are too long and do not say why."""
    return {
        path.relative_to(root).as_posix()
        for room in (*ROOMS, "plugins")
        for path in files(root / room)
        if len(text := path.read_text(encoding="utf-8").splitlines()) > LONG
        and not any(REASON in line for line in text[:HEAD])
    }


def packages(root: Path) -> list[str]:
    return sorted(
        p.parent.name for p in (*root.glob("core/*/py.typed"), *root.glob("*/*/*/py.typed"))
    )


def circles(imports: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The sets of modules that can all reach each other, the largest first."""
    reach: dict[str, set[str]] = {}
    for start in imports:
        found, open_ = set[str](), [start]
        while open_:
            for target in imports.get(open_.pop(), ()):
                if target not in found:
                    found.add(target)
                    open_.append(target)
        reach[start] = found
    sets = {frozenset(n for n in reach[m] if m in reach.get(n, ())) for m in reach}
    return sorted((sorted(s) for s in sets if len(s) > 1), key=lambda s: (-len(s), s))


def imports(names: list[str]) -> dict[str, set[str]]:
    """Which module imports which, lazily and for types, too."""
    for name in names:
        origin = find_spec(name)
        if origin is None or not Path(str(origin.origin)).is_relative_to(ROOT):
            sys.exit(f"{name} is installed from elsewhere: pip install -e . in {ROOT} first")
    first, *others = names
    graph = grimp.build_graph(first, *others, exclude_type_checking_imports=False, cache_dir=None)
    return {m: graph.find_modules_directly_imported_by(m) for m in graph.modules}


def figures(root: Path = ROOT) -> dict[str, tuple[int, str]]:
    """Each figure's name, value and a note."""
    found = {f"{place}-lines": (lines(root / place), "") for place in PLACES}
    folders = crowded(root)
    note = ", ".join(f"{name} {count}" for name, count in folders[:MOST])
    found["files-in-a-folder"] = (folders[0][1], note)
    listed, long = set(to_split(root)), long_files(root)
    found["long-files"] = (len(long - listed), ", ".join(sorted(long - listed)))
    found["split-but-listed"] = (len(listed - long), ", ".join(sorted(listed - long)))
    rings = circles(imports(packages(root)))
    note = "; ".join(f"{len(ring)}: {ring[0]}, {ring[1]}, …" for ring in rings[:MOST])
    found["circles"] = (len(rings), note)
    found["modules-in-circles"] = (sum(map(len, rings)), "")
    return found


def settings(root: Path = ROOT) -> dict[str, Any]:
    with (root / "pyproject.toml").open("rb") as file:
        return dict(tomllib.load(file)["tool"].get("house", {}))


def to_split(root: Path = ROOT) -> list[str]:
    """The files that may be long until somebody splits them."""
    return list(settings(root).get("to-split", ()))


def limits(root: Path = ROOT) -> dict[str, int]:
    """The largest value that each limited figure may have."""
    return {name: limit for name, limit in settings(root).items() if name != "to-split"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail where a limit is exceeded")
    args = parser.parse_args()
    found, allowed = figures(), limits()
    if unknown := set(allowed) - set(found):
        sys.exit(f"[tool.house]: {', '.join(sorted(unknown))}: there are {', '.join(found)}")
    print(f"{'figure':<20} {'now':>7} {'limit':>7}")
    for name, (value, note) in found.items():
        print(f"{name:<20} {value:>7} {allowed.get(name, '–'):>7}  {note}".rstrip())
    over = [name for name, limit in allowed.items() if found[name][0] > limit]
    for name in over:
        print(f"{name} is {found[name][0]}; [tool.house] allows {allowed[name]}", file=sys.stderr)
    return int(args.check and bool(over))


if __name__ == "__main__":
    sys.exit(main())
