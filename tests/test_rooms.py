"""Nothing imports upward: policy <- core <- attention <- calibration <- plugin."""

import ast
from pathlib import Path

import pytest

import vllm_h2o

ROOT = Path(vllm_h2o.__file__).parent
ROOMS = {
    "policy": {"policy"},
    "core": {"policy", "core"},
    "attention": {"policy", "core", "attention"},
    "calibration": {"policy", "core", "attention", "calibration"},
    "plugin": {"policy", "core", "attention", "calibration", "plugin"},
}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            yield node.module


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_imports_upward(room):
    modules = list((ROOT / room).rglob("*.py"))
    assert len(modules) > 1
    for path in modules:
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "vllm_h2o":
                assert parts[1] in ROOMS[room], f"{path} imports {name}"
            if room == "policy":
                assert parts[0] != "vllm", f"{path} imports {name}"
