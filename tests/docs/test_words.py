"""Pages, help and errors keep to the plain English of CONTRIBUTING.md."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from code_texts import docstrings, messages, only_repeats, prose, raised
from hypothesis import given
from hypothesis import strategies as st
from prose import BANNED, LONGEST, banned, blocks, entries, faults, sentences

from ds_runtime.cli import build_parser

ROOT = Path(__file__).parents[2]
WORD = st.text("abcdefg", min_size=1, max_size=6)  # no banned phrase has these letters alone
LONG = st.lists(WORD, min_size=LONGEST + 1, max_size=60).map(lambda w: " ".join(w).capitalize())
SHORT = st.lists(WORD, min_size=1, max_size=LONGEST).map(lambda w: " ".join(w).capitalize())
NAME = st.sampled_from(["rows", "num_drafts", "q [n, hidden]", "k [n], v"])
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/**/*.md"),
        *ROOT.glob("changelog.d/*.md"),
    ]
)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_is_in_plain_english(page: Path) -> None:
    found = faults(page.read_text(encoding="utf-8"))
    assert not found, "\n".join([name(page), *found])


def test_what_a_metric_says_needs_no_other_metric() -> None:
    """Rows and Prometheus' HELP lines are sorted by name, so none refers to its neighbour."""
    text = (ROOT / "docs/metrics.md").read_text()
    said = [line for line in text.splitlines() if line.startswith("| `ds_runtime_")]
    found = [line for line in said if re.search(r"\b(?:these|those|there|theirs)\b", line)]
    assert len(said) > 50 and not found, "\n".join(found)


def parsers() -> Iterator[argparse.ArgumentParser]:
    """The parser of every verb and of the verbs below it."""
    todo: list[argparse.ArgumentParser] = [build_parser()[0]]
    while todo:
        parser = todo.pop()
        yield parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                todo += action.choices.values()


def test_help_is_in_plain_english() -> None:
    said = {(p.prog, text or "") for p in parsers() for text in (p.description, p.epilog)}
    said |= {(f"{p.prog} {a.dest}", str(a.help or "")) for p in parsers() for a in p._actions}
    found = [f"{where}: {fault}" for where, text in sorted(said) for fault in faults(prose(text))]
    assert len(said) > 200 and not found, "\n".join(found)


MODULES = [p for root in ("core", "kit", "plugins") for p in sorted(ROOT.glob(f"{root}/**/*.py"))]
QUOTED = (  # texts of others: DeepSeek's own prompts, and words to draw prompts from
    "core/ds_runtime/text/formats/dsml.py",
    "core/ds_runtime/text/formats/dsml_v4.py",
    "core/ds_runtime/text/formats/families.py",
    "kit/bench/ds_runtime_bench/serving/prompts.py",
)


def test_messages_are_in_plain_english() -> None:
    """Errors, logs, refusals, plan and doctor: whatever a module says."""
    count, found = 0, []
    for path in (p for p in MODULES if name(p) not in QUOTED):
        for line, text in messages(path.read_text(encoding="utf-8")):
            count += 1
            found += [f"{name(path)}:{line}: {fault}" for fault in faults(prose(text))]
    assert count > 2000 and not found, "\n".join(found)


def test_docstrings_of_public_names_are_in_plain_english() -> None:
    count, found = 0, []
    for path in MODULES:
        for line, of, text in docstrings(path.read_text(encoding="utf-8")):
            count += 1
            found += [f"{name(path)}:{line} {of}: {fault}" for fault in faults(text, entries)]
    assert count > 4000 and not found, "\n".join(found)


def test_no_docstring_only_repeats_its_name() -> None:
    count, found = 0, []
    for path in MODULES:
        for line, of, text in docstrings(path.read_text(encoding="utf-8"), private=True):
            count += 1
            if only_repeats(of, text):
                found.append(f"{name(path)}:{line} {of}: {text}")
    assert count > 5000 and not found, "\n".join(found)


