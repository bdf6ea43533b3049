"""Which tests hold which rules of docs/design.md: `python -m tests.rules`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
DESIGN = TESTS.parent / "docs" / "design.md"


def rules() -> list[str]:
    """The numbers in the order of the page."""
    return re.findall(r"\*\*(R\d+)\*\*", DESIGN.read_text())


def holders() -> Iterator[tuple[str, str]]:
    """Numbers and the tests that carry them, `@pytest.mark.rule("R1", ..)`."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for mark in getattr(node, "decorator_list", ()):
                if ast.unparse(mark).startswith("pytest.mark.rule("):
                    for rule in mark.args:
                        yield rule.value, f"{path.relative_to(TESTS)}::{node.name}"


def main() -> None:
    """Print each rule with its tests."""
    found = [*holders()]
    for rule in rules():
        print(rule, *(test for carried, test in found if carried == rule), sep="\n    ")


if __name__ == "__main__":
    main()
