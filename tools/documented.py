"""A name's signature and docstring as Markdown: what the generated pages print of it."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Collection, Iterator
from types import FunctionType
from typing import Any

WIDTH = 100  # of a line of code


def signature(function: Any) -> str:
    """`def name(...) -> ...` on one line if it fits, else a line per argument."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    result = ast.unparse(tree.returns) if tree.returns else "None"
    given = list(arguments(tree.args))
    line = f"def {tree.name}({', '.join(given)}) -> {result}\n"
    if len(line) <= WIDTH:
        return line
    each = "".join(f"    {a},\n" for a in given)
    return f"def {tree.name}(\n{each}) -> {result}\n"


def arguments(args: ast.arguments) -> Iterator[str]:
    """Each argument with its annotation and default, `*` and `**` among them."""
    places = [*args.posonlyargs, *args.args]
    first = len(places) - len(args.defaults)
    for i, a in enumerate(places):
        default = f" = {ast.unparse(args.defaults[i - first])}" if i >= first else ""
        yield ast.unparse(a) + default
    if args.vararg or args.kwonlyargs:
        yield f"*{ast.unparse(args.vararg) if args.vararg else ''}"
    for a, value in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield ast.unparse(a) + (f" = {ast.unparse(value)}" if value else "")
    if args.kwarg:
        yield f"**{ast.unparse(args.kwarg)}"


def class_head(kind: type, public: Collection[str]) -> str:
    """`class Name(Base):` and its fields, each with its type and default, as the source has them.

    public: names of bases that are shown.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    bases = ", ".join(b for b in map(ast.unparse, tree.bases) if b in public)
    lines = [f"class {kind.__name__}{f'({bases})' if bases else ''}"]
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            private = node.target.id.startswith("_") or "ClassVar" in ast.unparse(node.annotation)
            lines += [] if private else [f"    {ast.unparse(node)}"]
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            lines += [f"    {a}" for a in arguments(node.args) if a != "self"]
    return "\n".join(lines) + "\n"


def methods(kind: type) -> Iterator[tuple[str, Any, bool]]:
    """(name, function, whether it is a property) of each public method with a docstring."""
    for name, member in vars(kind).items():
        function = member.fget if isinstance(member, property) else member
        function = getattr(function, "__func__", function)  # of a static or class method
        if isinstance(function, FunctionType) and name[0] != "_" and function.__doc__:
            yield name, function, isinstance(member, property)


def text(documented: Any, names: Collection[str] = ()) -> str:
    """A docstring, with a list item for each entry `name: text` of its paragraphs and lists.

    names: of fields or arguments. Several may share an entry, "a, b: text", and a shape may follow
    a name. What follows the last entry of a paragraph and says what is raised is not of the list.
    """
    doc = inspect.getdoc(documented) or ""
    return "\n\n".join(_listed(part, names) for part in doc.split("\n\n"))


def _listed(part: str, names: Collection[str]) -> str:
    if not names or part.startswith(("    ", "1. ")):
        return part
    bullets = part.split("\n* ") if part.startswith("* ") else [part]
    pieces = [piece for b in bullets for piece in _entries(b.removeprefix("* "), names)]
    if pieces == [" ".join(part.split())] and not re.match(_name(names), pieces[0]):
        return part
    is_list = part.startswith("* ") or re.match(_name(names), pieces[0])
    lead = [] if is_list else [pieces.pop(0)]
    after = list[str]()
    if bullets == [part]:
        pieces[-1], *after = re.split(r"(?<=\.) (?=(?:Raises|Returns) )", pieces[-1], maxsplit=1)
    shown = "\n".join(f"* {_marked(piece, names)}" for piece in pieces)
    return "\n\n".join([*lead, shown, *after])


def _name(names: Collection[str]) -> str:
    """A pattern of the names of an entry, with its colon."""
    name = rf"`?(?:{'|'.join(map(re.escape, names))})`?(?: \[[^\]]*\])?"
    return rf"{name}(?:(?:, | and ){name})*: "


def _entries(part: str, names: Collection[str]) -> list[str]:
    """A paragraph, cut before each entry."""
    words = " ".join(part.split())
    return [s.removesuffix(";") for s in re.split(rf"(?<=[.;)])\s+(?={_name(names)})", words)]


def _marked(piece: str, names: Collection[str]) -> str:
    """An item, with the names of its entry as code."""
    if re.match(_name(names), piece) is None:
        return piece
    said, _, rest = piece.partition(": ")
    known = re.sub(r"`?\b(?!and\b)([a-zA-Z_]\w*)\b`?(?![^\[]*\])", r"`\1`", said)
    further = rf"\b({'|'.join(map(re.escape, names))})(?=: \[)"
    return f"{known}: " + re.sub(further, r"`\1`", rest)
