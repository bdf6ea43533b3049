"""Packages that bring methods or kernels, as pip would install them."""

import re
import sys
from pathlib import Path

from vllm_h2o.attention.ops import ENTRY_POINTS as KERNELS
from vllm_h2o.policy.methods import ENTRY_POINTS as METHODS

DOCS = Path(__file__).parents[2] / "docs"


def example_of(page):
    """The code of a page of the docs."""
    text = (DOCS / page).read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    return code


def install_method(folder, monkeypatch, name, code, cls):
    """Put a module `name` with this code, and its entry point, on the path."""
    _install(folder, monkeypatch, name, code, METHODS, f"{name}:{cls}")


def install_kernels(folder, monkeypatch, name, code):
    """Likewise a module that is what kernels have to be."""
    _install(folder, monkeypatch, name, code, KERNELS, name)


def _install(folder, monkeypatch, name, code, group, value):
    (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
