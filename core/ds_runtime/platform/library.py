"""A package that some kernels want: is it installed, and does it have their functions? Torch-free.

Found packages and functions become features of the device: "acme_lib", "acme_lib.fp8_matmul". A
kernel's gate looks at these alone, so that it decides for a described device as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ds_runtime.ops.contract import Facts, Fixable, Gate
from ds_runtime.platform.exports import Export
from ds_runtime.platform.probe import installed, package_folder


@dataclass(frozen=True, slots=True)
class Library:
    """An importable package, and the distributions that may bring it, best first.

    * module: what is imported.
    * distributions: empty: one of the module's name. If two of them are installed, neither is
      complete, as they wrote into one folder.
    * exports: say which functions it has (`exports.names`, `exports.text`).
    * install: the command that brings it, or a function that returns it.
    * ours: whether the package in a folder is the intended one. Another may have its name.
    * other: the refusal if it is not.
    """

    module: str
    distributions: tuple[str, ...] = ()
    exports: tuple[Export, ...] = ()
    install: str | Callable[[], str] = ""
    ours: Callable[[Path], bool] | None = None
    other: str = ""

    @property
    def distribution(self) -> str:
        """The distribution that `install` brings."""
        return self.brings[0]

    @property
    def brings(self) -> tuple[str, ...]:
        """The distributions that may bring the package."""
        return self.distributions or (self.module,)

    @property
    def remedy(self) -> str:
        """The command that brings it, "" if nobody said."""
        return self.install() if callable(self.install) else self.install

    def find(
        self,
        folder: Callable[[str], Path | None] = package_folder,
        version: Callable[[str], str | None] = installed,
    ) -> Iterator[str]:
        """Yields the features that it brings: "module", "module.name" for each function, and what
        is wrong with it, "module:other" or "module:mixed".

        folder, version: replace the environment in tests: a module's folder, a distribution's
        version.
        """
        where = folder(self.module)
        if where is None:
            return
        if self.ours is not None and not self.ours(where):
            yield f"{self.module}:other"
            return
        yield self.module
        if len([d for d in self.brings if version(d) is not None]) > 1:
            yield f"{self.module}:mixed"
        for export in self.exports:
            yield from (f"{self.module}.{name}" for name in export(where))

    def features(self) -> frozenset[str]:
        """The features that it brings here. Looked up once."""
        return _features(self)

    def report(self, version: Callable[[str], str | None] = installed) -> tuple[str, str]:
        """Returns (module, which version of which distribution, or that there is none), for
        `ds-runtime doctor`."""
        found = [f"{d} {v}" for d in self.brings if (v := version(d)) is not None]
        missing = f"not installed: {self.remedy}" if self.remedy else "not installed"
        return self.module, ", ".join(found) or missing

    def has(self, *functions: str) -> Gate:
        """Returns a gate: it refuses where the library is not installed, is another package, is
        not whole, or lacks one of the functions."""

        def check(facts: Facts) -> str | None:
            features, module = facts.device.features, self.module
            if f"{module}:other" in features:
                return self.other
            if module not in features:
                return self._remedied(f"{self.distribution} is not installed")
            if f"{module}:mixed" in features:
                return f"two packages have been installed into {module}/: uninstall both, then one"
            missing = [f for f in functions if f"{module}.{f}" not in features]
            if missing:
                return self._remedied(f"the installed {module} has no {', '.join(missing)}")
            return None

        return check

    def _remedied(self, said: str) -> str:
        return Fixable(said, self.remedy) if self.remedy else said


@cache
def _features(library: Library) -> frozenset[str]:
    return frozenset(library.find())
