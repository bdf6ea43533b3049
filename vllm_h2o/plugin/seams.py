"""The names of vLLM that H2O subclasses, calls or reads, and whether a vLLM has them.

    python -m vllm_h2o.plugin.seams [FOLDER [FOLDER]]

says of the installed vLLM, or of the one whose `.py` files lie in a folder, which seams
are not as `SEAMS` has them; of two folders, which differ between them, with the lines.
Nothing of vLLM is imported: its files are parsed, so that this also works where its
compiled part, or its torch, is not installed. Parsing takes seconds, so that an engine
that is asked for a policy does it only under a vLLM that is none of `RELEASES`.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from vllm_h2o.core.compat import INSTALL
from vllm_h2o.plugin.seam_table import SEAMS


class Sources:
    """A folder with vLLM's `.py` files: the one that has `v1/` and `engine/`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._parsed = functools.cache(self._parse)

    def describe(self, seam: str) -> str | None:
        """Parameters of a function, bases of a class, annotation of an attribute; None:
        there is none of that name."""
        node = self._find(seam)
        if node is None:
            return None
        if isinstance(node, ast.ClassDef):
            return f"class ({', '.join(map(ast.unparse, node.bases))})"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return f"({_parameters(node)})"
        if isinstance(node, ast.AnnAssign):
            return f"is {ast.unparse(node.annotation)}"
        return ""

    def text(self, seam: str) -> list[str]:
        """The lines of a seam's definition, without its docstring."""
        node = self._find(seam)
        if node is None:
            return []
        for each in ast.walk(node):
            body = getattr(each, "body", None)
            if isinstance(body, list) and body and _is_docstring(body[0]):
                each.body = body[1:] or [ast.Pass()]  # type: ignore[attr-defined]
        return ast.unparse(node).splitlines()

    def _parse(self, module: str) -> dict[str, ast.AST]:
        path = self._root.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return dict(_definitions(ast.parse(file.read_bytes()).body))
        return {}

    def _find(self, seam: str) -> ast.AST | None:
        module, _, name = seam.partition(":")
        return self._parsed(module).get(name)


def drift(sources: Sources) -> dict[str, str]:
    """Of the seams that are not as `SEAMS` has them, what they are instead."""
    forms = {seam: sources.describe(seam) for seam in SEAMS}
    return {
        seam: "is gone" if form is None else f"has become {form or 'a plain name'}"
        for seam, form in forms.items()
        if form not in SEAMS[seam]
    }


def installed() -> Sources:
    """The vLLM that this Python would import."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise SystemExit("vLLM is not installed: give the folder of its .py files")
    return Sources(Path(spec.origin).parent)


@functools.cache  # each process asks several times
def check_seams() -> None:
    """Raise ValueError where the installed vLLM is not what H2O's classes extend."""
    if differing := drift(installed()):
        first = "; ".join(f"{seam} {how}" for seam, how in [*differing.items()][:3])
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise ValueError(
            "a KV policy (--kv-policy) is given, but this vLLM is not as those that "
            f"vllm-h2o is for: {first}{more}: {INSTALL}, or drop --kv-policy "
            "(kv_policy, enable_h2o)"
        )


def _definitions(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """What a module defines, with the members of its classes, by name.

    The first definition of a name comes last, so that `dict` keeps it.
    """
    for node in reversed([*_flat(body)]):
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{x}", member) for x, member in _members(node))
            yield node.name, node
        else:
            yield from ((name, node) for name in _names(node))


def _members(cls: ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    """What a class body defines, and `self.name = ..` of its methods."""
    assigned = [x for x in ast.walk(cls) if isinstance(x, ast.Assign | ast.AnnAssign)]
    # An annotation says more, and the class body most.
    for node in sorted(assigned, key=lambda x: isinstance(x, ast.AnnAssign)):
        for target in _targets(node):
            if isinstance(target, ast.Attribute) and _is_self(target.value):
                yield target.attr, node
    yield from _definitions(cls.body)


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _flat(node.body)
            yield from _flat(node.orelse)


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    return {x.id for x in _targets(node) if isinstance(x, ast.Name)}


def _targets(node: ast.stmt) -> Iterator[ast.AST]:
    given = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        given = [node.target]
    for target in given:
        yield from ast.walk(target)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Names; `=` where there is a default. Annotations may change."""
    a = function.args
    by_place = a.posonlyargs + a.args
    required = len(by_place) - len(a.defaults)
    names = [x.arg + "=" * (i >= required) for i, x in enumerate(by_place)]
    if a.vararg or a.kwonlyargs:
        names.append("*" + (a.vararg.arg if a.vararg else ""))
    for x, default in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        names.append(x.arg + "=" * (default is not None))
    if a.kwarg:
        names.append("**" + a.kwarg.arg)
    return ", ".join(names)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _compare(old: Sources, new: Sources) -> Iterator[str]:
    for seam in SEAMS:
        before, after = old.text(seam), new.text(seam)
        if before != after:
            yield f"\n== {seam}"
            yield from [*difflib.unified_diff(before, after, lineterm="", n=2)][2:]


def main(argv: list[str] | None = None) -> int:
    """Print what has drifted; 1 if anything has."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path)
    folders = parser.parse_args(argv).folders
    for folder in folders:
        if not (folder / "v1").is_dir():
            parser.error(f"{folder} has no folder v1: give vLLM's own, .../vllm")
    if len(folders) > 2:
        parser.error("give no folder, one, or two")
    if len(folders) == 2:
        print("\n".join(_compare(*map(Sources, folders))))
        return 0
    sources = Sources(folders[0]) if folders else installed()
    lines = [f"{seam} {how}" for seam, how in drift(sources).items()]
    print("\n".join([*lines, f"{len(SEAMS)} seams, {len(lines)} have drifted"]))
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
