"""The low-rank adapters that an engine holds: their names, and the slots that they are in."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path

from ds_runtime.checkpoint.base import stamps_of
from ds_runtime.checkpoint.files import Stamps
from ds_runtime.description.adapter import LoraPlan, check_name
from ds_runtime.errors import RequestError, shown


@dataclass(frozen=True, slots=True)
class Held:
    """One adapter. `key` is never given twice: cached KV of another under the same name differs.
    stamps: of its files, before they are read."""

    name: str
    folder: Path
    slot: int
    key: int
    stamps: Stamps


class Adapters:
    """By name. `plan` None: the engine has no slots. stamps: of the files of the plan's."""

    def __init__(self, plan: LoraPlan | None, stamps: Stamps) -> None:
        self._keys = count(1)
        self._free = list(range(plan.slots)) if plan is not None else []
        self._num_slots = len(self._free)
        self._held: dict[str, Held] = {}
        for spec in plan.adapters if plan is not None else ():
            self.add(self.place(spec.name, spec.folder, stamps))

    @property
    def names(self) -> list[str]:
        """In the order in which they came."""
        return list(self._held)

    def find(self, name: str) -> Held:
        """RequestError if there is none of this name."""
        held = self._held.get(name)
        if held is None:
            known = ", ".join(self._held) or "none"
            raise RequestError(f"adapter {shown(name)} is not loaded; loaded are: {known}", "model")
        return held

    def files(self, key: int) -> tuple[Path, Stamps] | None:
        """The folder of an adapter with this key, if it is loaded, and its stamps."""
        found = (held for held in self._held.values() if held.key == key)
        return next(((held.folder, held.stamps) for held in found), None)

    def place(self, name: str, folder: Path, stamps: Stamps | None = None) -> Held:
        """Where a new adapter would go. RequestError if there is no room, or the name is taken.
        stamps: None if it is read after this."""
        check_name(name)
        if name in self._held:
            raise RequestError(
                f"adapter {shown(name)} is loaded already, from {self._held[name].folder}: unload "
                "it first, or choose another name",
                "lora_name",
            )
        if not self._num_slots:
            raise RequestError(
                "this engine has no room for adapters: start it with --max-loras N", "lora_name"
            )
        if not self._free:
            raise RequestError(
                f"all {self._num_slots} slots are in use (--max-loras), by "
                f"{', '.join(self._held)}: unload one first",
                "lora_name",
            )
        stamps = stamps_of(folder) if stamps is None else stamps
        return Held(name, folder, self._free[0], next(self._keys), stamps)

    def add(self, held: Held) -> None:
        """It is in its slot."""
        self._free.remove(held.slot)
        self._held[held.name] = held

    def remove(self, held: Held) -> None:
        """Its slot is free again."""
        del self._held[held.name]
        self._free.append(held.slot)
