"""Records what vendors' functions take, for tests of the plugins that call them.

    python tools/record_signatures.py FILE PACKAGE --source "amd-aiter e4048607a5" [--add NAME …]

PACKAGE is a wheel, or the folder that holds the vendor's package: nothing of it is imported. FILE,
tests/plugins/signatures/*.json, says which functions: "module:function" and "module:Class.method"
are read from Python's source, "torch_npu:op" from the list of op schemas that torch-npu ships, ops
of SCHEMAS' other modules from the binary that registers them.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Root = Path | zipfile.Path
SCHEMAS = {
    "torch_npu": "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml",
    "vllm_xpu_kernels._C": "vllm_xpu_kernels/_C.abi3.so",
    "vllm_xpu_kernels._xpu_C": "vllm_xpu_kernels/_xpu_C.abi3.so",
}
_FUNC = re.compile(r"func: ([\w.]+)(\(.*)")
_OUT = re.compile(r", Tensor\(a!\) \w+(?:, Tensor\([b-z]!\) \w+)+\) -> .*")
_TEXT = re.compile(rb"(\w+)(\([^\0]*\) -> [^\0]+)\0")


class NotFoundError(Exception):
    """The package has no such function."""


def signature(root: Root, name: str) -> str:
    """Of "module:function": "(a, b=1, *, c=None)", or an op's "(Tensor a, *, int b=1) -> Tensor".

    Annotations are left out, defaults are as written. Raises NotFoundError.
    """
    module, _, path = name.partition(":")
    if module in SCHEMAS:
        return schemas(root, SCHEMAS[module])[path]
    node = _definition(root, module, path.split("."))
    arguments = node.args
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return f"({ast.unparse(arguments)})"


def schemas(root: Root, file: str) -> dict[str, str]:
    """Op or "op.overload" → arguments and results, of a list or binary in torch's own notation.

    What a list has as several results to fill is registered as one list of them, `out`: so says
    torchnpugen/custom_functions.py, which torch-npu ships beside it.
    """
    if file.endswith(".so"):
        texts = _TEXT.findall((root / file).read_bytes())
        return {name.decode(): text.decode().replace(" )", ")") for name, text in texts}
    found = (_FUNC.search(line) for line in (root / file).read_text("utf-8").splitlines())
    return {m[1]: _OUT.sub(_one_list, m[2].strip()) for m in found if m}


def _one_list(found: re.Match[str]) -> str:
    results = ", ".join(["Tensor"] * found[0].partition(" -> ")[0].count("!"))
    return f", Tensor[] out) -> ({results})"


def _definition(
    root: Root, module: str, path: list[str], through: tuple[str, ...] = ()
) -> ast.FunctionDef:
    """The function of a module, or of what it imports; `through`: modules that led here."""
    if module in through:
        raise NotFoundError(f"{module} imports itself")
    through = (*through, module)
    tree = ast.parse(_file(root, module).read_text("utf-8"))
    for node in _bound(tree.body):
        if isinstance(node, ast.FunctionDef) and [node.name] == path:
            return node
        if isinstance(node, ast.ClassDef) and node.name == path[0]:
            methods = (n for n in node.body if isinstance(n, ast.FunctionDef))
            found = [n for n in methods if [n.name] == path[1:]]
            if found:
                return found[-1]  # behind its overloads
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            names = [t.id for t in node.targets if isinstance(t, ast.Name)]
            if path[0] in names and node.value.id != path[0]:
                return _definition(root, module, [node.value.id, *path[1:]], through[:-1])
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name == "*" or (alias.asname or alias.name) == path[0]:
                    inside = _source(root, module, node)
                    there = path if alias.name == "*" else [alias.name, *path[1:]]
                    try:
                        return _definition(root, inside, there, through)
                    except (NotFoundError, OSError):
                        continue
    raise NotFoundError(f"{module} has no {'.'.join(path)}")


def _bound(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module's top level, also inside `if` and `try`, later ones first."""
    for node in reversed(body):
        if isinstance(node, ast.If | ast.Try):
            handlers = [s for h in getattr(node, "handlers", ()) for s in h.body]
            yield from _bound([*handlers, *node.orelse, *node.body])
        yield node


def _source(root: Root, module: str, node: ast.ImportFrom) -> str:
    """The absolute name of the module that an import statement names."""
    if not node.level:
        return node.module or ""
    package = module if _is_package(root, module) else module.rpartition(".")[0]
    for _ in range(node.level - 1):
        package = package.rpartition(".")[0]
    return f"{package}.{node.module}" if node.module else package


def _is_package(root: Root, module: str) -> bool:
    return (root / f"{module.replace('.', '/')}/__init__.py").is_file()


def _file(root: Root, module: str) -> Root:
    path = module.replace(".", "/")
    file = root / (f"{path}/__init__.py" if _is_package(root, module) else f"{path}.py")
    if not file.is_file():
        raise NotFoundError(f"there is no module {module}")
    return file


def differences(record: Path, root: Root) -> list[str]:
    """A sentence for every function of the record that the package in `root` has otherwise."""
    said = []
    for name, wanted in json.loads(record.read_text())["calls"].items():
        try:
            found = signature(root, name)
        except (NotFoundError, KeyError) as e:
            said.append(f"{name}: {e}")
            continue
        if found != wanted:
            said.append(f"{name} takes {found}, recorded {wanted}")
    return said


def installed_root(record: Path) -> Path | None:
    """The folder that holds the record's package here, if it is installed; it is not imported.

    A record of a package whose module has another package's name says so by "distribution".
    """
    content = json.loads(record.read_text())
    if "distribution" in content and not list(distributions(name=content["distribution"])):
        return None
    first = next(iter(content["calls"]))
    try:
        spec = find_spec(first.partition(":")[0].partition(".")[0])
    except (ImportError, ValueError):
        return None
    origin = spec.origin if spec is not None else None
    return Path(origin).parents[1] if origin else None


def _rest(content: dict[str, Any]) -> dict[str, Any]:
    """What a record says beside what is read."""
    return {k: v for k, v in content.items() if k not in ("source", "input", "calls")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("package", type=Path)
    parser.add_argument("--source", required=True, help="distribution and release, as recorded")
    parser.add_argument("--add", nargs="*", default=[], metavar="NAME")
    given = parser.parse_args()
    root: Root = given.package
    if given.package.suffix == ".whl":
        root = zipfile.Path(given.package)
    content = json.loads(given.file.read_text()) if given.file.exists() else {"calls": {}}
    names = sorted({*content["calls"], *given.add})
    read = {"calls": {name: signature(root, name) for name in names}}
    content = {"source": given.source, "input": given.package.name} | _rest(content) | read
    given.file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(names)} signatures in {given.file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
