"""Lazy paths: what is there is found and what is not is said, whatever vendors' modules raise."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime.plugins.lazy import absent

RAISED = {
    "AttributeError": AttributeError("no such name"),
    "ImportError": ImportError("libvendor.so: cannot open"),
    "RuntimeError": RuntimeError("no driver"),
    "OSError": OSError("device busy"),
    "KeyError": KeyError("x"),
    "RecursionError": RecursionError("deep"),
    "SystemExit": SystemExit("no licence"),
}


def package(name, path):
    """A module that is imported, of a package whose submodules lie in `path`."""
    made = ModuleType(name)
    made.__path__ = path
    return made


@pytest.mark.parametrize("error", RAISED.values(), ids=RAISED)
def test_a_module_that_raises_when_it_is_asked_has_no_such_attribute(monkeypatch, error):
    def raising(name):
        raise error

    vendor = ModuleType("vendor_x")
    vendor.there, vendor.__getattr__ = 1, raising
    monkeypatch.setitem(sys.modules, "vendor_x", vendor)
    assert absent("vendor_x:there") == ""
    said = absent("vendor_x:g")
    if isinstance(error, AttributeError):
        assert said == "module vendor_x has no g"
    else:
        assert said == f"module vendor_x, asked for g, raised {type(error).__name__}: {error}"


class Finder:
    """Of modules with these names; `raises`: of any."""

    def __init__(self, names=(), raises=None):
        self.names, self.raises = names, raises

    def find_spec(self, name, path=None, target=None):
        if self.raises is not None:
            raise self.raises
        return ModuleSpec(name, None) if name in self.names else None


@pytest.mark.parametrize("error", RAISED.values(), ids=RAISED)
def test_a_finder_that_raises_hides_nothing_of_others(monkeypatch, error):
    monkeypatch.setattr(sys, "meta_path", [Finder(raises=error), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "this", raising=False)
    assert absent("this:g") == absent("xml.dom.pulldom:g") == ""
    assert absent("vendor_x:g") == "there is no module vendor_x"
    assert "this" not in sys.modules


@pytest.mark.parametrize("finder", [object(), Finder], ids=["without find_spec", "a class"])
def test_a_finder_of_another_kind_hides_nothing_of_others(monkeypatch, finder):
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert absent("xml.dom.pulldom:g") == "" != absent("xml.dom.none:g")


PARTS = st.lists(st.sampled_from("abc"), min_size=1, max_size=3)


@pytest.mark.parametrize("path", [[], ["/nowhere"]], ids=str)
@given(st.lists(PARTS, max_size=4), PARTS)
def test_submodules_that_a_packages_own_finder_serves_are_there(path, served, asked):
    """As those of six, and of editable installs: no folder of the package has them."""
    names = {".".join(["vendor_x", *parts[:n]]) for parts in served for n in range(len(parts) + 1)}

    class Own(Finder):
        def find_spec(self, name, path=None, target=None):
            spec = super().find_spec(name, path)
            if spec is not None:
                spec.submodule_search_locations = list(given_path)
            return spec

    given_path, name = path, ".".join(["vendor_x", *asked])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vendor_x", package("vendor_x", path))
        patch.setattr(sys, "meta_path", [*sys.meta_path, Own(names)])
        before = {*sys.modules}
        assert absent(f"{name}:g") == ("" if name in names else f"there is no module {name}")
        assert {*sys.modules} == before


def test_a_module_that_is_no_package_has_no_submodules(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [Finder(["vendor_x.y"]), *sys.meta_path])
    monkeypatch.setitem(sys.modules, "vendor_x", ModuleType("vendor_x"))
    assert absent("vendor_x.y:g") == "there is no module vendor_x.y"
