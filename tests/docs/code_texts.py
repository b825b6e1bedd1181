"""Texts of Python source that people read: messages and docstrings, found in its syntax tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

FEWEST = 3  # words: a shorter literal is a name, a unit or a part of a line
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def messages(source: str) -> Iterator[tuple[int, str]]:
    """The line and text of each literal of several words that is no docstring.

    Errors, logs, help, refusals and the lines of plan and doctor are such literals. A value of an
    f-string is one word, VALUE.
    """
    tree = ast.parse(source)
    docs = {id(doc) for _, doc in _documented(tree, "", True)}
    docs |= {id(s.value) for n in ast.walk(tree) for s in _alone(n)}
    for node, text in _texts(tree):
        if id(node) not in docs and len(text.split()) >= FEWEST:
            yield node.lineno, text


def docstrings(source: str, private: bool = False) -> Iterator[tuple[int, str, str]]:
    """The line, name and text of the docstrings of a module and of its public or of all names."""
    for name, doc in _documented(ast.parse(source), "", private):
        yield doc.lineno, name or "the module", str(doc.value)


def only_repeats(name: str, text: str) -> bool:
    """Whether a docstring has no word but those of the name that it is of."""
    words, own = (
        {w.lower().rstrip("s") for w in re.findall(r"[A-Z]?[a-z]+", part)}
        for part in (text, name.rpartition(".")[2])
    )
    little = {
        "the",
        "a",
        "an",
        "of",
        "its",
        "it",
        "thi",
        "i",
        "whether",
        "these",
        "for",
        "in",
        "to",
    }
    return bool(words - little) and words - little <= own


def raised(source: str) -> Iterator[str]:
    """The texts of a module's errors, those of one word among them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield from (text for _, text in _texts(node.exc))


def prose(text: str) -> str:
    """A message as a page: each row of a table with columns of spaces is a paragraph."""
    rows = text.strip().splitlines()
    if len(rows) > 1 and any(re.search(r"\S {2,}\S", row) for row in rows):
        return re.sub(r"\n(?=.*\S {2,}\S)", "\n\n", "\n".join(rows))
    return text


def _texts(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    if isinstance(node, ast.expr) and (text := _text(node)) is not None:
        yield node, text
        return
    for child in ast.iter_child_nodes(node):
        yield from _texts(child)


def _text(node: ast.expr) -> str | None:
    """The text of a literal, or of a sum with one; None of other expressions."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            parts = (str(v.value) if isinstance(v, ast.Constant) else "VALUE" for v in values)
            return "".join(parts)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            both = _text(left), _text(right)
            return None if both == (None, None) else "".join(t or "VALUE" for t in both)
        case _:
            return None


def _documented(node: Documented, name: str, private: bool) -> Iterator[tuple[str, ast.Constant]]:
    """The names and docstrings at and below a node; `private`: also of private names."""
    match node.body:
        case [ast.Expr(value=ast.Constant(value=str()) as doc), *_]:
            yield name, doc
    for child in _defined(node):
        public = not child.name.startswith("_") and not isinstance(node, ast.FunctionDef)
        if public or private:
            yield from _documented(child, f"{name}.{child.name}".lstrip("."), private)


def _defined(node: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """The definitions in a body, also those under an `if` or `try`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from _defined(child)


def _alone(node: ast.AST) -> Iterator[ast.Expr]:
    """Literals that are statements: docstrings of attributes."""
    fields: Mapping[str, object] = dict(ast.iter_fields(node))
    body = fields.get("body")
    for statement in body if isinstance(body, list) else []:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            yield statement
