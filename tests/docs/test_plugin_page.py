"""The page of `ds_runtime.api` says what every name, field and argument is."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import documented
import plugin_page
from ds_runtime import api

PAGE = Path(__file__).parents[2] / "docs/plugin-api.md"
WORD = st.text("abcdefgh", min_size=1, max_size=6)
NAME = st.sampled_from(["rows", "cols", "max_tokens", "kv"])


def section(name: str) -> str:
    """What the page has below the heading of a name."""
    return PAGE.read_text().split(f"\n### `{name}`\n", 1)[1].split("\n## ")[0].split("\n### ")[0]


def declared(value: Any) -> Iterator[str]:
    """Public fields of a class, or arguments of a function."""
    if inspect.isclass(value):
        own = [f.name for f in fields(value)] if is_dataclass(value) else []
        yield from own or vars(value).get("__annotations__", {})
    elif inspect.isfunction(found := inspect.unwrap(value)):
        yield from inspect.signature(found).parameters


@pytest.mark.parametrize("name", [n for n in api.__all__ if n not in plugin_page.SAID])
def test_every_field_and_argument_is_described(name: str) -> None:
    """Inherited fields are described where they are inherited from."""
    value = getattr(api, name)
    bases = value.__mro__ if inspect.isclass(value) else ()
    text = "".join(section(b.__name__) for b in bases if b.__name__ in api.__all__) or section(name)
    said = re.sub(r"```python\n.*?```", "", text, flags=re.DOTALL)
    assert len(said.split()) >= 3, f"{name} has no text"
    missing = [f for f in declared(value) if f[0] != "_" and not re.search(rf"\b{f}\b", said)]
    assert not missing, f"the docstring of {name} does not say what {missing} are"


def test_a_name_in_no_section_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for all_ in ([*api.__all__, "read_part", "nobody"], [n for n in api.__all__ if n != "gates"]):
        monkeypatch.setattr(api, "__all__", all_)
        with pytest.raises(ValueError, match=r"nobody|gates"):
            plugin_page.plugin_api("")


@given(st.lists(st.tuples(NAME, WORD), min_size=1, max_size=5), st.sampled_from(["", "All of it."]))
def test_each_entry_of_a_docstring_becomes_an_item(said: list[tuple[str, str]], lead: str) -> None:
    """In a paragraph, over lines, or in a list; entries of names that are none stay as they are."""
    names = ["rows", "cols", "max_tokens", "kv"]
    shown = "\n".join(f"* `{n}`: {w}." for n, w in said)
    want = f"{lead}\n\n{shown}" if lead else shown
    for between in (" ", "\n    "):

        def of() -> None: ...

        of.__doc__ = f"{lead}{between if lead else ''}" + between.join(
            f"{n}: {w}." for n, w in said
        )
        assert documented.text(of, names) == want
        assert documented.text(of) == inspect.getdoc(of)
        of.__doc__ = f"X.\n\n    * {'* '.join(f'{n}: {w}.' + chr(10) + '    ' for n, w in said)}"
        assert documented.text(of, names) == f"X.\n\n{shown}"


def test_an_error_follows_the_list() -> None:
    def of(a: int, b: int) -> None:
        """Does it. a: one. b: another; c: none of it. Raises ValueError for 0."""

    assert documented.text(of, ["a", "b"]) == (
        "Does it.\n\n* `a`: one.\n* `b`: another; c: none of it.\n\nRaises ValueError for 0."
    )


def test_a_long_signature_has_a_line_for_each_argument() -> None:
    def of(
        first: int, *others: str, a_keyword_with_a_long_name: tuple[int, ...] = (), **more: object
    ) -> None: ...

    assert documented.signature(of).splitlines()[1:] == [
        "    first: int,",
        "    *others: str,",
        "    a_keyword_with_a_long_name: tuple[int, ...] = (),",
        "    **more: object,",
        ") -> None",
    ]


def test_a_short_signature_is_a_line_with_spaces_as_in_code() -> None:
    def of(rank: int = 0, *, name: str = "x") -> None: ...

    assert documented.signature(of) == "def of(rank: int = 0, *, name: str = 'x') -> None\n"
