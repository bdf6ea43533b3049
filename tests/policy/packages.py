"""Packages that bring methods, as pip would install them."""

import sys


def install_method(folder, monkeypatch, name, code, cls):
    """Put a module `name` with this code, and its entry point, on the path."""
    (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    )
    points = f"[vllm_h2o.methods]\n{name} = {name}:{cls}\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
