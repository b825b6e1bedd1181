"""A hook of MkDocs: pages of the root in the site, and links that leave docs/.

`mkdocs build --strict` reads it through mkdocs.yml. README.md becomes the first page. A link to a
file outside the site leads to the repository if DS_REPOSITORY names one, else it is its text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from posixpath import join, normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {  # of the root: what they are called in the site
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
FENCE = r"^ *```.*?^ *```\s*?$"
LINK = r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)"
PARTS = re.compile(rf"{FENCE}|{LINK}|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of the root."""
    for source, target in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrites the links of a page."""
    uri: str = page.file.src_uri
    source = {target: name for name, target in PAGES.items()}.get(uri, f"docs/{uri}")
    inside = {file.src_uri for file in files}
    repository = os.environ.get("DS_REPOSITORY", "").rstrip("/")
    return rewrite(markdown, source, uri, inside, repository)


def rewrite(text: str, source: str, uri: str, inside: set[str], repository: str) -> str:
    """The text of the file `source` with links that hold at `uri` in the site.

    inside: the files of the site. A link to another file of the tree leads to `repository`; if
    that is empty its text remains.
    """

    def link(match: re.Match[str]) -> str:
        image, said, target, anchor = match.groups()  # all None in code
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = normpath(join(source, "..", target))
        own = PAGES.get(path, path.removeprefix("docs/"))
        if own in inside:
            return f"{image}[{said}]({relpath(own, join(uri, '..'))}{anchor or ''})"
        if repository:
            return f"{image}[{said}]({repository}/blob/HEAD/{path}{anchor or ''})"
        return said

    return PARTS.sub(link, text)