@pytest.mark.parametrize(
    ("of", "text", "repeats"),
    [
        ("Pages.free_pages", "Free the pages.", True),
        ("_FreePages", "The free pages.", True),
        ("sample", "Sample.", True),
        ("sample", "A token for each row.", False),
        ("the module", "Pages of a cache.", False),
        ("is_free", "Whether it is.", False),
    ],
)
def test_a_docstring_that_repeats_its_name_is_found(of: str, text: str, repeats: bool) -> None:
    assert only_repeats(of, text) == repeats


@given(st.lists(SHORT, min_size=1, max_size=5), st.lists(NAME, min_size=1, max_size=5))
def test_entries_of_a_docstring_are_told_apart(several: list[str], names: list[str]) -> None:
    """Sentences may begin in lower case; an entry of a name also ends at a semicolon."""
    texts = [s.lower() for s in several]
    assert entries(". ".join(texts) + ".") == [f"{s}." for s in texts]
    said = [f"{n}: {texts[0]};" for n in names]
    assert entries(" ".join(said)) == said


def test_no_error_has_a_banned_phrase() -> None:
    count, found = 0, []
    for path in MODULES:
        for text in raised(path.read_text(encoding="utf-8")):
            count += 1
            found += [f"{name(path)}: {fault}" for fault in banned(text)]
    assert count > 500 and not found, "\n".join(found)


TEXT = st.lists(WORD, min_size=3, max_size=8).map(" ".join)
SAYS = [  # where a module may say a text
    "raise E({!r})",
    "raise E(f'{{x}}: ' + {!r})",
    "log.info({!r}, x)",
    "def f():\n    'Doc.'\n    return {!r}",
    "class A:\n    def f(self):\n        return [{!r}]",
    "if x:\n    y = z or {!r}",
]


@given(TEXT, st.sampled_from(SAYS))
def test_a_message_is_found_wherever_a_module_says_it(text: str, form: str) -> None:
    (found,) = [said for _, said in messages(form.format(text))]
    assert text in found


DOCUMENTS = [  # (source with a docstring, whether it is of a public name)
    ("{!r}", True),
    ("def f():\n    {!r}", True),
    ("class A:\n    async def f(self):\n        {!r}", True),
    ("if x:\n    def f():\n        {!r}", True),
    ("def _f():\n    {!r}", False),
    ("class _A:\n    def f(self):\n        {!r}", False),
    ("def f():\n    def inner():\n        {!r}", False),
]


@given(TEXT, st.sampled_from(DOCUMENTS))
def test_a_docstring_is_no_message(text: str, case: tuple[str, bool]) -> None:
    form, public = case
    source = form.format(text)
    assert not [*messages(source)]
    assert [doc for _, _, doc in docstrings(source)] == [text] * public


@given(LONG, st.sampled_from(["{}.", "* {}.", "1. {}.", "> {}.", "| {}. | x |", "# {}"]))
def test_a_long_sentence_is_found_wherever_it_stands(text: str, form: str) -> None:
    assert any("words" in fault for fault in faults(f"Before.\n\n{form.format(text)}\n"))


@given(st.lists(SHORT, min_size=1, max_size=5))
def test_sentences_are_told_apart(several: list[str]) -> None:
    assert sentences(". ".join(several) + ".") == [f"{s}." for s in several]


@pytest.mark.parametrize(("phrase", "remedy"), BANNED.values())
def test_every_banned_phrase_is_found_in_prose_and_not_in_code(phrase: str, remedy: str) -> None:
    for text in (phrase, phrase.upper()):
        (fault,) = faults(f"We\n{text} here.\n")
        assert text in fault and remedy in fault
    assert not faults(f"Text.\n\n```\n{phrase}\n```\n\nWith `{phrase}` in it.\n")


def test_links_are_their_text_and_comments_are_nothing() -> None:
    assert blocks("<!-- so many words -->\nSee [the page](a/b.md).\n") == ["See the page."]
