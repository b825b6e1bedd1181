"""The plugins that are installed, as their packages declare them. Nothing is imported for it.

Everything that this reads is read once: `find` is a few milliseconds of each command.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, distributions

from ds_runtime.ops.contract import Refusal
from ds_runtime.plugins.trust.allowlist import hidden_by, search_path

GROUP = "ds_runtime"
OWN_DISTRIBUTION = "ds-runtime"


@dataclass(frozen=True, slots=True)
class InstalledPlugin:
    """One entry point of our group. `refusal`: why it may never be imported."""

    point: EntryPoint
    dist: Distribution
    distribution: str
    version: str
    refusal: Refusal | None = None

    @property
    def third_party(self) -> bool:
        """Whether another distribution than the runtime's brings it."""
        return self.distribution != OWN_DISTRIBUTION


def find(reserved: Collection[str] = ()) -> dict[str, InstalledPlugin]:
    """Entries by plugin name; a name that is taken or reserved gets its distribution as a suffix.

    The runtime's own come first, so that nobody takes the place of a plugin that it ships; what
    lies in the working directory comes last, and may not be imported.
    """
    kept, left = search_path()
    order = sorted(_in(kept), key=lambda e: (e.third_party, e.point.name, e.distribution))
    if left:
        known = {e.distribution for e in order}  # an editable install leaves metadata at home, too
        strangers = [_refused(e) for e in _in(left) if e.distribution not in known]
        order = [_unless_hidden(e, left) for e in order] + strangers
    found: dict[str, InstalledPlugin] = {}
    for entry in order:
        name = entry.point.name
        taken = name in found or name in reserved
        found[f"{name}@{entry.distribution}" if taken else name] = entry
    return found


def _in(path: Iterable[str]) -> list[InstalledPlugin]:
    """Our entries of every distribution on a search path; the first of a name counts."""
    seen: dict[str, list[InstalledPlugin]] = {}
    for dist in distributions(path=list(path)):
        if ours := [p for p in dist.entry_points if p.group == GROUP]:
            about = dist.metadata
            name, version = str(about["Name"]), str(about["Version"])
            seen.setdefault(name, [InstalledPlugin(p, dist, name, version) for p in ours])
    return [entry for entries in seen.values() for entry in entries]


def _refused(entry: InstalledPlugin) -> InstalledPlugin:
    said = f"{entry.distribution} is in the working directory, from which nothing is loaded"
    refusal = Refusal("not allowed", f"{said}: pip install it")
    return InstalledPlugin(entry.point, entry.dist, entry.distribution, entry.version, refusal)


def _unless_hidden(entry: InstalledPlugin, left: list[str]) -> InstalledPlugin:
    place = hidden_by(entry.point, left)
    if place is None:
        return entry
    refusal = Refusal("not allowed", f"{place}, in the working directory, hides its module")
    return InstalledPlugin(entry.point, entry.dist, entry.distribution, entry.version, refusal)
