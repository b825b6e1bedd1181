"""The documentation site builds without a warning, and has every page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import site_hook as site

ROOT = Path(__file__).parents[2]


def nav(entry: object) -> list[str]:
    """The pages below an entry of mkdocs.yml."""
    if isinstance(entry, str):
        return [entry]
    values = entry if isinstance(entry, list) else list(entry.values())  # type: ignore[attr-defined]
    return [page for value in values for page in nav(value)]


def named() -> list[str]:
    text = (ROOT / "mkdocs.yml").read_text().replace("!ENV ", "")
    return nav(yaml.safe_load(text)["nav"])


def test_every_page_is_in_the_navigation_once() -> None:
    pages = {p.relative_to(ROOT / "docs").as_posix() for p in ROOT.glob("docs/**/*.md")}
    assert sorted(named()) == sorted(pages | set(site.PAGES.values()))


class Links(HTMLParser):
    """The targets of a page's links and images, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key in ("href", "src") and value and "://" not in value:
                self.targets.append(value)
            elif key == "id" and value:
                self.anchors.add(value)


def test_the_site_builds_and_its_links_hold(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    env = {k: v for k, v in os.environ.items() if k != "DS_REPOSITORY"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path: Links(path.read_text()) for path in tmp_path.rglob("*.html")}
    assert len(pages) >= len(named())
    for path, links in pages.items():
        if path.name == "404.html":  # its links are of the server's root
            continue
        for target in links.targets:
            file, _, anchor = target.partition("#")
            to = (path.parent / file).resolve() if file else path
            to = to / "index.html" if to.is_dir() else to
            assert to.exists(), f"{path.relative_to(tmp_path)} links to {target}"
            if anchor and to in pages:
                assert anchor in pages[to].anchors, f"{path.relative_to(tmp_path)}: {target}"


@pytest.mark.parametrize(
    ("text", "source", "uri", "wanted"),
    [
        ("[a](docs/api.md#x)", "README.md", "index.md", "[a](api.md#x)"),
        ("[`a`](docs/api.md)", "README.md", "index.md", "[`a`](api.md)"),
        ("![a](docs/x.png)", "README.md", "index.md", "![a](x.png)"),
        ("[a](../README.md)", "docs/api.md", "api.md", "[a](index.md)"),
        ("[a](../../README.md)", "docs/t/p.md", "t/p.md", "[a](../index.md)"),
        ("[a](../core/x.py)", "docs/api.md", "api.md", "a"),
        ("[a](https://b.c/d)", "docs/api.md", "api.md", "[a](https://b.c/d)"),
        ("[a](#b)", "docs/api.md", "api.md", "[a](#b)"),
        ("`[a](../core/x.py)`", "docs/api.md", "api.md", "`[a](../core/x.py)`"),
        ("```\n[a](../x.py)\n```", "docs/api.md", "api.md", "```\n[a](../x.py)\n```"),
    ],
)
def test_links_hold_where_the_page_stands(text: str, source: str, uri: str, wanted: str) -> None:
    inside = {"api.md", "index.md", "x.png", "t/p.md"}
    assert site.rewrite(text, source, uri, inside, "") == wanted


def test_links_out_of_the_site_lead_to_the_repository() -> None:
    made = site.rewrite("[a](../core/x.py#L3)", "docs/api.md", "api.md", set(), "https://r.x/o/n")
    assert made == "[a](https://r.x/o/n/blob/HEAD/core/x.py#L3)"


@given(st.text("ab `[]()!\n#./:", max_size=60))
def test_text_without_links_is_kept(text: str) -> None:
    if not re.search(site.LINK, text):
        assert site.rewrite(text, "docs/api.md", "api.md", set(), "") == text
